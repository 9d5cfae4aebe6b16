"""The processes in which an engine computes, watched for the first that dies: the leader only follows it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from slimserve.engine import ending, procfs
from slimserve.engine.descriptors import wait_readable

# A process that names itself has a short command line, in full; the kernel keeps 15 bytes of a name.
_TITLE_LENGTH = 40


class Workers:
    """Watched from the moment on in which it is made.

    Args:
        processes: that live, and end only when they are told to.
    """

    def __init__(self, processes: Iterable[procfs.Process]) -> None:
        self._watched: dict[int, str] = {}
        self.fallen = ""
        """the first that died, and of what if that could be seen; empty while none has"""
        self.status: int | None = None
        """its exit status as `subprocess` gives it; None: not known"""
        for process in processes:
            title = procfs.command_line(process.pid)
            name = title if 0 < len(title) < _TITLE_LENGTH else process.name
            with contextlib.suppress(OSError):  # gone already, or no descriptor left: then there is less to tell
                self._watched[os.pidfd_open(process.pid)] = f"process {process.pid} ({name})"

    @property
    def handles(self) -> list[int]:
        """Descriptors that become readable when one of them dies."""
        return list(self._watched)

    def look(self, leader_lives: bool) -> None:
        """Take note of those that have died.

        Args:
            leader_lives: asked after the last wait; when the leader is dead too, who went first is not known.
        """
        for handle in self.handles:
            if wait_readable([handle], 0):
                name = self._watched.pop(handle)
                if leader_lives and not self.fallen:
                    self.status = procfs.exit_status(int(name.split()[1]))
                    how = "" if self.status is None else f": {ending.status_in_words(self.status)}"
                    self.fallen = f"its {name} died first{how}"
                os.close(handle)

    def close(self) -> None:
        """Watch no more; what was noted stays."""
        for handle in self.handles:
            del self._watched[handle]
            os.close(handle)
