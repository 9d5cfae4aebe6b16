"""How far a benchmark is: a bar on a terminal, a line for each load elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import TextIO

BAR_CELLS = 24
# A bar that is drawn for each of a thousand answers a second would be a load of its own.
SECONDS_BETWEEN = 0.1


class Progress:
    """Shown to whoever waits; what the numbers are is said at the end, and elsewhere.

    Args:
        title: of the whole.
        total: requests that will count.
        stream: where it is shown.
    """

    def __init__(self, title: str, total: int, stream: TextIO) -> None:
        self._title, self.total, self._stream = title, total, stream
        self._terminal = stream.isatty()
        self._begun = self._drawn = time.monotonic()
        self._outcomes: Counter[str] = Counter()
        self._where = ""

    @property
    def done(self) -> int:
        """Requests that have ended."""
        return self._outcomes.total()

    def enter(self, where: str) -> None:
        """Another load begins, whose name this is."""
        self._where = where
        if self._terminal:
            self._draw()
        else:
            self._write(f"{self._title}: {where}, {self.done} of {self.total} requests done\n")

    def add(self, outcome: str) -> None:
        """A request that counts has ended."""
        self._outcomes[outcome] += 1
        if self._terminal and time.monotonic() - self._drawn >= SECONDS_BETWEEN:
            self._draw()

    def close(self) -> None:
        """Leave the line, so that others can write."""
        if self._terminal:
            self._write("\r\x1b[K")

    def line(self) -> str:
        """The bar, as it is now."""
        share = min(1.0, self.done / self.total) if self.total else 1.0
        full = int(share * BAR_CELLS)
        elapsed = time.monotonic() - self._begun
        rest = f", {elapsed / share - elapsed:.0f} s left" if 0 < share < 1 else ""
        wrong = "".join(f", {count} {name}" for name, count in sorted(self._outcomes.items()) if name != "ok")
        cells = "#" * full + "." * (BAR_CELLS - full)
        return f"{self._title} [{cells}] {share:4.0%} {self._where}: {self.done} of {self.total}{rest}{wrong}"

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._write(f"\r{self.line()}\x1b[K")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more; what is measured goes on
            self._stream.write(text)
            self._stream.flush()
