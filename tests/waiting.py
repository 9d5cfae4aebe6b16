"""Waiting for an event, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float = 60, every: float = 0.02) -> T:
    """What `condition` returns, as soon as that is true; it is asked at least once, and again after the last wait.

    Raises:
        AssertionError: it was not within `seconds`; the line that called says what was waited for.
    """
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() >= end:
            raise AssertionError(f"not within {seconds:g} s; the last look found {found!r}")
        time.sleep(every)
    return found
