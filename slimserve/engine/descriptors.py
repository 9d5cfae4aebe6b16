"""File descriptors: having enough of them, and waiting for one. By `poll`: `select` knows only those below 1024."""

from __future__ import annotations

import contextlib
import resource
import select
import time
from collections.abc import Iterable
from typing import Protocol

# What Linux itself lets one process have, unless somebody changed it: a higher limit is no limit.
MOST_DESCRIPTORS = 1 << 20
SLICE_SECONDS = 1.0


class Handle(Protocol):
    """Whatever has a descriptor."""

    def fileno(self) -> int:
        """Its number."""


def raise_limit() -> None:
    """Have as many descriptors as this process may: the default of 1,024 is for programs that know no better."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it: then it is as it was
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def wait_readable(handles: Iterable[Handle | int], seconds: float | None) -> bool:
    """Wait until one of `handles` is readable or broken, at most `seconds` (None: for ever); whether one is."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    end = None if seconds is None else time.monotonic() + seconds
    while not (ready := poll.poll(None if end is None else max(0.0, end - time.monotonic()) * 1000)):
        if end is None or time.monotonic() >= end:
            break  # a fraction of a millisecond is cut off, and would come too early
    return bool(ready)


def wait_awake(handle: Handle | int, seconds: float) -> bool:
    """As `wait_readable`, but only time in which this process could run counts, give or take a second.

    A process that is stopped for an hour (a paused container, a machine that swaps) has not waited for an hour.
    """
    left = seconds
    while left > 0:
        part = min(left, SLICE_SECONDS)
        if wait_readable([handle], part):
            return True
        left -= part
    return False
