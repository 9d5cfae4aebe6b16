"""How a plan fills its machine, as plain text: budgets that add up, what the cache holds, how far settings can go."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from slimserve.machine import GIB
from slimserve.plan import Room
from slimserve.planner.budget import Budget
from slimserve.planner.capacity import BLOCKS_SHARE
from slimserve.planner.fitting import capture_size

_WIDTH = 110


def room_lines(room: Room) -> Iterator[str]:
    """The part of a plan that speaks of memory."""
    for budget in room.memory:
        yield from _budget(budget)
        yield ""
    yield "cache"
    for name, words in _capacity(room):
        yield f"  {name:<20} {words}"
    largest = room.largest
    if largest:
        yield ""
        yield "largest value of each setting that memory limits, the others as they are"
        for key, value in largest.items():
            size = capture_size(room.rank, value) if key == "engine.max_num_seqs" else None
            needs = "" if size is None else f", with {size} among the cudagraph_capture_sizes"
            yield f"  {key} = {value:g}" if isinstance(value, float) else f"  {key} = {value}{needs}"


def _budget(budget: Budget) -> Iterator[str]:
    yield f"{budget.title}"
    for line in budget.lines:
        if line.bytes:
            why = textwrap.shorten(line.why, _WIDTH - 57, placeholder=" ...")
            yield f"  {line.name:<20} {line.bytes:>17,} B {line.bytes / GIB:>9.3f} GiB  {why}"
    yield f"  {'together':<20} {budget.total_bytes:>17,} B {budget.total_bytes / GIB:>9.3f} GiB"


def _capacity(room: Room) -> Iterator[tuple[str, str]]:
    """What the cache holds, by name."""
    held, engine = room.capacity, room.rank.subject.profile.engine
    slots = engine.max_num_seqs.value
    spare = held.slots - slots
    yield "block", f"{held.block_tokens:,} tokens, {held.slab_bytes:,} B over all layers"
    yield "pool", f"{held.pool_blocks:,} blocks; {held.pool_tokens:,} tokens as the engine's log counts them"
    if room.rank.card_bytes is not None:
        off = int(held.pool_blocks * BLOCKS_SHARE)
        yield (
            "at a start",
            f"refused unless the engine has {held.pool_blocks - off:,} to {held.pool_blocks + off:,} of these blocks: "
            f"{BLOCKS_SHARE:.0%}, {off * held.slab_bytes / GIB:.2f} GiB",
        )
    yield (
        "a request",
        f"of {held.slot_context_tokens:,} tokens takes up to {held.slot_blocks} blocks, "
        f"{held.limiting_blocks} of them for {held.limiting}",
    )
    yield (
        "slots",
        f"{held.slots} of {slots} needed, {f'{spare} to spare' if spare >= 0 else f'{-spare} short'}; "
        f"{held.slots_between} while none is at a block boundary",
    )
    yield "longest requests", f"{held.full_slots} of {engine.max_model_len.value:,} tokens"
    if held.cached_prefix_tokens:
        yield "cached prefix", f"from {held.cached_prefix_tokens:,} tokens on, in steps of {held.block_tokens:,}"
        yield (
            "warm conversations",
            f"{held.warm_conversations} of {held.slot_context_tokens:,} tokens in an idle pool; no second tier",
        )
    graphs = engine.compilation_config
    if graphs is not None and graphs.value.cudagraph_mode != "NONE":
        k = engine.speculative_config.value.num_speculative_tokens if engine.speculative_config else 0
        sizes = graphs.value.cudagraph_capture_sizes
        yield "graphs", f"{len(sizes)} sizes up to {max(sizes)}; a full step is {slots} x (1 + {k}) = {slots * (1 + k)}"
