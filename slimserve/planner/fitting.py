"""Every way in which a rank does not fit its card, and the largest values that would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from slimserve.machine import gib
from slimserve.planner.capacity import capacity, slot_context
from slimserve.planner.rank import Rank, Sizes
from slimserve.profile import SCORES
from slimserve.shapes import Loc, Problem

STEPS = 1000
"""gpu_memory_utilization is looked for in steps of a thousandth"""
MOST_TOKENS = 1 << 20
"""no step is longer"""
KEYS = {name: f"engine.{name}" for name in Sizes.__dataclass_fields__} | {"score_mib": f"environment.{SCORES}"}
"""the keys of a profile that `Sizes` reads"""


Check = Callable[[Rank, Sizes], bool]


def has_room(rank: Rank, sizes: Sizes) -> bool:
    """Whether anything is left for a cache."""
    return rank.cache_bytes(sizes) >= 0


def holds_longest(rank: Rank, sizes: Sizes) -> bool:
    """Whether the pool holds one request of the longest context, without which the engine does not start."""
    return has_room(rank, sizes) and capacity(rank, sizes).full_slots >= 1


def holds_slots(rank: Rank, sizes: Sizes) -> bool:
    """Whether the pool holds a usual request in every slot."""
    return has_room(rank, sizes) and capacity(rank, sizes).slots >= sizes.max_num_seqs


def survives_prompts(rank: Rank, sizes: Sizes) -> bool:
    """Whether a long prompt finds the memory that profiling did not see it take."""
    return rank.card_bytes is None or rank.left_bytes(sizes) >= 0


def fits(rank: Rank, sizes: Sizes) -> bool:
    """Whether a rank fits its card with `sizes`: all of the above."""
    if slot_context(rank) > sizes.max_model_len or not survives_prompts(rank, sizes) or not has_room(rank, sizes):
        return False
    held = capacity(rank, sizes)
    return held.full_slots >= 1 and held.slots >= sizes.max_num_seqs


def problems(rank: Rank) -> Iterator[Problem]:
    """Every way in which the profile of `rank` does not fit, each with the largest values that would."""
    sizes, context = rank.sizes, slot_context(rank)
    if context > sizes.max_model_len:
        yield Problem(
            ("admission", "slot_context_tokens", "value"),
            f"admission.slot_context_tokens = {context} exceeds engine.max_model_len = {sizes.max_model_len}",
            "no request grows that long",
            f"use at most {sizes.max_model_len}, or a longer max_model_len",
        )
        return
    if not has_room(rank, sizes):
        yield Problem(
            _engine("gpu_memory_utilization"),
            f"the weights take {gib(rank.held.device_bytes)} on each of {rank.layout.ranks} GPUs, and what runs them "
            "more than is left",
            f"there would be no room for a KV cache: {_arithmetic(rank, sizes)}",
            _remedies(rank, has_room),
        )
        return
    held = capacity(rank, sizes)
    if not holds_longest(rank, sizes):
        yield Problem(
            _engine("max_model_len"),
            f"engine.max_model_len = {sizes.max_model_len}: one request of that length does not fit",
            f"it takes {held.full_blocks} blocks and the engine one for itself, the pool has {held.pool_blocks}: "
            f"{_arithmetic(rank, sizes)}",
            _remedies(rank, holds_longest),
        )
    if not holds_slots(rank, sizes):
        yield Problem(
            _engine("max_num_seqs"),
            f"engine.max_num_seqs = {sizes.max_num_seqs} does not fit: {held.slots} requests of "
            f"{held.slot_context_tokens:,} tokens do, {sizes.max_num_seqs - held.slots} short",
            f"each takes up to {held.slot_blocks} blocks, {held.limiting_blocks} of them for its {held.limiting} "
            f"groups, and the pool has {held.pool_blocks}; {held.slots_between} fit while none is at a block boundary: "
            f"{_arithmetic(rank, sizes)}",
            _remedies(rank, holds_slots),
        )
    if not survives_prompts(rank, sizes):
        beyond = rank.activations(sizes).beyond_bytes
        yield Problem(
            _engine("gpu_memory_utilization"),
            f"engine.gpu_memory_utilization = {sizes.gpu_memory_utilization:g} leaves "
            f"{gib(-rank.left_bytes(sizes))} too little beside it",
            f"a long prompt takes {gib(beyond)} that profiling does not see: it would start, and run out of memory "
            "when the first one comes",
            _remedies(rank, survives_prompts),
        )


def largest(rank: Rank, check: Check = fits) -> dict[str, float]:
    """The largest value of each setting that `check` allows, by its key in the profile, the others as they are.

    A setting is missing of which no value will do, and one that memory does not limit.
    """
    sizes = rank.sizes
    bounds = {
        "max_num_seqs": (1, sizes.max_num_batched_tokens),
        "max_model_len": (slot_context(rank), rank.subject.model.geometry.max_position_embeddings),
        "max_num_batched_tokens": (sizes.max_num_seqs, MOST_TOKENS),
        "score_mib": (1, MOST_TOKENS),
    }
    if rank.shape.indexer is None or rank.card_bytes is None:
        del bounds["score_mib"]
    found: dict[str, float] = {}
    for name, (low, high) in bounds.items():
        value = _last(low, high, partial(_passes, check, rank, sizes, name))
        if value is not None and value < MOST_TOKENS:
            found[KEYS[name]] = value
    share = shares(rank, check)
    if share is not None:
        found[KEYS["gpu_memory_utilization"]] = share[1]
    return found


def _passes(check: Check, rank: Rank, sizes: Sizes, name: str, value: int) -> bool:
    return check(rank, replace(sizes, **{name: value}))


def shares(rank: Rank, check: Check = fits) -> tuple[float, float] | None:
    """The least and the largest gpu_memory_utilization with which `check` passes and long prompts fit, if any."""
    if rank.card_bytes is None:
        return None
    sizes = rank.sizes

    def at(step: int) -> Sizes:
        return replace(sizes, gpu_memory_utilization=step / STEPS)

    high = _last(1, STEPS - 1, lambda step: rank.left_bytes(at(step)) >= 0)
    if high is None or not check(rank, at(high)):
        return None
    short = _last(1, high, lambda step: not check(rank, at(step)))
    return ((short or 0) + 1) / STEPS, high / STEPS


def _last(low: int, high: int, good: Callable[[int], bool]) -> int | None:
    """The last value that is good of a range whose upper end is bad throughout, if any of it is.

    Small values can be bad as well: a short step profiles little, and then leaves a long prompt's scores no room.
    """
    if low > high:
        return None
    bad, value = high + 1, high
    while not good(value):
        if value == low:
            return None
        bad, value = value, low + (value - low) // 2
    while bad - value > 1:
        middle = (value + bad) // 2
        value, bad = (middle, bad) if good(middle) else (value, middle)
    return value


def _arithmetic(rank: Rank, sizes: Sizes) -> str:
    """How the cache came to its size."""
    budget = rank.budget(sizes)
    if budget is None:
        return f"kv_cache_memory_bytes = {rank.cache_bytes(sizes):,} of {rank.caches.slab_bytes:,} B blocks"
    weighed = rank.held.device_bytes
    beside = budget.bytes_of("buffers", "sampling tables", "runtime")
    work, graphs, cache = budget.bytes_of("activations"), budget.bytes_of("CUDA graphs"), rank.cache_bytes(sizes)
    share = weighed + beside + work + graphs + cache
    return (
        f"{gib(share)} of the card, less {gib(weighed)} of weights, {gib(work)} of activations, {gib(graphs)} of "
        f"graphs and {gib(beside)} beside, leave {gib(cache) if cache >= 0 else 'nothing'} for the cache"
    )


def _remedies(rank: Rank, check: Check) -> str:
    """One change each that mends what `check` found."""
    words, found, sizes = [], largest(rank, check), rank.sizes
    for name, key in KEYS.items():
        value, now = found.get(key), getattr(sizes, name)
        if name != "gpu_memory_utilization" and value is not None and value < now:
            words.append(f"{key} of at most {value}{_capture(rank, name, value)}")
    share = shares(rank) or shares(rank, check)
    if share is not None and not share[0] <= sizes.gpu_memory_utilization <= share[1]:
        words.append(f"engine.gpu_memory_utilization from {share[0]:g} to {share[1]:g}")
    if rank.card_bytes is None:
        words.append("a larger engine.kv_cache_memory_bytes")
    return "use " + " or ".join(words) if words else "use a profile with more GPUs, or with a smaller checkpoint"


def capture_size(rank: Rank, slots: float) -> int | None:
    """The size that has to be among the capture sizes for so many slots, and is not; None: nothing is missing."""
    engine = rank.subject.profile.engine
    graphs = engine.compilation_config
    if graphs is None or graphs.value.cudagraph_mode == "NONE":
        return None
    k = engine.speculative_config.value.num_speculative_tokens if engine.speculative_config else 0
    full = int(slots) * (1 + k)
    return None if full in graphs.value.cudagraph_capture_sizes else full


def _capture(rank: Rank, name: str, value: float) -> str:
    size = capture_size(rank, value) if name == "max_num_seqs" else None
    return "" if size is None else f" (with {size} among the cudagraph_capture_sizes)"


def _engine(key: str) -> Loc:
    return ("engine", key, "value")
