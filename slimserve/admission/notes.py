"""What the door has to say about a request that was served, in constant words: for the header and the counters."""

from __future__ import annotations

from slimserve.worded import Worded


class Note(Worded):
    """One kind of remark.

    The value labels the counter. `text` is what the client reads: a line of printable ASCII without a byte of the
    request.
    """

    GREEDY_REPLACED = "greedy_replaced", "greedy sampling replaced by the model's own defaults"
    THINKING_KEPT = "thinking_kept", "thinking stays on; lower reasoning_effort for less of it"
    EFFORT_MAPPED = "effort_mapped", "reasoning_effort passed on as the model's template knows it"
    THINKING_EXHAUSTED = (
        "thinking_exhausted",
        "thinking used up the whole token budget before the answer began; allow more tokens or lower the effort",
    )
