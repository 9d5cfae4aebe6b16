"""The folder of a run: the engine's log, and the start record by which a successor finds an engine that was lost."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any

from slimserve.engine import log_file, procfs
from slimserve.errors import Finding, Refused
from slimserve.records import dataclass
from slimserve.shapes import Between, Matching, ShapeError, build

# The kernel's limit for the path of a unix socket, its final zero left out.
MOST_PATH_BYTES = 107

FILE_NAME = "engine.json"
LOG_NAME = "engine.log"
CONTROL_NAME = "engine.sock"
SCRATCH_PREFIX = "slimserve-"
# Of what the engine names itself in there, the longest is a socket by its UUID; `mkdtemp` adds eight letters to ours.
_SCRATCH_BYTES = len("//") + len(SCRATCH_PREFIX) + 8 + 36
# An engine whose supervisor was killed a moment ago is being ended by its guard; it is not a leftover yet.
LEFTOVER_SECONDS = 3.0
KILL_SECONDS = 10.0
RECORD_BYTES = 1 << 20

# Linux gives out no higher pid. 0 and 1 name no engine's leader, and `kill` would take them for far more than one.
Pid = Annotated[int, Between(2, 1 << 22)]
Ticks = Annotated[int, Between(0, (1 << 64) - 1)]


@dataclass(frozen=True)
class StartRecord:
    """One start of an engine.

    Args:
        profile_id: the profile that was started.
        port: its TCP port; 0: it has none.
        pid: the leader, which is also the id of its session.
        start_ticks: when the leader started, in clock ticks since the boot; with `pid` it names one process for good.
        tag: value of SLIMSERVE_ENGINE_TAG in the engine's processes.
        supervisor_pid, supervisor_start_ticks: the same for the process that started it.
        argv: the command.
        scratch: the engine's own temporary folder, removed when the last of its processes is gone.
        boot: the boot that these pids and ticks count from: after another, or on another machine with the same home
            folder, they name nobody.
    """

    profile_id: str
    port: Annotated[int, Between(0, 65535)]
    pid: Pid
    start_ticks: Ticks
    tag: Annotated[str, Matching("[!-~]+", "printable ASCII without a space")]
    supervisor_pid: Annotated[int, Between(1, 1 << 22)]
    supervisor_start_ticks: Ticks
    argv: tuple[str, ...]
    scratch: Annotated[str, Matching(f"/(.*/)?{SCRATCH_PREFIX}[a-z0-9_]+", "the path of a temporary folder of ours")]
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

    def end(self, seconds: float) -> None:
        """SIGKILL the processes of this engine, again until none is left or `seconds` are over."""
        deadline = time.monotonic() + seconds
        while (left := self.members()) and time.monotonic() < deadline:
            for process in left:
                procfs.kill(process)
            time.sleep(0.02)

    @property
    def is_supervised(self) -> bool:
        """Whether the process that started it lives."""
        return procfs.lives(self.supervisor_pid, self.supervisor_start_ticks)


@dataclass(frozen=True)
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
        names = procfs.names(self.processes)
        numbers = " ".join(str(process.pid) for process in self.processes)
        return Finding(
            f"an engine whose supervisor died does not die of SIGKILL: {self.record.profile_id}, {names}",
            "it holds the memory and the port of a server that nobody looks after; as a rule it sleeps in a driver",
            f"wait and try `kill -9 {numbers}`; a driver that never wakes needs a restart of the machine",
            str(self.path),
        )


def read(path: Path) -> StartRecord | None:
    """The record at `path`; None when it is gone or not one of ours (another version's, or a torn disk's)."""
    fields = read_fields(path)
    try:
        # Without it nothing tells which boot the numbers are of, and this one would be assumed.
        return build(StartRecord, fields) if fields is not None and "boot" in fields else None
    except ShapeError:
        return None


def read_fields(path: Path) -> dict[str, Any] | None:
    """The JSON object in the file `path`; None when there is none, or not one that this user wrote."""
    try:
        # Without waiting and without following: a pipe or a link in its place is no record of ours.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            about = os.fstat(file.fileno())
            # Processes are ended by what these files say: another user's word must not be enough for that.
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
                return None
            fields = json.loads(file.read(RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def write_fields(path: Path, fields: dict[str, Any]) -> None:
    """Write a JSON object to `path`, whole or not at all, with mode 0600.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_suffix(".part")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(fields, file, indent=1)
    temporary.replace(path)


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
            remove_scratch(Path(record.scratch))
            path.unlink(missing_ok=True)
    return found


