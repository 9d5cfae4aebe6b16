"""Whether the engine gets on: when it last made a step, and for how many requests it should be making some.

`/health` of a frozen engine still says 200, so this is what tells the supervisor. A request counts while the next move
is the engine's: not before it is handed over, and not while a client is slow to read what was sent to it. Otherwise a
client that stops reading could have the engine restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """Counts what the engine owes, and the time since it last gave anything.

    Args:
        clock: seconds, never going back.
    """

    __slots__ = ("clock", "last", "owed")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.last = clock()
        self.owed = 0

    def mark(self) -> None:
        """The engine made a step."""
        self.last = self.clock()

    def expect(self) -> None:
        """The next move of one more request is the engine's."""
        if not self.owed:
            self.last = self.clock()
        self.owed += 1

    def settle(self) -> None:
        """The next move of one request is no longer the engine's."""
        self.owed -= 1

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the last step; 0 while nothing is owed."""
        return self.clock() - self.last if self.owed > 0 else 0.0


ENGINE = Progress()
"""The one engine of this process: its stat logger (`steps`) marks it, the middleware counts on it."""
