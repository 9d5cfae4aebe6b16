"""Requests that are let in begin a few in each turn of the event loop.

What an admitted request costs at its beginning is several times what a refusal costs. When many come at once, those
that are refused need not wait behind all who are let in: between a few beginnings the loop reads what has arrived.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

AT_ONCE = 8


class Turns:
    """The order in which requests begin, of one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._left = AT_ONCE

    def begin(self, request: Callable[[], None]) -> None:
        """Call `request`: at once, or in one of the next turns when as many as may have begun in this one."""
        if self._left == AT_ONCE:
            asyncio.get_running_loop().call_soon(self._next)
        if self._left:
            self._left -= 1
            request()
        else:
            self._waiting.append(request)

    def _next(self) -> None:
        self._left = AT_ONCE
        for _ in range(min(AT_ONCE, len(self._waiting))):
            self.begin(self._waiting.popleft())
