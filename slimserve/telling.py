"""The tool's own words."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """The tool's own words go to stderr, so that stdout holds the model's alone."""
    with contextlib.suppress(OSError):  # nobody reads it any more; what is under way goes on
        print(f"slimserve: {text}", file=sys.stderr, flush=True)
