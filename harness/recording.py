"""Writing a receipt: append-only, whole or not at all, and never over anything that is there.

The raw samples lie beside it under the same name, and come first: a receipt that is there has its samples. Both are
written under a hidden name and then linked to their own, which fails where that is taken. Until then a journal has what
was measured (`harness.journal`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from harness import journal
from harness.raw import Raw, pack, probe_line
from harness.recall.scoring import Probe, rates_of
from harness.receipt import (
    Battery,
    Host,
    Outcome,
    Point,
    ProfileFacts,
    PromptFacts,
    Rate,
    Samples,
    ServerCounts,
    Setup,
    Target,
    WeightsFacts,
    WorkloadFacts,
    parse,
)
from harness.sample import Job, Sample
from harness.summary import points
from slimserve.covering import as_text
from slimserve.errors import Failed, Finding, Refused
from slimserve.receipt_file import SCHEMA, digest
from slimserve.shapes import plain
from slimserve.subject import Subject

# More than a day of requests takes; asked for before a run, so that its end is not the moment to find out.
NEEDED_BYTES = 64 << 20
_SAMPLES = ".samples.gz"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that a receipt says of a run beside its samples; the arguments are those of `harness.receipt.Receipt`."""

    commit: str
    command: Sequence[str]
    host: Host
    versions: dict[str, str]
    target: Target
    profile: ProfileFacts | None
    weights: WeightsFacts | None
    resolved_sha256: str | None
    workload: WorkloadFacts
    prompts: PromptFacts
    together: str | None = None
    start_seconds: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None


