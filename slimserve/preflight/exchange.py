"""Whether what GPUs exchange arrives: one process for each of them (`slimserve.preflight.rank`), and a deadline.

A driver that was changed to allow peer access, an IOMMU or a broken riser can deliver wrong values, or nothing at all,
without an error. Such a machine answers fluently and wrongly, or hangs under load; so values are compared before an
engine is started, in processes that can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from slimserve.machine import Gpu
from slimserve.preflight.concern import Blocks, Concern
from slimserve.probe.text import printable, read_text

COMMAND = (sys.executable, "-P", "-m", "slimserve.preflight.rank")
# Loading torch and opening eight cards from a cold disk takes a good part of it; the exchange itself does not.
DEADLINE_SECONDS = 180.0
# What libraries, a context and the buffers take of a card; on one that is fuller nothing is tried.
NEEDED_BYTES = 2 << 30
_LOOK_SECONDS = 0.2
# A process that dies closes its output first, and may then be stuck inside the driver for good.
_END_SECONDS = 5.0
_LAST_LINES = 4


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the test went.

    Args:
        gpus: names of those that took part.
        checked: comparisons that were made.
        wrong: those that failed, in words.
        failure: why it did not come to its end, in words; empty: it did.
        lacks: what is not installed, so that nothing was tried, in words; empty: nothing is missing.
        seconds: how long it took.
    """

    gpus: tuple[str, ...]
    checked: int = 0
    wrong: tuple[str, ...] = ()
    failure: str = ""
    lacks: str = ""
    seconds: float = 0.0

    def concerns(self) -> Iterator[Concern]:
        """What is wrong, as findings."""
        blocks: Blocks = "profiles on several GPUs" if len(self.gpus) > 1 else "profiles on GPUs"
        if self.wrong:
            more = f", and {len(self.wrong) - 3} more" if len(self.wrong) > 3 else ""
            yield Concern(
                f"values arrive wrong: {'; '.join(self.wrong[:3])}{more}",
                "an engine here would compute with them, and answer fluently and wrongly",
                "look at the driver (a changed one above all), IOMMU, ACS, risers, and Xid and AER lines in dmesg; "
                "slimserve --doctor tries again",
                blocks=blocks,
            )
        if self.failure:
            yield Concern(
                self.failure,
                "what hangs or dies here does so in the engine, after it has loaded",
                "look for Xid and AER lines in dmesg, and at IOMMU and ACS; slimserve --doctor tries again",
                blocks=blocks,
            )
        if self.lacks:
            yield Concern(
                f"the values that GPUs exchange were not compared: {self.lacks}",
                "they are compared with the libraries of an engine for GPUs",
                "pip install 'slimserve[cuda]'",
            )

    def to_json(self) -> dict[str, Any]:
        """The outcome as a JSON object; what went wrong is among the findings."""
        return {"gpus": list(self.gpus), "checked": self.checked, "seconds": round(self.seconds, 1)}

    def __str__(self) -> str:
        if not self.checked:
            return f"nothing was compared on {', '.join(self.gpus)}"
        right = self.checked - len(self.wrong)
        return f"{right} of {self.checked} comparisons right on {', '.join(self.gpus)}, in {self.seconds:.1f} s"


def name(gpu: Gpu) -> str:
    """A GPU in words."""
    return f"GPU {gpu.index}"


