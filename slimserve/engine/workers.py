"""The processes in which an engine computes, watched for the first that dies: the others only follow it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Sequence

from slimserve.engine import ending, procfs
from slimserve.engine.descriptors import wait_readable
from slimserve.records import dataclass

# A process that names itself has a short command line, in full; the kernel keeps 15 bytes of a name.
_TITLE_LENGTH = 40


@dataclass(frozen=True)
class Death:
    """One process that died.

    Args:
        pid, parent: its number, and that of its parent while it lived.
        name: what it is.
        status: its exit status as `subprocess` gives it; None: not known.
    """

    pid: int
    parent: int
    name: str
    status: int | None

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"

    @property
    def how(self) -> str:
        """Of what, as the end of a phrase; empty where that could not be seen."""
        return "" if self.status is None else f": {ending.status_in_words(self.status)}"

    def follows(self, other: Death) -> bool:
        """Whether it is certain that the kernel killed this one because `other`, its parent, had been killed.

        A parent that exits may do so because its child has died: of those two either may have been the first.
        """
        killed = other.status is not None and other.status < 0
        return self.parent == other.pid and killed and self.status in (None, -signal.SIGKILL)


def first(dead: Sequence[Death]) -> tuple[str, int | None]:
    """Of those that were found dead at once the one that died first, in words, and its exit status where it is known.

    Where more than one can have been the first, all of them are told, and none is claimed to be it.
    """
    candidates = [one for one in dead if not any(one.follows(other) for other in dead)]
    if len(candidates) == 1:
        (one,) = candidates
        return f"its {one} died first{one.how}", one.status
    told = ", ".join(f"{one}{one.how}" for one in candidates)
    return f"which of its processes died first is not known; dead are {told}", None


class Workers:
    """Watched from the moment on in which it is made.

    Args:
        processes: that live, and end only when they are told to.
    """

    def __init__(self, processes: Iterable[procfs.Process]) -> None:
        self._watched: dict[int, procfs.Process] = {}
        self._names: dict[int, str] = {}
        self._unordered: list[Death] = []
        self.fallen = ""
        """the first that died, and of what if that could be seen; empty while none has"""
        self.status: int | None = None
        """its exit status as `subprocess` gives it; None: not known"""
        for process in processes:
            title = procfs.command_line(process.pid)
            self._names[process.pid] = title if 0 < len(title) < _TITLE_LENGTH else process.name
            with contextlib.suppress(OSError):  # gone already, or no descriptor left: then there is less to tell
                self._watched[os.pidfd_open(process.pid)] = process

    @property
    def handles(self) -> list[int]:
        """Descriptors that become readable when one of them dies."""
        return list(self._watched)

    def look(self, leader_lives: bool) -> None:
        """Take note of those that have died.

        Args:
            leader_lives: asked after the last wait; when the leader is dead or dying too, they may have followed it.
        """
        dead = [self._take(handle) for handle in self.handles if wait_readable([handle], 0)]
        # Of a parent that is being killed the children die while threads of it still live.
        parents = {one.parent for one in dead}
        dead += [
            self._take(handle)
            for handle, process in list(self._watched.items())
            if process.pid in parents and procfs.exit_status(process.pid) is not None
        ]
        dead = [one for one in dead if one.status != 0]  # who ended in order was told to
        if not leader_lives:
            self._unordered += dead
        elif dead and not self.fallen:
            self.fallen, self.status = first(dead)

    def with_leader(self, leader: Death) -> str:
        """What the engine died of, in words, now that its leader is dead."""
        if self.fallen:
            return self.fallen
        if not self._names:  # nobody was watched, and the leader may have followed anybody
            return leader.how.removeprefix(": ")
        return first([leader, *self._unordered])[0]

    def close(self) -> None:
        """Watch no more; what was noted stays."""
        for handle in self.handles:
            del self._watched[handle]
            os.close(handle)

    def _take(self, handle: int) -> Death:
        process = self._watched.pop(handle)
        try:
            status = procfs.exit_status(process.pid)
            if status is None:  # its parent has fetched it
                status = procfs.fetched_status(handle)
        finally:
            os.close(handle)
        return Death(process.pid, process.parent, self._names[process.pid], status)
