"""The signals that ask for the end: counted while a supervisor runs, and held back where they would be lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _taken() -> list[signal.Signals]:
    """Those that are not ignored (as nohup has SIGHUP ignored) nor somebody's outside Python."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


class Stopped(Exception):
    """A signal asked for the end."""


class Counter:
    """Counts the stop signals that come inside `with`; `fileno()` is readable while one is pending.

    Used in the main thread, where Python runs its signal handlers.
    """

    def __init__(self) -> None:
        self.count = 0
        self._heeded = 0
        self._reader, self._writer = -1, -1
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Counter:
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before = {number: signal.signal(number, self._handle) for number in _taken()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.pending:
            os.write(self._writer, b".")

    @property
    def pending(self) -> bool:
        """Whether one came that nobody has heeded yet."""
        return self.count > self._heeded

    def heed(self) -> None:
        """Take one signal as heard, the one that is pending or else the first that will come.

        What waits after this is woken by the next.
        """
        self._heeded += 1  # before the read: one that comes in between writes nothing
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 1)

    def fileno(self) -> int:
        """A descriptor to wait for."""
        return self._reader


@contextmanager
def deferred() -> Iterator[None]:
    """Hold the stop signals back inside, and deliver each at the end to the handler that it was meant for.

    For the moment in which a process exists that nobody could name yet. Does nothing outside the main thread, where
    no handler runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda got, frame: came.append(got)) for number in _taken()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for got in came:
            signal.raise_signal(got)
