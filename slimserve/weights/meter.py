"""Progress for a person: one line redrawn on a terminal, a line every ten percent elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from typing import TextIO

# Who is told how far something has come: bytes done, bytes in all, what is done, as `fetching config.json`.
Tick = Callable[[int, int, str], None]


class Meter:
    """A progress callable for `fetch` and `verify`.

    A stream that takes nothing any more (closed, full, its reader gone) ends the display, not the download.

    Args:
        stream: where the lines go, as a rule stderr; None, as Python has it when stderr was closed, shows nothing.
        clock: seconds from a fixed point.
    """

    def __init__(self, stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._terminal = False
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream was closed
            self._terminal = stream is not None and stream.isatty()
        self._start: tuple[float, int] | None = None
        self._last = (-1, -1)
        self._drawn = float("-inf")
        self._tenth = -1
        self._open = False

    def __call__(self, done: int, total: int, name: str) -> None:
        """Show `done` of `total` bytes; `name` says what is done, as `fetching config.json`."""
        now = self._clock()
        if self._start is None or total != self._last[1] or done < self._last[0]:
            # Another step began; and what was there at its start was not fetched at any rate.
            self._start, self._tenth = (now, done), -1
        self._last = (done, total)
        share = done / total if total else 1.0
        if self._terminal:
            if now - self._drawn < 0.1 and done < total:
                return
            self._drawn, self._open = now, True
            width = max(20, shutil.get_terminal_size().columns - 1)
            self._put("\r" + self._line(done, total, share, name, now)[:width].ljust(width))
        elif int(share * 10) != self._tenth:
            self._tenth = int(share * 10)
            self._put(self._line(done, total, share, name, now) + "\n")

    def _line(self, done: int, total: int, share: float, name: str, now: float) -> str:
        assert self._start is not None
        seconds, moved = now - self._start[0], done - self._start[1]
        rate = f", {moved / seconds / 1e6:.1f} MB/s" if seconds >= 0.5 and moved else ""
        return f"{share:4.0%}  {done / 1e6:.1f} of {total / 1e6:.1f} MB{rate}  {name}"

    def close(self) -> None:
        """End the redrawn line, so that what follows starts on its own."""
        if self._open:
            self._put("\n")
            self._open = False

    def _put(self, text: str) -> None:
        if self._stream is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
