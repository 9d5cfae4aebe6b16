"""Whether the engine gets on: when it last made a step, and for how long some request has waited for one.

`/health` of a frozen engine still says 200, so this is what tells the supervisor. A request counts while the next move
is the engine's: not before it is handed over, and not while a client is slow to read what was sent to it. Otherwise a
client that stops reading could have the engine restarted. Nor does the time count in which nothing has come to the core
yet, because the text of the requests is still being turned into tokens: that makes no step, and needs none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Waiting(Protocol):
    """Whoever waits for the engine, when it does."""

    since: float | None
    """when the next move became the engine's; None while it is somebody else's"""


class Progress:
    """When the engine last gave anything, and who waits for it.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.has_work: Callable[[], bool] = lambda: True
        """whether the engine's core was given anything that it has not finished"""
        self.last = clock()
        self.waiting: set[Waiting] = set()

    def mark(self) -> None:
        """The engine made a step."""
        self.last = self.clock()

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the last step, or since somebody has waited if that is later; 0 while nobody waits."""
        if self.waiting and not self.has_work():
            self.mark()
        since = min((each.since for each in self.waiting if each.since is not None), default=None)
        return 0.0 if since is None else self.clock() - max(self.last, since)


ENGINE = Progress()
"""The one engine of this process: its stat logger (`steps`) marks it, the requests at the door wait for it."""
