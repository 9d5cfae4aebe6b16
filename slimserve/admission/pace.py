"""How fast slots come back, and who was told lately to come back himself: what Retry-After rests on."""

from __future__ import annotations

import math
from collections.abc import Callable

# Releases are remembered over about so many seconds of work: long enough to see several endings of long answers,
# short enough to follow a change of load within the longest Retry-After.
MEMORY_SECONDS = 60.0


class Pace:
    """Releases a second, exponentially weighted over the recent seconds of work; idle time does not count.

    Before anything was released the rate is unknown: then it is taken that the first release takes as long again as
    the work has lasted so far.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self._worked = 0.0
        self._weight = 0.0
        self._refusals = 0.0
        self._refused_at = clock()

    def start(self) -> None:
        """The first slot of an empty house is taken."""
        self._since = self._clock()

    def _pass(self) -> None:
        """Let the time since the last look fade what was seen before it."""
        if self._since is not None:
            now = self._clock()
            passed, self._since = now - self._since, now
            self._worked += passed
            self._weight *= math.exp(-passed / MEMORY_SECONDS)

    def release(self, count: int, idle: bool) -> None:
        """So many sequences ended; `idle`: they were the last."""
        self._pass()
        self._weight += count
        if idle:
            self._since = None

    def rate(self) -> float:
        """Releases a second; more than 0."""
        self._pass()
        if not self._weight:
            return 1 / max(self._worked, 1.0)
        # What a steady rate of 1 would have left behind by now, so that a short past is not taken for a slow one.
        return self._weight / max(MEMORY_SECONDS * -math.expm1(-self._worked / MEMORY_SECONDS), 1e-3)

    def refuse(self) -> None:
        """A request was told to come back."""
        self._refusals = self.refused() + 1
        self._refused_at = self._clock()

    def refused(self) -> float:
        """Those who were told to come back in the recent past, and so are ahead of the next one."""
        return self._refusals * math.exp((self._refused_at - self._clock()) / MEMORY_SECONDS)
