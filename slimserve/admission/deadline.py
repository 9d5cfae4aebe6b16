"""The deadline of a connection: one at a time, and cheap to move, since every request moves it several times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls back when it is reached, unless it was moved or lifted before.

    A timer that is due too early is not exchanged but looks again when it rings: in a flood exchanging them would cost
    as much as the answers do.

    Args:
        loop: whose clock counts.
    """

    __slots__ = ("_due", "_loop", "_rings_at", "_then", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = 0.0
        self._due = 0.0
        self._then: Callable[[], None] | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is one."""
        return self._then is not None

    def set(self, seconds: float, then: Callable[[], None]) -> None:
        """Call `then` in so many seconds, and nothing that was to be called before."""
        self._due = self._loop.time() + seconds
        self._then = then
        if self._timer is None:
            self._ring()
        elif self._due < self._rings_at:
            self._timer.cancel()
            self._ring()

    def lift(self) -> None:
        """Call nothing; the timer may ring in vain."""
        self._then = None

    def end(self) -> None:
        """Call nothing, and hold on to nothing: there will be no other."""
        self._then = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._rings_at = self._due
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._then is None:
            return
        # The loop counts what is due within its clock's resolution as due.
        if self._due > self._rings_at:
            self._ring()
            return
        then, self._then = self._then, None
        then()