def environment(
    gpus: Sequence[Gpu], user: Mapping[str, str], profile: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables that the test runs with: those of an engine, as far as they touch what GPUs exchange.

    Args:
        gpus: that take part, and no others are seen.
        user: the caller's variables.
        profile: what the profile sets; None: there is none.
    """
    from slimserve.engine.command import PASSED

    passed = {key: value for key, value in user.items() if key in PASSED}
    ours = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus), "TMPDIR": user.get("TMPDIR") or "/tmp"}
    return {**passed, **(profile or {}), **ours}


def roomy(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Those on which the test has room, and that a process sees whole."""
    return tuple(gpu for gpu in gpus if gpu.free_bytes >= NEEDED_BYTES and gpu.mig != "on")


def run(
    names: Sequence[str],
    kind: Literal["cuda", "cpu"],
    environ: Mapping[str, str],
    look: Callable[[], None] = lambda: None,
    command: Sequence[str] = COMMAND,
    seconds: float = DEADLINE_SECONDS,
) -> Outcome:
    """Run every rank and collect what they find. Nothing of them is left when it returns, however it does.

    Args:
        names: one for each rank, for words.
        kind: where the values lie.
        environ: the whole environment of the ranks.
        look: called about five times a second; what it raises ends the test.
        command: what runs a rank; it prints what `slimserve.preflight.rank` does.
        seconds: after this long the step that is under way counts as hung.
    """
    begun = time.monotonic()
    ranks: list[_Rank] = []
    failure = lacks = ""
    try:
        with tempfile.TemporaryDirectory(prefix="slimserve-exchange-", ignore_cleanup_errors=True) as folder:
            try:
                for number in range(len(names)):
                    ranks.append(_Rank(number, names, kind, environ, command, Path(folder), seconds))
                failure = _collect(ranks, look, begun + seconds, seconds)
                lacks = next((rank.lacks for rank in ranks if rank.lacks), "")
            finally:
                _kill(ranks)
    except OSError as error:  # no folder for them, no process, no descriptor
        failure = f"the values that GPUs exchange cannot be compared: {error.strerror or error}"
    done = [rank.done for rank in ranks if rank.done is not None]
    return Outcome(
        gpus=tuple(names),
        checked=sum(one["checked"] for one in done),
        wrong=tuple(text for one in done for text in one["wrong"]),
        failure="" if lacks else printable(failure),
        lacks=printable(lacks),
        seconds=time.monotonic() - begun,
    )


@dataclass
class _Rank:
    """One process and how far it has come."""

    number: int
    names: Sequence[str]
    kind: str
    environ: Mapping[str, str]
    command: Sequence[str]
    folder: Path
    seconds: float
    step: int = 0
    at: str = "start"
    done: dict[str, Any] | None = None
    lacks: str = ""
    _rest: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        from slimserve.engine.entry import PARENT

        arguments = ["--rank", str(self.number), "--names", json.dumps(list(self.names)), "--kind", self.kind]
        arguments += ["--store", str(self.folder / "store"), "--seconds", str(self.seconds)]
        own = {
            PARENT: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
            # They meet on this machine alone.
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }
        with (self.folder / f"rank-{self.number}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*self.command, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**self.environ, **own},
                start_new_session=True,  # its group is what is killed, and a Ctrl-C is the caller's to handle
            )
        os.set_blocking(self.output.fileno(), False)

    @property
    def output(self) -> IO[bytes]:
        """Its standard output."""
        if self.process.stdout is None:
            raise AssertionError("unreachable: it was asked for")
        return self.process.stdout

    def read(self) -> bool:
        """Take what it has printed; False at the end of its output."""
        data = self.output.read(1 << 16)
        if not data:
            return data is None
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):  # a library's greeting
                said = json.loads(line)
                if isinstance(said, dict) and "at" in said:
                    self.step, self.at = int(said["step"]), str(said["at"])
                elif isinstance(said, dict) and "done" in said:
                    self.done = said["done"]
                elif isinstance(said, dict) and "lacks" in said:
                    self.lacks = str(said["lacks"])
        return True

    def death(self) -> str:
        """How it died, in words, once its output has ended."""
        try:
            code = self.process.wait(_END_SECONDS)
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        except subprocess.TimeoutExpired:
            how = "closed its output and does not end,"
        lines = (read_text(self.folder / f"rank-{self.number}.log") or "").strip().splitlines()
        said = " / ".join(line.strip() for line in lines[-_LAST_LINES:])
        return f"the process of {self.names[self.number]} {how} in: {self.at}" + (f"; it said: {said}" if said else "")


def _collect(ranks: Sequence[_Rank], look: Callable[[], None], deadline: float, seconds: float) -> str:
    """Read until every rank is done; else what kept one of them."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.output, selectors.EVENT_READ, rank)
        while any(rank.done is None for rank in ranks):
            look()
            if time.monotonic() > deadline:
                return _hung(ranks, seconds)
            for key, _ in selector.select(_LOOK_SECONDS):
                one: _Rank = key.data
                reads_on = one.read()
                if one.lacks:
                    return ""
                if not reads_on:
                    selector.unregister(one.output)
                    if one.done is None:
                        return one.death()
    return ""


def _hung(ranks: Sequence[_Rank], seconds: float) -> str:
    """Those that are behind the others keep them waiting; where all are at one step, it is that step."""
    waiting = [rank for rank in ranks if rank.done is None]
    behind = min(rank.step for rank in waiting)
    hung = [rank for rank in waiting if rank.step == behind]
    who = ", ".join(rank.names[rank.number] for rank in hung)
    return f"the exchange of values hangs: not done after {seconds:g} s, {who} in: {hung[0].at}"


def _kill(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        # A process that is stuck inside the driver cannot be killed. It is left behind, and so is its pipe.
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(1.0)
        for pipe in (rank.process.stdin, rank.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
