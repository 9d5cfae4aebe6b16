"""Memory of the host: one sum over all ranks, against the least of the limits, each with its remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_support import GIB, GPU_PROFILES, WEIGHTS, machine_of, rank, subject_of

from slimserve.errors import Refused
from slimserve.machine import Machine, Memory
from slimserve.plan import make_plan
from slimserve.planner import host
from slimserve.planner.rank import LEFT

RACK = "qwen38fn-fp8-3090x8"


def machine(**memory: int | None) -> Machine:
    """The rack with a tebibyte, and with what a test changes."""
    one = machine_of(subject_of(RACK))
    large = {"total_bytes": 1024 * GIB, "available_bytes": 1024 * GIB}
    return replace(one, memory=Memory(**{**vars_of(one.memory), **large, **memory}))  # type: ignore[arg-type]


def vars_of(memory: Memory) -> dict[str, int | None]:
    return {name: getattr(memory, name) for name in Memory.__dataclass_fields__}


@pytest.mark.parametrize("name", [*GPU_PROFILES, "smollm2-135m-bf16-cpu"])
def test_the_budget_adds_up_to_what_may_be_used(name: str) -> None:
    subject = subject_of(name)
    budget = make_plan(subject, machine_of(subject), WEIGHTS).room.memory[-1]
    assert sum(line.bytes for line in budget.lines) == budget.total_bytes
    assert budget.bytes_of(LEFT) >= 0
    if subject.model.checkpoints[subject.profile.quant].generated is None:  # a slice takes less than its platform has
        assert budget.bytes_of(LEFT) < 8 * GIB  # a platform's memory_bytes is made of this sum


def test_all_ranks_share_one_host() -> None:
    """Case K9: the size a rank x ranks; torch rounds each rank's part of the table up to a power of two."""
    one = rank(RACK)
    budget = host.host_budget(one, machine(), tier_bytes=64 * GIB)
    table = budget.bytes_of("n-gram table, pinned")
    assert table == 51_200_245_760
    assert table + budget.bytes_of("its rounding") == 8 * 8 * GIB
    assert budget.bytes_of("second tier, pinned") == 8 * 64 * GIB
    assert budget.bytes_of("processes") == 10 * 4 * GIB
    assert host.host_budget(one, machine()).bytes_of("second tier, pinned") == 0


def test_a_tier_that_all_ranks_together_cannot_have_is_refused() -> None:
    one = rank(RACK)
    budget = host.host_budget(one, machine(), tier_bytes=128 * GIB)
    (finding,) = host.problems(one, machine(), budget)
    assert finding.what.startswith("1024.0 GiB of host memory can be used (free of 1024.0 GiB)")
    assert "second tier, pinned 1024.0 GiB" in finding.why


def test_the_least_limit_counts_and_its_remedy_is_named() -> None:
    """Case K11: the control group's limit, not the machine's memory."""
    one = rank(RACK)
    small = machine(cgroup_limit_bytes=120 * GIB, cgroup_used_bytes=20 * GIB)
    (finding,) = host.problems(one, small, host.host_budget(one, small))
    assert "100.0 GiB of host memory can be used (the control group's limit, 120.0 GiB)" in finding.what
    assert "105.4 GiB are needed" in finding.what
    assert "docker run --memory" in finding.do
    tight = machine(available_bytes=100 * GIB)
    (finding,) = host.problems(one, tight, host.host_budget(one, tight))
    assert finding.do == "end other programs, or use a machine with more memory"


def test_a_small_shm_is_refused_with_its_remedy() -> None:
    """Case K11: /dev/shm of a container."""
    subject = subject_of(RACK)
    with pytest.raises(Refused, match=r"/dev/shm has 64 MiB free") as caught:
        make_plan(subject, machine(shm_total_bytes=64 << 20, shm_free_bytes=64 << 20), WEIGHTS)
    assert "--shm-size" in str(caught.value)


def test_a_small_memlock_is_told() -> None:
    """Case K11: CUDA pins without asking for that limit, so that it is a note; a platform that needs more refuses."""
    subject = subject_of(RACK)
    plan = make_plan(subject, machine(memlock_bytes=8 << 20), WEIGHTS)
    assert any("8 MiB may be locked and 64.2 GiB are pinned" in note for note in plan.notes)
    needs = replace(subject.platform.needs, memlock_bytes=subject.platform.needs.memory_bytes)
    strict = replace(subject, platform=replace(subject.platform, needs=needs))
    with pytest.raises(Refused, match=r"8 MiB may be locked") as caught:
        make_plan(strict, machine(memlock_bytes=8 << 20), WEIGHTS)
    assert "ulimit -l unlimited" in str(caught.value)


def test_memory_by_socket() -> None:
    """The platform says how many sockets its machines have."""
    subject = subject_of(RACK)
    notes = make_plan(subject, machine_of(subject), WEIGHTS).notes
    assert any("32.1 GiB on each of 2 NUMA nodes, 4 ranks each" in note for note in notes)
    flat = replace(machine_of(subject), cpu=replace(machine_of(subject).cpu, numa_nodes=None))
    assert not any("NUMA" in note for note in make_plan(subject, flat, WEIGHTS).notes)


@pytest.mark.parametrize(("size", "pieces"), [(0, 0), (1, 1), (512 * GIB - 1, 1), (512 * GIB, 2), (1024 * GIB, 3)])
def test_registrations_stay_below_the_limit(size: int, pieces: int) -> None:
    """Case K8: one registration of 512 GiB or more fails."""
    assert host.registrations(size) == pieces
    if pieces:
        assert -(-size // pieces) < host.REGISTRATION_LIMIT


def test_a_table_that_is_pinned_in_one_piece_may_not_be_as_large() -> None:
    """Case K8: the engine allocates a rank's part of the table at once."""
    one = rank(RACK)
    parts = [replace(part, bytes=300 * GIB) if part.on_host else part for part in one.held.parts]
    huge = replace(one, held=replace(one.held, parts=tuple(parts)))
    words = [finding.what for finding in host.problems(huge, machine(), host.host_budget(huge, machine()))]
    assert any("pinned in one piece of 512.0 GiB" in what for what in words)


@pytest.mark.parametrize(("size", "taken"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192), (6_400_030_720, 8 * GIB)])
def test_pinned_memory_comes_in_powers_of_two(size: int, taken: int) -> None:
    """torch, ATen/core/CachingHostAllocator.h."""
    assert host.pinned_bytes(size) == taken


def test_on_a_cpu_weights_and_cache_lie_on_the_host() -> None:
    subject = subject_of("smollm2-135m-bf16-cpu", kv_cache_memory_bytes=64 * GIB)
    with pytest.raises(Refused, match=r"KV cache 64.0 GiB") as caught:
        make_plan(subject, machine_of(subject), WEIGHTS)
    assert len(caught.value.findings) == 1
