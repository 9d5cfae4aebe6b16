"""Bounds on what the engine says of a request, before it looks through that for paths of its own.

Errors repeat what a client wrote: the name of a model, a role, the value of a field. The engine takes paths and
tracebacks out of them with expressions whose time grows with the cube of a run of slashes or the square of one of
blanks, and does so where it answers everybody. With long runs left out, its own work is little again.
"""

from __future__ import annotations

import re
import sys

MODULE = "vllm.entrypoints.serve.exception_handling.utils"
# Ten of pydantic's complaints are at most so long; nobody reads more.
MOST_CHARACTERS = 16_000
# No path of this program has more parts, and no text more blanks, of which anybody wants to be told.
_LONG_RUNS = re.compile(r"(?:/[\w\-]++){33,}+|\s{65,}+")


def shortened(message: str) -> str:
    """A message of bounded length, without long runs of what may be parts of a path, or of blanks."""
    return _LONG_RUNS.sub(" ... ", message[:MOST_CHARACTERS])


def bound() -> None:
    """Have the engine's own clean-up get short messages; to be called before others import it from MODULE."""
    module = sys.modules[MODULE]
    clean = module.sanitize_message
    module.sanitize_message = lambda message: clean(shortened(message))  # type: ignore[attr-defined]
