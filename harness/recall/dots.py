"""How a battery goes on, for whoever waits."""

from __future__ import annotations

import contextlib
import threading
from typing import TextIO

from harness.recall.scoring import Probe


class Dots:
    """One letter for each answer on a terminal: a dot for a right one, an x for another; elsewhere nothing.

    Args:
        stream: where they are shown.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._begun = False
        self._lock = threading.Lock()

    def __call__(self, probe: Probe) -> None:
        """An answer has come, on whichever thread."""
        with self._lock:
            self._begun = True
            self._write("." if probe.outcome == "right" else "x")

    def close(self) -> None:
        """Leave the line, so that others can write."""
        if self._begun:
            self._write("\n")

    def _write(self, text: str) -> None:
        if self._terminal:
            with contextlib.suppress(OSError):  # nobody reads it any more; the battery goes on
                self._stream.write(text)
                self._stream.flush()
