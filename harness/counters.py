"""What a server counted while it was asked: two readings of its `/metrics`, and by how much its counters grew."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields

from harness.receipt import ServerCounts
from slimserve.operator.prometheus import BIRTH, Reading, parse

# The fields of ServerCounts, as engines call them; what none of them has is not known. Counters and sums, which only
# grow.
COUNTERS: dict[str, tuple[str, ...]] = {
    "cache_queries": ("vllm:prefix_cache_queries_total",),
    "cache_hits": ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "queue_seconds": ("vllm:request_queue_time_seconds_sum",),
    "ttft_seconds": ("vllm:time_to_first_token_seconds_sum", "sglang:time_to_first_token_seconds_sum"),
    "drafts": ("vllm:spec_decode_num_drafts_total",),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
}
# No counter grows by more in one load; the sum of a hundred rounds is then still a number that a receipt can hold.
MOST_GROWTH = 1e15

Metrics = Callable[[], str | None]
"""a server's `/metrics` now; None when it has none"""


def reading(metrics: Metrics) -> Reading | None:
    """Of a server's metrics; None where it has none, or something else at their place."""
    text = metrics()
    try:
        return None if text is None else parse(text, time.time())
    except ValueError:
        return None


def counted(before: Reading | None, after: Reading | None) -> ServerCounts:
    """What grew between two readings."""
    found: dict[str, float | None] = {}
    for field, names in COUNTERS.items():
        growths = [growth(before, after, name) for name in names]
        found[field] = next((one for one in growths if one is not None), None)
    return ServerCounts(**found)


def together(one: ServerCounts, other: ServerCounts) -> ServerCounts:
    """The counts of two rounds of a load; one that is not known once is not known of the whole load."""
    pairs = {field.name: (getattr(one, field.name), getattr(other, field.name)) for field in fields(ServerCounts)}
    return ServerCounts(**{name: None if None in pair else sum(pair) for name, pair in pairs.items()})


def growth(before: Reading | None, after: Reading | None, name: str) -> float | None:
    """By how much a counter grew; None where it is not known, was begun anew, or says more than can be."""
    if before is None or after is None or before.total(BIRTH) != after.total(BIRTH):
        return None
    then, now = before.total(name), after.total(name)
    if then is None or now is None:
        return None
    return now - then if 0 <= now - then <= MOST_GROWTH else None
