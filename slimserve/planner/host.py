"""Memory of the host, all ranks of one machine together, as one sum against what may be used of it."""

from __future__ import annotations

from collections.abc import Iterator

from slimserve.errors import Finding
from slimserve.geometry.layout import BF16, ceil_div
from slimserve.machine import GIB, Machine, gib
from slimserve.planner.budget import Budget, Line
from slimserve.planner.rank import CACHE, LEFT, Rank

REGISTRATION_LIMIT = 512 * GIB
"""one registration of this size or more fails (vllm-project/vllm, issue 51080)"""
_SERVERS = 2
"""processes beside the ranks: engine core and API server"""
_TOKEN = 4
"""bytes of a token id"""


def pinned_bytes(size: int) -> int:
    """What the pinned allocator takes for `size` bytes: the next power of two.

    Source: torch 2.11, ATen/core/CachingHostAllocator.h; the engine allocates with `pin_memory=True`
    (vllm/models/qwen4_exp/common/ngram_embedding.py).
    """
    return 1 << (size - 1).bit_length() if size > 0 else 0


def ranks_here(rank: Rank) -> int:
    """Ranks on one node, which is what one machine is asked for."""
    return rank.layout.ranks // rank.subject.platform.nodes


def registrations(size: int) -> int:
    """In how many pieces `size` bytes have to be registered, each smaller than the limit."""
    return ceil_div(size, REGISTRATION_LIMIT - 1)


def host_budget(rank: Rank, machine: Machine, *, tier_bytes: int = 0) -> Budget:
    """The host's memory with every rank of `rank`'s profile on it.

    Args:
        rank: one of them; all hold the same.
        machine: whose memory counts, as far as it may be used.
        tier_bytes: of the second cache tier, a rank; no profile has one today.
    """
    sizes, ranks = rank.sizes, ranks_here(rank)
    needs = rank.subject.platform.needs
    lines = []
    if rank.card_bytes is None:
        work = rank.activations(sizes)
        step = work.profiled_bytes + work.beyond_bytes
        lines += [
            Line("weights", ranks * rank.held.device_bytes, f"{rank.subject.profile.quant}, on the host"),
            Line(CACHE, ranks * rank.cache_bytes(sizes), "kv_cache_memory_bytes"),
            Line("activations", ranks * step, f"{work.widest} of {sizes.max_num_batched_tokens:,} tokens"),
        ]
    else:
        table = rank.held.host_bytes
        ids = sizes.max_num_seqs * sizes.max_model_len * _TOKEN
        lines += [
            Line("n-gram table, pinned", ranks * table, f"{ranks} x {gib(table)}"),
            Line("its rounding", ranks * (pinned_bytes(table) - table), "the pinned allocator takes powers of two"),
            Line("token ids, pinned", ranks * pinned_bytes(ids), "max_num_seqs x max_model_len x 4 B a rank"),
            Line("second tier, pinned", ranks * tier_bytes, _tier_words(tier_bytes)),
        ]
    each = needs.process_bytes.value
    processes = ranks + _SERVERS
    lines.append(Line("processes", processes * each, f"{processes} x {gib(each)}, {needs.process_bytes.evidence}"))
    # A rank copies its slice of one tensor at a time; the files themselves are mapped, and can be dropped.
    largest = rank.shape.padded_vocab * rank.shape.hidden * BF16
    lines.append(Line("weights in flight", largest, "the largest tensor, in the slices of all ranks"))
    usable = machine.memory.usable_bytes
    lines.append(Line(LEFT, usable - sum(line.bytes for line in lines), "of what may be used"))
    return Budget(f"memory of the host, {_limit(machine)}", usable, tuple(lines))


def problems(rank: Rank, machine: Machine, budget: Budget) -> Iterator[Finding]:
    """Every way in which `budget` does not fit `machine`."""
    left = budget.bytes_of(LEFT)
    if left < 0:
        parts = ", ".join(f"{line.name} {gib(line.bytes)}" for line in budget.lines if line.bytes > 0)
        yield Finding(
            f"{gib(budget.total_bytes)} of host memory can be used ({_limit(machine)}), "
            f"{gib(budget.total_bytes - left)} are needed",
            f"all ranks share it: {parts}",
            _remedy(machine),
        )
    single = pinned_bytes(rank.held.host_bytes)
    if single >= REGISTRATION_LIMIT:
        yield Finding(
            f"the n-gram table of a rank is pinned in one piece of {gib(single)}",
            "the driver refuses one registration of 512 GiB or more",
            "use a profile with more ranks, each of which holds a smaller part",
        )


def notes(rank: Rank, machine: Machine, budget: Budget) -> Iterator[str]:
    """What of the host's memory is worth knowing, without refusing."""
    pinned = sum(line.bytes for line in budget.lines if line.name.endswith("pinned") or line.name == "its rounding")
    nodes = machine.cpu.numa_nodes or 1
    if pinned and nodes > 1:
        ranks = ceil_div(ranks_here(rank), nodes)
        share = pinned * ranks // ranks_here(rank)
        yield f"{gib(pinned)} of host memory are pinned: {gib(share)} on each of {nodes} NUMA nodes, {ranks} ranks each"
    allowed = machine.memory.memlock_bytes
    if pinned and allowed is not None and allowed < pinned:
        yield f"{gib(allowed)} may be locked and {gib(pinned)} are pinned: CUDA pins past that limit, mlock would not"


def _tier_words(size: int) -> str:
    if not size:
        return "none"
    return f"{gib(size)} a rank, in {registrations(size)} registrations of less than {gib(REGISTRATION_LIMIT)}"


def _limit(machine: Machine) -> str:
    """What binds: the control group or the machine."""
    memory = machine.memory
    if memory.cgroup_limit_bytes is not None and memory.usable_bytes < memory.available_bytes:
        return f"the control group's limit, {gib(memory.cgroup_limit_bytes)}"
    return f"free of {gib(memory.total_bytes)}"


def _remedy(machine: Machine) -> str:
    if machine.memory.usable_bytes < machine.memory.available_bytes:
        return "raise the limit (docker run --memory, systemd MemoryMax=, the pod's memory limit)"
    return "end other programs, or use a machine with more memory"
