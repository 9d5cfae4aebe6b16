"""What the door changed about a request, in constant words: for the response header, the log and the counters."""

from __future__ import annotations

from enum import StrEnum


class Note(StrEnum):
    """One kind of change. The value labels the counter; `text` is what the client reads in the header."""

    GREEDY_REPLACED = "greedy_replaced"
    """sampling fields that made it greedy were removed"""
    THINKING_KEPT = "thinking_kept"
    """a switch that turns thinking off was removed"""
    EFFORT_MAPPED = "effort_mapped"
    """the effort was put into a word that the template knows, or where the engine reads it"""

    @property
    def text(self) -> str:
        """One line of printable ASCII without a byte of the request."""
        return _TEXTS[self]


_TEXTS = {
    Note.GREEDY_REPLACED: "greedy sampling replaced by the model's own defaults",
    Note.THINKING_KEPT: "thinking stays on; lower reasoning_effort for less of it",
    Note.EFFORT_MAPPED: "reasoning_effort passed on as the model's template knows it",
}