@dataclass
class Recording:
    """The samples of a run until its receipt is written.

    Args:
        folder: where receipts lie; `begin` has seen that it can be written.
        id: of the receipt.
    """

    folder: Path
    id: str
    setups: list[Setup] = field(default_factory=list)
    counts: dict[str, ServerCounts] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    recall: dict[str, Rate] = field(default_factory=dict)
    battery: Battery | None = None
    _lines: list[bytes] = field(default_factory=list)
    """requests of the workload"""
    _probes: list[bytes] = field(default_factory=list)
    """those of the battery"""
    _saved: int = 0
    """lines that the journal has"""
    _journal: journal.Journal | None = None

    def add_point(self, setup: Setup) -> None:
        """A load is about to begin; its samples come under its name.

        Raises:
            ValueError: there is one of that name.
        """
        if any(setup.name == other.name for other in self.setups):
            raise ValueError(f"{setup.name} is the name of two points")
        self.setups.append(setup)

    def add(self, point: str, round_number: int, job: Job, sample: Sample) -> None:
        """One request of the load `point`, in the repetition `round_number`, from 0."""
        self._lines.append(Raw.of(point, round_number, job, sample).line())

    def add_begun(self, point: str, requests: int) -> None:
        """So many requests of the load `point` were begun, warm-up apart; without a word, as many as have samples."""
        self.begun[point] = self.begun.get(point, 0) + requests

    def add_counts(self, point: str, counts: ServerCounts) -> None:
        """What the server counted during the load `point`."""
        self.counts[point] = counts

    def add_battery(self, battery: Battery, probes: Sequence[Probe]) -> None:
        """What the recall battery said, and its answers."""
        self.battery = replace(battery, findings=tuple(map(_printable, battery.findings)))
        self.recall = rates(probes)
        self._probes = [probe_line(probe) for probe in probes]

    def save(self) -> None:
        """Put what came onto the disk, for the case that nobody gets to write the receipt.

        Raises:
            Failed: it cannot be written.
        """
        try:
            if self._journal is None:
                self._journal = journal.Journal(self.folder / (self.id + journal.SUFFIX))
            self._journal.write(b"".join(self._lines[self._saved :]))
        except OSError as error:
            what = f"what was measured cannot be kept in {self.folder}: {error.strerror}"
            why = "a run that nobody can look at later proves nothing"
            raise Failed(
                Finding(what, why, "free space there, or make the folder writable, and measure again")
            ) from None
        self._saved = len(self._lines)

    def close(self, outcome: Outcome, reasons: Iterable[str], facts: Facts) -> Path:
        """Write samples and receipt.

        What the samples themselves say is added: a run with a void or lost answer is void, whatever `outcome` says.

        Returns:
            The receipt's file.

        Raises:
            Failed: it cannot be written; nothing that was there has changed.
        """
        packed = pack(b"".join([*self._lines, *self._probes]))
        try:
            said = self._said(outcome, reasons, facts, packed)
        except ValueError as error:
            self.save()
            raise Failed(
                Finding(
                    f"no receipt can be written of this run: {error}",
                    f"nobody could read it back; {self._left()}",
                    "measure again without what this names; if all of it is as it should be, report this as a fault",
                )
            ) from None
        samples, receipt = self.folder / (self.id + _SAMPLES), self.folder / f"{self.id}.json"
        try:
            put(samples, packed)
            try:
                put(receipt, said)
            except BaseException:  # a Ctrl-C too: without a receipt nobody would know whose samples they are
                samples.unlink()
                raise
        except OSError as error:
            raise Failed(
                Finding(
                    f"the receipt {receipt} cannot be written: {error.strerror}",
                    f"{self._left()}; receipts that were there are untouched",
                    "free space there, or make the folder writable, and measure again",
                )
            ) from None
        if self._journal is not None:
            self._journal.remove()
        return receipt

    def _said(self, outcome: Outcome, reasons: Iterable[str], facts: Facts, packed: bytes) -> bytes:
        """The receipt's content.

        Raises:
            ValueError: nobody could read it back.
        """
        raws = [Raw.from_line(line) for line in self._lines]
        counted = points([(setup, self.counts.get(setup.name, ServerCounts())) for setup in self.setups], raws)
        found = [replace(point, sent=self.begun.get(point.setup.name, point.sent)) for point in counted]
        outcome, told = judge(outcome, tuple(reasons), raws, found)
        data = {
            "schema": SCHEMA,
            "id": self.id,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "outcome": outcome,
            "reasons": [_printable(reason) for reason in told],
            "commit": facts.commit,
            "command": [_printable(without_secrets(word)) for word in facts.command],
            **{
                name: plain(getattr(facts, name))
                for name in ("host", "versions", "target", "profile", "weights", "workload", "prompts", "together")
            },
            "resolved_sha256": facts.resolved_sha256,
            "start_seconds": dict(facts.start_seconds),
            "memory_bytes": facts.memory_bytes,
            "points": [plain(point) for point in found],
            "recall": plain(self.recall),
            "battery": plain(self.battery),
            "samples": plain(
                Samples(
                    file=self.id + _SAMPLES,
                    sha256=hashlib.sha256(packed).hexdigest(),
                    bytes=len(packed),
                    count=len(raws),
                )
            ),
        }
        data["sha256"] = digest(data)
        parse(data)
        return (json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()

    def _left(self) -> str:
        """What is left of a run without a receipt, in words."""
        if self._journal is None:
            return "the samples of this run are lost"
        return f"{self._journal.path.name} has what was measured"


def begin(folder: Path, subject: str, workload: str) -> Recording:
    """See that a receipt can be written, before anything is measured.

    Args:
        folder: where receipts lie; it is made when it is not there.
        subject: what is measured, such as the id of a profile.
        workload: name of the workload.

    Raises:
        Refused: the folder cannot be written, or its disk is as good as full.
    """
    stem = re.sub(r"[^a-z0-9.-]+", "-", f"{subject}-{workload}".lower()).strip("-.")[:120]
    name = f"{time.strftime('%Y%m%dt%H%M%S', time.gmtime())}-{stem}-{secrets.token_hex(3)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".{name}.trial"
        trial.touch(exist_ok=False)
        trial.unlink()
        disk = os.statvfs(folder)
    except OSError as error:
        why = f"a run without a receipt proves nothing, and the system says: {error.strerror}"
        do = "make the folder writable, or give SLIMSERVE_PROFILES a copy of the registry that is"
        raise Refused(Finding(f"no receipt can be written to {folder}", why, do)) from None
    if disk.f_bavail * disk.f_frsize < NEEDED_BYTES:
        what = f"{disk.f_bavail * disk.f_frsize >> 20} MiB are free at {folder}"
        why = f"samples and receipt of a run take up to {NEEDED_BYTES >> 20} MiB, and would be lost at its end"
        raise Refused(Finding(what, why, "free space there"))
    return Recording(folder, name)


def rates(probes: Sequence[Probe]) -> dict[str, Rate]:
    """What the answers to a battery say, by way."""
    return {
        name: Rate(right=group.right, asked=group.asked, low=group.low, high=group.high)
        for name, group in rates_of(list(probes)).items()
    }


def judge(
    outcome: Outcome, reasons: tuple[str, ...], raws: Sequence[Raw], found: Sequence[Point]
) -> tuple[Outcome, tuple[str, ...]]:
    """The outcome of a run with what its samples say of it, and the reasons.

    Args:
        outcome, reasons: as whoever ran it sees it.
        raws: the samples.
        found: the numbers of each load.
    """
    measured = [raw for raw in raws if raw.measured]
    void = mismatches(measured)
    failed: list[str] = []
    for kind, words, told in (("void", "cannot be believed", void), ("failed", "failed", failed)):
        wrong = [raw.sample for raw in measured if raw.sample.outcome == kind]
        if wrong:
            told.append(f"{len(wrong)} of {len(measured)} requests {words}; first: {wrong[0].reason or 'unsaid'}")
    for point in found:
        if point.sent != point.ok + point.failed + point.rejected + point.void:
            void.append(f"{point.setup.name}: {point.sent} requests were sent, and {unaccounted(point)}")
    if not any(raw.sample.outcome == "ok" for raw in measured):
        failed.append("nothing was measured")
    if outcome == "whole":
        outcome = "void" if void else "failed" if failed else "whole"
    said = (*reasons, *void, *failed)
    return outcome, said if said or outcome == "whole" else ("no reason was given",)


def unaccounted(point: Point) -> str:
    """What became of the requests of a load, in words."""
    return f"{point.ok} were answered, {point.failed} failed, {point.rejected} were rejected, {point.void} are void"


def mismatches(raws: Sequence[Raw]) -> list[str]:
    """Token counts of good answers that are not those that were asked for, as sentences."""
    found = []
    pairs = (("prompt", "prompt_tokens_asked", "prompt_tokens"), ("output", "output_tokens_asked", "completion_tokens"))
    for words, asked, counted in pairs:
        wrong = [
            raw
            for raw in raws
            if raw.sample.outcome == "ok"
            and getattr(raw, asked) is not None
            and getattr(raw, asked) != getattr(raw.sample, counted)
        ]
        if wrong:
            first = wrong[0]
            found.append(
                f"{len(wrong)} answers count other {words} tokens than were asked for; first: "
                f"{getattr(first.sample, counted)} where {getattr(first, asked)} were asked"
            )
    return found


def profile_facts(subject: Subject, file: Path, engine: str) -> ProfileFacts:
    """What a receipt says of a profile.

    Args:
        subject: the profile with its model and platform.
        file: the profile's.
        engine: release of the engine.
    """
    profile = subject.profile
    return ProfileFacts(
        id=profile.id,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        platform=profile.platform,
        model=profile.model,
        quant=profile.quant,
        engine=engine,
        settings={key: as_text(setting.value) for key, setting in profile.settings()},
    )


def weights_facts(subject: Subject, registry: Path) -> WeightsFacts:
    """What a receipt says of a profile's weights.

    Args:
        subject: the profile with its model and platform.
        registry: its folder.
    """
    checkpoint = subject.model.checkpoints[subject.profile.quant]
    listed = checkpoint.manifest and registry / "weights" / f"{checkpoint.manifest}.manifest"
    return WeightsFacts(
        origin=checkpoint.origin,
        manifest=checkpoint.manifest,
        manifest_sha256=hashlib.sha256(listed.read_bytes()).hexdigest() if listed else None,
    )


def without_secrets(word: str) -> str:
    """A word of a command line without user, password, query and fragment of an address."""
    if "://" not in word:
        return word
    head, equals, rest = word.partition("=") if word.startswith("-") else ("", "", word)
    try:
        parts = urlsplit(rest)
        place = parts.netloc.rpartition("@")[2]
        return head + equals + urlunsplit((parts.scheme, place, parts.path, "", ""))
    except ValueError:
        return head + equals + "an address that cannot be read"


def put(path: Path, content: bytes) -> None:
    """A new file with that content: it is there whole, or not at all.

    Raises:
        OSError: it cannot be written, or something of that name is there.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(fresh, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(fresh, path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                raise
            # No hard links there. The name ends in random digits, so that nobody else is about to take it.
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            os.rename(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _printable(text: str) -> str:
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    shown = shown[:2000]
    return shown if shown.strip() else f"'{shown}'"
