"""`slimserve PROFILE --bench`: launch it, or go to servers that run, have the workloads, and say what came of them."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness import client, host, recall_part, tables, workload
from harness.address import Address, NoAddress
from harness.bench import Side, bench, form_for
from harness.prompts import Form, PromptSource
from harness.receipt import BATTERY_MEANING, Point, PromptFacts, Quantiles, Receipt, Target, WorkloadFacts, find
from harness.recording import Facts, profile_facts, weights_facts, without_secrets
from harness.workload import Loaded
from slimserve import exposure, keys_command, run
from slimserve.admission.keys import API_KEY_VARIABLE
from slimserve.engine import ENGINE_VERSION
from slimserve.engine.gate.words import RESOLVED_NAME
from slimserve.errors import Finding, Refused, UsageError
from slimserve.profile import Profile
from slimserve.session import Session
from slimserve.shapes import ShapeError, build
from slimserve.subject import Subject
from slimserve.telling import say

# The key of the servers that --against names: ours must not travel to them.
AGAINST_KEY_VARIABLE = "SLIMSERVE_AGAINST_KEY"
LOOPBACK = "127.0.0.1"
# A busy server answers late, and what is not known once is not known of the whole load.
METRICS_SECONDS = 60.0


@dataclass(frozen=True)
class Asked:
    """What the command line says.

    Args:
        workload: name or file; None: those that are the default for the profile's platform.
        against: addresses of servers; empty: the profile is launched.
        models: the name of the model on each of them.
        seed: of prompts and of all that is drawn.
        command: the command line itself.
        recall: the battery that is asked; None: the one for the profile.
    """

    workload: str | None
    against: tuple[str, ...]
    models: tuple[str, ...]
    seed: int
    command: tuple[str, ...]
    recall: str | None = None


def main(session: Session, profile: Profile, asked: Asked) -> int:
    """Measure, write receipts, print what came.

    Returns:
        0 when every receipt is whole and no battery failed or was interrupted, else 1.

    Raises:
        UsageError, RegistryError: there is no such workload or battery, or its file is wrong.
        Refused: it cannot or must not run here.
        Failed: the engine did not become ready, or a receipt could not be written.
    """
    subject = session.registry.subject(profile)
    if asked.workload is not None:
        chosen = [workload.load(asked.workload)]
    else:
        chosen = workload.defaults("cpu" if subject.platform.gpus is None else "gpu")
    preset = recall_part.choose(asked.recall, subject, launched=not asked.against)
    recall = None if preset is None else recall_part.Recall(preset, sys.stderr)
    folder = session.registry.folder / "receipts"
    sides = against(session, asked)
    if not sides:
        fit(chosen, subject)
    receipts: list[Receipt] = []
    with _stoppable(), contextlib.ExitStack() as stack:
        if not sides:
            sides = [stack.enter_context(launched(session, profile, asked.command))]
        tokenizer = session.weights(subject).folder / "tokenizer.json"
        form: Form = "ids"
        if asked.against:
            forms = {form_for(side.target, PromptSource(tokenizer, "which form", works=("devil",))) for side in sides}
            form = "text" if "text" in forms else "ids"
        for loaded in chosen:
            source = PromptSource(tokenizer, f"{asked.seed}/{loaded.workload.id}", form, loaded.workload.works)
            digits = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
            paths = bench(loaded, sides, source, digits, asked.seed, folder, sys.stderr, recall)
            fresh = [find(folder, str(path)) for path in paths]
            for receipt, path in zip(fresh, paths, strict=True):
                print(table(receipt), flush=True)
                print(f"receipt: {path}", flush=True)
            receipts += fresh
            if any(receipt.outcome == "aborted" or receipt.recall_verdict == "aborted" for receipt in fresh):
                break
    for receipt in receipts:
        if (verdict := receipt.recall_verdict) not in (None, "pass"):
            say(f"recall {verdict}, {receipt.target.name}: {BATTERY_MEANING[verdict]}")
    good = all(receipt.outcome == "whole" and receipt.recall_verdict not in ("fail", "aborted") for receipt in receipts)
    return 0 if good else 1


def fit(chosen: Sequence[Loaded], subject: Subject) -> None:
    """See that the profile's contexts are as long as the workloads'.

    Raises:
        Refused: they are not.
    """
    longest = subject.profile.engine.max_model_len.value
    for loaded in chosen:
        if loaded.longest_tokens > longest:
            every = [workload.load(name) for name in workload.names()]
            fitting = [one.workload.id for one in every if one.longest_tokens <= longest]
            raise Refused(
                Finding(
                    f"{loaded.workload.id} asks for contexts of {loaded.longest_tokens:,} tokens",
                    f"{subject.profile.id} takes {longest:,} (engine.max_model_len)",
                    f"use one that fits: {', '.join(fitting)}",
                )
            )


def against(session: Session, asked: Asked) -> list[Side]:
    """The servers of the command line.

    Raises:
        UsageError: an address is none, a receipt could not name the model, the key cannot be sent, or there are not as
            many models as servers.
    """
    if len(asked.models) != len(asked.against):
        what = f"{len(asked.against)} --against and {len(asked.models)} --model are given"
        raise UsageError(Finding(what, "a server may serve several models", "give one --model for each --against"))
    key = os.environ.get(AGAINST_KEY_VARIABLE) or None
    if key is not None and not re.fullmatch(r"[ -~]+", key):
        why = "it is sent in a header, which takes printable ASCII alone"
        raise UsageError(Finding(f"{AGAINST_KEY_VARIABLE} is no key", why, "give it without line ends and the like"))
    return [_server(session, asked, url, model, key) for url, model in zip(asked.against, asked.models, strict=True)]


def _server(session: Session, asked: Asked, url: str, model: str, key: str | None) -> Side:
    try:
        place = Address.of(url)
    except NoAddress as error:
        # Before an @, and behind a question mark, stand passwords and keys.
        shown = " whose URL is not repeated here" if set(url) & set("@?#") else f" {url[:80]!r}"
        do = f"give its root, such as http://127.0.0.1:8000/v1; a key goes into {AGAINST_KEY_VARIABLE}"
        raise UsageError(Finding(f"--against{shown} is no address of a server", str(error), do)) from None
    address = url.rstrip("/")
    root = address.removesuffix("/v1")
    named = {"kind": "server", "name": without_secrets(address), "model": model, "api": "completions"}
    try:
        target = build(Target, named)
    except ShapeError as error:
        what = f"--model {model[:80]!r} is no name of a model"
        do = "give the name under which the server lists it (/v1/models)"
        raise UsageError(Finding(what, f"the receipt has to name it: {error.problems[0].why}", do)) from None
    return Side(
        name=f"{place.host}-{place.port}",
        target=client.Target(address, model, key),
        facts=_Known(session, asked.command, target),
        metrics=lambda: get_text(f"{root}/metrics", key),
        check=lambda: None,
    )


@dataclass(frozen=True)
class _Known:
    """What a receipt says beside workload and prompts; the arguments are those of `harness.recording.Facts`."""

    session: Session
    command: tuple[str, ...]
    target: Target
    subject: Subject | None = None
    resolved_sha256: str | None = None
    start_seconds: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: Callable[[], int | None] = lambda: None

    def __call__(self, asked: WorkloadFacts, prompts: PromptFacts, together: str | None) -> Facts:
        subject, registry = self.subject, self.session.registry.folder
        return Facts(
            commit=host.commit(),
            command=self.command,
            host=host.fingerprint(self.session.machine),
            versions=host.versions(),
            target=self.target,
            profile=None
            if subject is None
            else profile_facts(subject, registry / f"{subject.profile.id}.yaml", ENGINE_VERSION),
            weights=None if subject is None else weights_facts(subject, registry),
            resolved_sha256=self.resolved_sha256,
            start_seconds=self.start_seconds,
            memory_bytes=self.memory_bytes(),
            workload=asked,
            prompts=prompts,
            together=together,
        )


@contextlib.contextmanager
def launched(session: Session, profile: Profile, command: tuple[str, ...]) -> Iterator[Side]:
    """The profile's endpoint on a free port of loopback, as `--serve` launches it, as long as `with` lasts."""
    key = exposure.environment_key(session.environment)
    if key is None and exposure.keys(session.environment, LOOPBACK).required:
        # The keys file holds hashes, none of which opens anything: this run makes a key that lives as long as it.
        key = keys_command.new_key()
        session = replace(session, environment={**session.environment, API_KEY_VARIABLE: key})
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    engine = run.launch(session, profile, LOOPBACK, port, measured=True)
    run_folder = engine.log_path.parent
    target = Target(kind="profile", name=profile.id, model=profile.id, api="completions")
    with engine:
        resolved = json.loads((run_folder / RESOLVED_NAME).read_text())["sha256"]
        start = {state.value: round(seconds, 1) for state, seconds in engine.board.start_seconds.items()}
        subject = session.registry.subject(profile)
        yield Side(
            name=profile.id,
            target=client.Target(engine.base_url, profile.id, key),
            facts=_Known(session, command, target, subject, resolved, start, engine.memory_bytes),
            metrics=lambda: engine.control.metrics(METRICS_SECONDS),
            check=engine.check,
            slots=profile.engine.max_num_seqs.value,
        )


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does: with a receipt of what had come."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A shell has what it starts in the background ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def get_text(url: str, key: str | None) -> str | None:
    """A text over HTTP; None when there is none to be had."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=METRICS_SECONDS) as answer:
            text: str = answer.read(16 << 20).decode(errors="replace")
            return text
    except (OSError, ValueError, http.client.HTTPException):
        return None


def table(receipt: Receipt) -> str:
    """The numbers of a receipt for a terminal."""
    head = f"{receipt.target.name}  {receipt.workload.name}  {receipt.outcome}"
    lines = [head, *(f"  {reason}" for reason in receipt.reasons)]
    columns = ("load", "answers", "tok/s", "TTFT ms", "p99", "ITL ms", "p99", "tok/s/user p90", "cached", "accepted")
    rows: list[tuple[str, ...]] = [columns, *(_row(point) for point in receipt.points)]
    if not tables.drafted(receipt.points):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells))
    lines += [f"  {point.setup.name}: {note}" for point in receipt.points for note in point.notes]
    lines += [f"  {line}" for line in tables.recall(receipt)]
    return "\n".join(lines)


def _row(point: Point) -> tuple[str, ...]:
    def shown(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    def half_and_most(times: Quantiles | None) -> tuple[str, str]:
        return ("-", "-") if times is None else (shown(times.p50), shown(times.p99))

    cached = None if point.cached_tokens is None else point.cached_tokens / max(point.prompt_tokens, 1)
    return (
        point.setup.name,
        f"{point.ok}/{point.sent}",
        shown(point.output_tokens_per_s),
        *half_and_most(point.ttft_ms),
        *half_and_most(point.itl_ms or point.tpot_ms),
        shown(point.interactivity_p90),
        "-" if cached is None else f"{cached:.0%}",
        tables.length(point.server),
    )
