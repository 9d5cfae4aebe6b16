"""What /proc says about processes: who belongs to an engine, since when it lives, who holds a port.

Membership has two marks, because either can be missing. The session: every process that the engine starts is in
the leader's, unless it makes one of its own. The tag, an environment entry that is inherited: it survives a new
session, but a process that rewrites its title may overwrite it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from slimserve.records import dataclass

TAG = "SLIMSERVE_ENGINE_TAG"
# multiprocessing's tracker unlinks the shared memory of the dead when the last of them is gone; it needs a moment.
TRACKER_SECONDS = 1.0
# Of linux/pidfd.h: `struct pidfd_info` begins with the mask of what is asked, and told, and ends with the exit code.
_INFO_BYTES = 64
_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, struct pidfd_info)


@dataclass(frozen=True)
class Process:
    """One line of /proc/PID/stat.

    Args:
        pid: the process id.
        name: its command name, at most 15 bytes, as the kernel has it.
        state: one letter; Z and X are dead.
        parent: the parent's pid.
        session: the session id.
        start_ticks: clock ticks between the boot and its start. With the pid this names a process for good.
    """

    pid: int
    name: str
    state: str
    parent: int
    session: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        """False for a zombie, which holds nothing but its exit status."""
        return self.state not in "ZX"


def read(pid: int) -> Process | None:
    """The process `pid`, or None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # it is gone, or /proc hides other users' processes
        return None
    # The name is in parentheses and may itself hold spaces and parentheses.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return Process(pid, name, fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def exit_status(pid: int) -> int | None:
    """The exit status, as `subprocess` gives it, of a process that is dead and not yet fetched by its parent."""
    process = read(pid)
    if process is None or process.alive:
        return None
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return os.waitstatus_to_exitcode(int(text.rpartition(")")[2].split()[49]))
    except (OSError, ValueError, IndexError):
        return None


def fetched_status(handle: int) -> int | None:
    """The exit status of a process that its parent has fetched already; None: the kernel does not tell (before 6.15).

    Args:
        handle: a pidfd of it, opened while it lived.
    """
    info = bytearray(struct.pack("=Q", _INFO_EXIT).ljust(_INFO_BYTES, b"\0"))
    try:
        fcntl.ioctl(handle, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    (told,) = struct.unpack_from("=Q", info)
    return os.waitstatus_to_exitcode(struct.unpack_from("=i", info, _INFO_BYTES - 4)[0]) if told & _INFO_EXIT else None


def own() -> Process:
    """The process that asks."""
    process = read(os.getpid())
    if process is None:
        raise RuntimeError("/proc does not show this process")
    return process


def names(processes: Iterable[Process]) -> str:
    """Processes in a sentence."""
    return ", ".join(f"{process.pid} ({process.name})" for process in processes)


def lives(pid: int, start_ticks: int) -> bool:
    """Whether the process that got `pid` at `start_ticks` still lives."""
    process = read(pid)
    return process is not None and process.alive and process.start_ticks == start_ticks


def boot() -> str:
    """What tells this boot of this machine from every other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def living() -> Iterator[Process]:
    """Every process that lives, in no order."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            process = read(int(entry))
            if process is not None and process.alive:
                yield process


def command_line(pid: int) -> str:
    """The command line of `pid` with spaces between the words; empty when it is gone or not ours to see."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def proportional_bytes(pid: int) -> int:
    """Memory of `pid`, of what it shares with others its part (PSS); 0 when it is gone or not ours to see."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def carries(pid: int, tag: str) -> bool:
    """Whether the environment that `pid` was started with has the engine's tag."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's: then it is none of ours
        return False
    return f"{TAG}={tag}".encode() in environ.split(b"\0")


def members(session: int, tag: str) -> list[Process]:
    """The living processes of one engine, the caller left out.

    Args:
        session: session id, which is the leader's pid.
        tag: value of the tag in the engine's environment; empty: go by the session alone.
    """
    own = os.getpid()
    return [
        process
        for process in living()
        if process.pid != own and (process.session == session or (tag and carries(process.pid, tag)))
    ]


def end(session: int, tag: str, seconds: float) -> list[Process]:
    """SIGKILL every member of an engine, again until none is left.

    Args:
        session, tag: as for `members`.
        seconds: how long to go on; a process in uninterruptible sleep does not die before it wakes.

    Returns:
        The processes that still live; empty when all is well.
    """
    begun = time.monotonic()
    while True:
        left = members(session, tag)
        elapsed = time.monotonic() - begun
        if not left or elapsed >= seconds:
            return left
        for process in left:
            if elapsed >= TRACKER_SECONDS or "multiprocessing.resource_tracker" not in command_line(process.pid):
                kill(process)
        time.sleep(0.01)


def kill(process: Process) -> None:
    """SIGKILL exactly this process, never another that has been given its number since."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        now = read(process.pid)
        if now is not None and now.start_ticks == process.start_ticks:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it died between the look and the signal, which is what was wanted
    finally:
        os.close(handle)


def sockets(port: int) -> list[tuple[str, str]]:
    """State (two hex digits; 0A listens) and inode of each TCP socket whose local port is `port`.

    A socket that is bound and does not listen is not in these tables.
    """
    found: list[tuple[str, str]] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for line in lines:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port:
                found.append((fields[3], fields[9]))
    return found


def listener(port: int) -> Process | None:
    """The process that listens on `port`, or None when /proc does not show us one."""
    inodes = {f"socket:[{inode}]" for state, inode in sockets(port) if state == "0A"}
    for process in living() if inodes else ():
        try:
            handles = os.listdir(f"/proc/{process.pid}/fd")
        except OSError:  # another user's, or gone
            continue
        for handle in handles:
            try:
                if os.readlink(f"/proc/{process.pid}/fd/{handle}") in inodes:
                    return process
            except OSError:
                continue
    return None
