"""`slimserve --receipts`: list, show, verify, compare, report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import tables
from harness.receipt import MEANING, Point, Receipt, all_in, find
from slimserve.errors import Failed, Finding, UsageError
from slimserve.machine import counted
from slimserve.registry import Registry
from slimserve.shapes import nearest, plain

Answer = tuple[Any, Callable[[], str]]
"""JSON data, and the same for a person"""

USAGE = "list [PROFILE], show ID, verify [ID ...], compare ID ID, report [ID ...]"
_COUNTS = {"list": (0, 1), "show": (1, 1), "verify": (0, None), "compare": (2, 2), "report": (0, None)}


def answer(registry: Registry, words: Sequence[str]) -> Answer:
    """What `--receipts WORDS` answers.

    Args:
        registry: whose receipts.
        words: what to do, and to which; nothing: list.

    Raises:
        UsageError: the words are not understood, or name what is not there or cannot be read.
        Refused: two receipts must not be compared.
        Failed: one does not prove what it says.
    """
    verb, *names = words or ("list",)
    if verb not in _COUNTS:
        do = f"use {USAGE}"
        with contextlib.suppress(UsageError):  # it is no profile either
            if not names and registry.candidates(verb):
                do = f"slimserve --receipts list {verb}"
        raise UsageError(Finding(f"--receipts {verb} is not understood", nearest(verb, _COUNTS), do))
    fewest, most = _COUNTS[verb]
    if len(names) < fewest or (most is not None and len(names) > most):
        what = f"--receipts {verb} was given {counted(len(names), 'name')}"
        raise UsageError(Finding(what, "the command line is not understood", f"use {USAGE}"))
    folder = registry.folder / "receipts"
    if verb == "list":
        return _list(registry, folder, names)
    if verb == "show":
        receipt = find(folder, names[0])
        return plain(receipt), lambda: _show(receipt, registry)
    if verb == "compare":
        return _compare(folder, *names)
    if verb == "verify":
        return _verify(registry, folder, names)
    return _report(folder, names)


def _list(registry: Registry, folder: Path, names: Sequence[str]) -> Answer:
    from harness import journal

    receipts, unusable = all_in(folder)
    unfinished = journal.left(folder)
    wanted = {profile.id for name in names for profile in registry.candidates(name)}
    shown = [one for one in receipts if not wanted or (one.profile and one.profile.id in wanted)]
    data = {
        "receipts": [
            {
                "id": one.id,
                "written": one.written,
                "outcome": one.outcome,
                "recall": one.recall_verdict,
                "target": one.target.name,
                "workload": one.workload.name,
                "commit": one.commit,
                "points": {
                    point.setup.name: {
                        "output_tokens_per_s": point.output_tokens_per_s,
                        "interactivity_p90": point.interactivity_p90,
                        "noise": point.noise,
                    }
                    for point in one.points
                },
            }
            for one in shown
        ],
        "unusable": [{"file": one.name, "problem": one.problem} for one in unusable],
        "unfinished": [{"file": one.name, "problem": one.problem} for one in unfinished],
    }

    def text() -> str:
        lines = [f"{one.id}  {one.outcome}  {one.target.name}  {one.workload.name}  {_best(one)}" for one in shown]
        lines += [f"{one.name}  is no receipt: {one.problem}" for one in (*unusable, *unfinished)]
        return "\n".join(map(_safe, lines)) or "no receipt yet: slimserve PROFILE --bench writes one"

    return data, text


def _best(receipt: Receipt) -> str:
    rates = [point.output_tokens_per_s for point in receipt.points if point.output_tokens_per_s is not None]
    fastest = f"up to {tables.amount(max(rates))} tokens/s" if rates else "no numbers"
    return f"{fastest}  recall {tables.verdict(receipt)}" if receipt.battery else fastest


def _show(receipt: Receipt, registry: Registry) -> str:
    from harness.verify import covers

    host = receipt.host
    gpus = f", {len(host.gpus)} x {host.gpus[0]}" if host.gpus else ""
    lines = [
        f"{receipt.id}: {receipt.outcome}, {MEANING[receipt.outcome]}",
        *(f"  because   {reason}" for reason in receipt.reasons),
        *(f"  {line}" for line in tables.recall(receipt)),
        f"  served    {receipt.target.name} as {receipt.target.model}, {covers(receipt, registry)}",
        f"  workload  {receipt.workload.name}, seed {receipt.workload.seed}, {receipt.prompts.corpus}",
        f"  machine   {host.cpu or host.architecture}, {counted(host.cores, 'core')}{gpus} ({host.id[:8]})",
        f"  written   {receipt.written} by slimserve {receipt.commit}",
        f"  command   {' '.join(receipt.command)}",
        f"  samples   {receipt.samples.count} in {receipt.samples.file}",
    ]
    for point in receipt.points:
        lines += ["", *_point(point)]
    return "\n".join(map(_safe, lines))


def _point(point: Point) -> list[str]:
    noise = ", ".join(f"{name} {value:.1%}" for name, value in point.noise.items()) or "not known of one round"
    lines = [
        f"  {point.setup.name}: {tables.load(point)}, {point.rounds} rounds, {tables.amount(point.seconds)} s, "
        f"{tables.amount(point.mean_in_flight)} in flight on average, {point.most_in_flight} at most",
        f"    requests    {point.sent} sent: {point.ok} ok, {point.failed} failed, {point.rejected} rejected, "
        f"{point.void} void; {point.retries} tried again",
        f"    tokens      {point.prompt_tokens} in, {point.output_tokens} out, "
        f"{tables.share(tables.hits(point))} of the prompts from the cache",
        f"    throughput  {tables.amount(point.output_tokens_per_s)} tokens/s; "
        f"{tables.amount(point.interactivity_p90)} tokens/s of a user (P90)",
    ]
    times = {"to first": point.ttft_ms, "between": point.itl_ms, "a token": point.tpot_ms, "to last": point.e2e_ms}
    for name, found in times.items():
        if found is not None:
            values = (f"{label} {tables.amount(getattr(found, label))}" for label in ("p20", "p50", "p80", "p99"))
            lines.append(f"    {name:<10}  {'  '.join(values)} ms  ({found.count})")
    if tables.drafted([point]):
        lines.append(f"    drafts      {tables.length(point.server)} tokens a step (acceptance length)")
    return [*lines, f"    noise       {noise}", *(f"    note        {note}" for note in point.notes)]


def _verify(registry: Registry, folder: Path, names: Sequence[str]) -> Answer:
    from harness.verify import covers, verify

    whole, unusable = ([], []) if names else all_in(folder)
    found = [(find(folder, name), _folder(folder, name)) for name in names] or [(one, folder) for one in whole]
    findings = [
        Finding("is no receipt", one.problem, "restore it, or remove it", str(folder / one.name)) for one in unusable
    ]
    for receipt, place in found:
        findings += verify(receipt, place)
    if findings:
        raise Failed(*findings)
    receipts = [receipt for receipt, _ in found]
    data = {"verified": [{"id": one.id, "outcome": one.outcome, "covers": covers(one, registry)} for one in receipts]}
    lines = [f"{one.id}  its samples say what it says  {one.outcome}, {covers(one, registry)}" for one in receipts]
    return data, lambda: "\n".join(map(_safe, lines)) or "no receipt yet"


def _compare(folder: Path, first: str, second: str) -> Answer:
    from harness.compare import compare, render

    a, b = find(folder, first), find(folder, second)
    result = compare(a, b, _folder(folder, first), _folder(folder, second))
    return {"verdict": result.verdict, **plain(result)}, lambda: _lines(render(result))


def _report(folder: Path, names: Sequence[str]) -> Answer:
    from harness.report import html

    receipts = [find(folder, name) for name in names] or [one for one in all_in(folder)[0] if one.outcome == "whole"]
    page = html(receipts)
    return {"receipts": [plain(one) for one in receipts]}, lambda: page


def _folder(folder: Path, name: str) -> Path:
    """Where the receipt of that name lies: beside the path that was given, or in the registry."""
    path = Path(name)
    return path.parent if path.suffix == ".json" and path.name != name else folder


def _lines(text: str) -> str:
    return "\n".join(map(_safe, text.split("\n")))


def _safe(line: str) -> str:
    """Receipts may come from anywhere; what they hold must not steer a terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