def remove_scratch(folder: Path) -> None:
    """Remove a temporary folder of a dead engine, if it is there and this user's."""
    with contextlib.suppress(OSError):
        about = folder.lstat()
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
            shutil.rmtree(folder, ignore_errors=True)


def control_path(run_folder: Path) -> Path:
    """Where the engine of a run listens for its supervisor: in the run's folder, unless the path is too long there."""
    path = run_folder / CONTROL_NAME
    if len(os.fsencode(path)) <= MOST_PATH_BYTES:
        return path
    return Path(tempfile.gettempdir()) / f"slimserve-{secrets.token_hex(8)}" / CONTROL_NAME


class RunFolder:
    """One run's folder, below the folder of all runs; only its owner may look in.

    Args:
        path: the folder; made when it is not there.
        control: the engine's unix socket; in this folder, or alone in one of its own.
    """

    def __init__(self, path: Path, control: Path) -> None:
        self.path = path
        self.control = control
        self.log_path = path / LOG_NAME
        self._record_path = path / FILE_NAME
        self._own_control = False
        self._scratch: Path | None = None

    def prepare(self) -> None:
        """Make the folder with mode 0700 and the log with 0600, where they are not there.

        Raises:
            Refused: it cannot be written, or the log is no plain file.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            if self.control.parent != self.path and not (self._own_control and self.control.parent.is_dir()):
                self.control.parent.mkdir(mode=0o700)  # where everybody may write, one that is there is a stranger's
                self._own_control = True
            os.close(log_file.open_to_append(self.log_path))
        except OSError as error:
            raise self._refusal(error) from error

    def make_scratch(self) -> Path:
        """A folder below TMPDIR for the temporary files and sockets of one start, some of which every engine leaves.

        Raises:
            Refused: it cannot be made.
        """
        try:
            base = tempfile.gettempdir()
            if len(os.fsencode(base)) + _SCRATCH_BYTES > MOST_PATH_BYTES:
                base = "/tmp"  # a socket could not be bound there
            self._scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=base))
        except OSError as error:
            raise Refused(
                Finding(
                    f"cannot make a temporary folder: {error.strerror}",
                    "sockets and other files of the engine's start are kept there",
                    "make TMPDIR writable for this user, or free space there",
                )
            ) from error
        return self._scratch

    def write(self, record: StartRecord) -> None:
        """Write the start record, whole or not at all, with mode 0600.

        Raises:
            Refused: it cannot be written.
        """
        try:
            write_fields(self._record_path, asdict(record))
        except OSError as error:
            raise self._refusal(error) from error

    def clear(self) -> None:
        """Forget the start, whose processes are gone; the log stays."""
        if self._scratch is not None:
            remove_scratch(self._scratch)
            self._scratch = None
        for path in (self._record_path, self.control):  # the next engine could not bind what is in its place
            with contextlib.suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Leave the log alone."""
        self.clear()
        if self.control.parent != self.path:
            with contextlib.suppress(OSError):
                self.control.parent.rmdir()

    def end_leftovers(self, report: Callable[[str], None]) -> None:
        """End the engines of dead supervisors that live beside this run, once their guards have had time to.

        Their start records say that they are ours: the boot, the leader's pid with its start, the tag.

        Args:
            report: called with a line for each that is ended.

        Raises:
            Refused: with one finding for each that does not die.
        """
        deadline = time.monotonic() + LEFTOVER_SECONDS
        while (found := leftovers(self.path.parent)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for one in found:
            names = procfs.names(one.processes)
            report(f"ending an engine whose supervisor died: {one.record.profile_id}, port {one.record.port}, {names}")
            one.record.end(KILL_SECONDS)
        if found and (left := leftovers(self.path.parent)):
            raise Refused(*(one.finding() for one in left))

    def _refusal(self, error: OSError) -> Refused:
        return Refused(
            Finding(
                f"cannot write in the run folder {self.path}: {error.strerror}",
                "the engine's log and the record of its start are kept there",
                "make it writable for this user, or free space there",
            )
        )
