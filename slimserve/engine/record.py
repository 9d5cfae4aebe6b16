"""The folder of a run: the engine's log, and the start record by which a successor finds an engine that was lost."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from slimserve.engine import procfs
from slimserve.errors import Finding, Refused
from slimserve.shapes import Between, Matching, ShapeError, build

FILE_NAME = "engine.json"
LOG_NAME = "engine.log"
# An engine whose supervisor was killed a moment ago is being ended by its guard; it is not a leftover yet.
LEFTOVER_SECONDS = 3.0
RECORD_BYTES = 1 << 20

# Linux gives out no higher pid. 0 and 1 name no engine's leader, and `kill` would take them for far more than one.
Pid = Annotated[int, Between(2, 1 << 22)]
Ticks = Annotated[int, Between(0, (1 << 64) - 1)]


@dataclass(frozen=True, slots=True)
class StartRecord:
    """One start of an engine.

    Args:
        profile_id: the profile that was started.
        port: its TCP port.
        pid: the leader, which is also the id of its session.
        start_ticks: when the leader started, in clock ticks since the boot; with `pid` it names one process for good.
        tag: value of SLIMSERVE_ENGINE_TAG in the engine's processes.
        supervisor_pid, supervisor_start_ticks: the same for the process that started it.
        argv: the command, without secrets.
        boot: the boot that these pids and ticks count from: after another, or on another machine with the same home
            folder, they name nobody.
    """

    profile_id: str
    port: Annotated[int, Between(1, 65535)]
    pid: Pid
    start_ticks: Ticks
    tag: Annotated[str, Matching("[!-~]+", "printable ASCII without a space")]
    supervisor_pid: Annotated[int, Between(1, 1 << 22)]
    supervisor_start_ticks: Ticks
    argv: tuple[str, ...]
    boot: str = field(default_factory=procfs.boot)

    def members(self) -> list[procfs.Process]:
        """The processes of this engine that still live."""
        if self.boot != procfs.boot():
            return []
        leader = procfs.read(self.pid)
        # The session of that number is the engine's for certain only while the leader holds the number, be it as a
        # zombie. Once he is gone it may have been given to a stranger, who may have left processes behind in turn.
        holds_number = leader is not None and leader.start_ticks == self.start_ticks
        return [
            process
            for process in procfs.members(self.pid, self.tag)
            if holds_number or procfs.carries(process.pid, self.tag)
        ]

    @property
    def is_supervised(self) -> bool:
        """Whether the process that started it lives."""
        supervisor = procfs.read(self.supervisor_pid)
        return supervisor is not None and supervisor.alive and supervisor.start_ticks == self.supervisor_start_ticks


@dataclass(frozen=True, slots=True)
class Leftover:
    """An engine whose supervisor is dead.

    Args:
        record: what its supervisor wrote; `path` is where.
        processes: those of its processes that live.
    """

    record: StartRecord
    path: Path
    processes: tuple[procfs.Process, ...]

    def finding(self) -> Finding:
        """The leftover as an error, with the command that ends it."""
        names = ", ".join(f"{process.pid} ({process.name})" for process in self.processes)
        numbers = " ".join(str(process.pid) for process in self.processes)
        return Finding(
            f"an engine whose supervisor died still runs: {self.record.profile_id}, port {self.record.port}, {names}",
            "it holds the memory and the port of a server that nobody looks after",
            f"kill -9 {numbers}",
            str(self.path),
        )


def read(path: Path) -> StartRecord | None:
    """The record at `path`; None when it is gone or not one of ours (another version's, or a torn disk's)."""
    try:
        # Without waiting and without following: a pipe or a link in its place is no record of ours.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            raw = file.read(RECORD_BYTES)
        fields = json.loads(raw)
        # Without it nothing tells which boot the numbers are of, and this one would be assumed.
        return build(StartRecord, fields) if "boot" in fields else None
    except (OSError, ValueError, TypeError, RecursionError, ShapeError):
        return None


def leftovers(runs_folder: Path) -> list[Leftover]:
    """The engines under `runs_folder` that live though their supervisor does not; a record of the dead is removed.

    Args:
        runs_folder: holds one folder for each run.
    """
    found = []
    for path in sorted(runs_folder.glob(f"*/{FILE_NAME}")):
        record = read(path)
        if record is None or record.is_supervised:
            continue
        if processes := record.members():
            found.append(Leftover(record, path, tuple(processes)))
        else:
            path.unlink(missing_ok=True)
    return found


class RunFolder:
    """One run's folder, below the folder of all runs; only its owner may look in.

    Args:
        path: the folder; made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log_path = path / LOG_NAME
        self._record_path = path / FILE_NAME

    def prepare(self) -> None:
        """Make the folder with mode 0700 and the log with 0600.

        Raises:
            Refused: it cannot be written.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            os.close(os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600))
        except OSError as error:
            raise self._refusal(error) from error

    def write(self, record: StartRecord) -> None:
        """Write the start record, whole or not at all, with mode 0600.

        Raises:
            Refused: it cannot be written.
        """
        temporary = self._record_path.with_suffix(".part")
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(handle, "w") as file:
                json.dump(asdict(record), file, indent=1)
            temporary.replace(self._record_path)
        except OSError as error:
            raise self._refusal(error) from error

    def remove_record(self) -> None:
        """Forget the start; the log stays."""
        self._record_path.unlink(missing_ok=True)

    def refuse_leftovers(self) -> None:
        """Refuse while an engine of a dead supervisor lives beside this run, once its guard has had time to end it.

        Raises:
            Refused: with one finding for each such engine.
        """
        deadline = time.monotonic() + LEFTOVER_SECONDS
        while (found := leftovers(self.path.parent)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if found:
            raise Refused(*(one.finding() for one in found))

    def _refusal(self, error: OSError) -> Refused:
        return Refused(
            Finding(
                f"cannot write in the run folder {self.path}: {error.strerror}",
                "the engine's log and the record of its start are kept there",
                "make it writable for this user, or free space there",
            )
        )


def without_secrets(argv: Sequence[str], secrets: Sequence[str]) -> tuple[str, ...]:
    """The command with every occurrence of a secret replaced by `***`."""
    hidden = tuple(argv)
    for secret in filter(None, secrets):
        hidden = tuple(word.replace(secret, "***") for word in hidden)
    return hidden
