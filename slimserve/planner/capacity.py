"""What a pool of blocks holds: requests side by side, and conversations that are cached between their turns."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slimserve.planner.rank import Rank, Sizes
from slimserve.records import dataclass

BLOCKS_SHARE = 0.02
"""by how much an engine's blocks may differ from the plan's where memory decides: no two starts measure the same"""


@dataclass(frozen=True)
class Capacity:
    """What the cache of one rank holds; every rank holds the same requests.

    Args:
        block_tokens: tokens of an attention block, and what two cached states lie apart.
        slab_bytes: of one block over all layers.
        pool_blocks: as the engine counts them, its null block among them.
        pool_tokens: as the engine's log counts them: requests of the longest context, in tokens.
        slot_context_tokens: the request that a slot is meant for.
        slot_blocks: that such a request may hold at once.
        slots: such requests side by side, each of them at its most.
        slots_between: the same, all of them between two block boundaries.
        full_blocks: that a request of max_model_len may hold at once.
        full_slots: such requests side by side.
        limiting: kind of the cache group that takes most of `slot_blocks`.
        limiting_blocks: how many it takes.
        cached_prefix_tokens: the shortest prefix that a later request can find.
        warm_conversations: of slot_context_tokens that an idle pool keeps between their turns.
    """

    block_tokens: int
    slab_bytes: int
    pool_blocks: int
    pool_tokens: int
    slot_context_tokens: int
    slot_blocks: int
    slots: int
    slots_between: int
    full_blocks: int
    full_slots: int
    limiting: str
    limiting_blocks: int
    cached_prefix_tokens: int
    warm_conversations: int

    def to_json(self) -> dict[str, Any]:
        """The capacity as a JSON object."""
        return asdict(self)


def capacity(rank: Rank, sizes: Sizes) -> Capacity:
    """What `rank` holds under `sizes`."""
    laid, pool, longest = rank.caches, max(rank.cache_bytes(sizes), 0), sizes.max_model_len
    context = min(slot_context(rank), longest)
    each, full = laid.blocks_a_request(context, longest), laid.blocks_a_request(longest, longest)
    kind, count = laid.heaviest(context, longest)
    blocks = laid.pool_blocks(pool)
    # The drafter's cache of a hit's last block lacks what only the next token gives, so the engine drops that block
    # (v1/core/kv_cache_coordinator.py, drop_eagle_block): a prefix is found from its second block on.
    prefix = laid.block_tokens * (2 if rank.layout.drafts else 1)
    return Capacity(
        block_tokens=laid.block_tokens,
        slab_bytes=laid.slab_bytes,
        pool_blocks=blocks,
        pool_tokens=blocks * longest // full,
        slot_context_tokens=context,
        slot_blocks=each,
        slots=laid.slots(pool, context, longest),
        slots_between=laid.slots(pool, context, longest, settled=True),
        full_blocks=full,
        full_slots=laid.slots(pool, longest, longest),
        limiting=kind,
        limiting_blocks=count,
        cached_prefix_tokens=prefix if rank.layout.prefix_caching else 0,
        warm_conversations=max(0, blocks - 1) // kept_blocks(rank, context) if rank.layout.prefix_caching else 0,
    )


def slot_context(rank: Rank) -> int:
    """The request that a slot is meant for, in tokens."""
    return rank.subject.profile.admission.slot_context_tokens.value


def kept_blocks(rank: Rank, context_tokens: int) -> int:
    """Blocks that a conversation keeps while it waits for its next turn: whole blocks, and a state of each group.

    The ring is never cached: it is empty at a block boundary.
    """
    laid = rank.caches
    kept = 0
    for group in laid.groups:
        if group.kind == "attention":
            kept += context_tokens // group.block_tokens
        elif group.kind != "ring":
            kept += 1
    return max(kept, 1)
