"""The planner over any values that are of the right type: it plans or refuses in words, and its sums hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from plan_support import GIB, GPU_PROFILES, REGISTRY, WEIGHTS, machine_of, rank, setting, sized, subject_of

from slimserve.errors import Finding, Refused
from slimserve.machine import Machine
from slimserve.plan import NoRoom, make_plan
from slimserve.planner import fitting, host
from slimserve.planner.capacity import capacity
from slimserve.planner.rank import Rank, Sizes, rank_of
from slimserve.profile import Compilation, Engram, Speculation
from slimserve.show_room import room_lines
from slimserve.subject import Subject

COUNT = st.one_of(st.integers(1, 64), st.integers(1, 1 << 20))
SHARE = st.integers(1, 999).map(lambda step: step / 1000)
GRAPHS = st.builds(
    Compilation,
    cudagraph_mode=st.sampled_from(["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]),
    cudagraph_capture_sizes=st.lists(COUNT, min_size=1, max_size=5).map(tuple),
)
DRAFTS = st.builds(Speculation, method=st.sampled_from(["mtp", "ngram"]), num_speculative_tokens=st.integers(1, 16))
ENGINE: dict[str, st.SearchStrategy[Any]] = {
    "max_model_len": COUNT,
    "max_num_seqs": COUNT,
    "max_num_batched_tokens": COUNT,
    "tensor_parallel_size": st.integers(1, 16),
    "data_parallel_size": st.integers(1, 4),
    "enable_prefix_caching": st.booleans(),
    "enable_expert_parallel": st.booleans(),
    "kv_cache_dtype": st.sampled_from(["bfloat16", "fp8", "fp8_e4m3"]),
    "mamba_ssm_cache_dtype": st.sampled_from(["float32", "bfloat16"]),
    "block_size": st.integers(1, 1 << 10),
    "gpu_memory_utilization": SHARE,
    "compilation_config": st.none() | GRAPHS,
    "speculative_config": st.none() | DRAFTS,
    "engram_config": st.none() | st.builds(Engram, cpu_offload=st.booleans()),
    "moe_backend": st.sampled_from(["marlin", "triton", "flashinfer_trtllm"]),
}


@st.composite
def subjects(draw: st.DrawFn) -> Subject:
    """A profile with any values of any of its settings."""
    name = draw(st.sampled_from(sorted(REGISTRY.profiles)))
    keys = draw(st.lists(st.sampled_from(sorted(ENGINE)), unique=True, max_size=6))
    subject = subject_of(name, **{key: draw(ENGINE[key]) for key in keys})
    admission = replace(subject.profile.admission, slot_context_tokens=setting(draw(COUNT)))
    scores = {"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": setting(draw(st.sampled_from(["0", "64", "007", "1000000"])))}
    return replace(subject, profile=replace(subject.profile, admission=admission, environment=scores))


@st.composite
def machines(draw: st.DrawFn, subject: Subject) -> Machine:
    """The platform's machine, with more memory or less, some of it taken."""
    machine = machine_of(subject)
    memory = replace(machine.memory, available_bytes=draw(st.integers(0, machine.memory.total_bytes)))
    gpus = tuple(
        replace(gpu, free_bytes=draw(st.integers(gpu.memory_bytes // 2, gpu.memory_bytes))) for gpu in machine.gpus
    )
    return replace(machine, memory=draw(st.sampled_from([machine.memory, memory])), gpus=gpus)


@given(st.data())
def test_anything_well_typed_is_planned_or_refused_in_words(data: st.DataObject) -> None:
    subject = data.draw(subjects())
    machine = data.draw(machines(subject))
    findings: tuple[Finding, ...] = ()
    room = None
    try:
        plan = make_plan(subject, machine, WEIGHTS)
    except Refused as refused:
        findings = refused.findings
        room = refused.room if isinstance(refused, NoRoom) else None
    assert all(finding.what and finding.why and finding.do for finding in findings)
    if room is not None:
        assert list(room_lines(room))
        assert all(sum(line.bytes for line in one.lines) == one.total_bytes for one in room.memory)
    if findings:
        return
    for budget in plan.room.memory:
        assert sum(line.bytes for line in budget.lines) == budget.total_bytes
        assert all(line.bytes >= 0 for line in budget.lines)
    assert plan.room.capacity.slots >= subject.profile.engine.max_num_seqs.value
    assert plan.room.capacity.full_slots >= 1


SIZES = st.builds(
    Sizes,
    max_num_seqs=COUNT,
    max_model_len=st.integers(1, 1 << 20),
    max_num_batched_tokens=COUNT,
    gpu_memory_utilization=SHARE,
    score_mib=st.integers(0, 1 << 16),
)
RANKS = st.sampled_from([rank(name) for name in GPU_PROFILES])


@given(RANKS, SIZES, st.integers(1, 1 << 42))
def test_a_budget_adds_up_whether_it_fits_or_not(one: Rank, sizes: Sizes, card: int) -> None:
    budget = replace(one, card_bytes=card).budget(sizes)
    assert budget is not None
    assert sum(line.bytes for line in budget.lines) == budget.total_bytes == card


@given(RANKS, st.integers(0, 1 << 45))
def test_the_hosts_budget_adds_up_whether_it_fits_or_not(one: Rank, tier: int) -> None:
    machine = machine_of(one.subject)
    budget = host.host_budget(one, machine, tier_bytes=tier)
    assert sum(line.bytes for line in budget.lines) == budget.total_bytes == machine.memory.usable_bytes
    assert host.registrations(tier) * host.REGISTRATION_LIMIT >= tier


@given(RANKS, SIZES, st.integers(1, 400 * GIB), st.integers(1, 400 * GIB), SHARE)
def test_more_memory_never_holds_fewer(one: Rank, sizes: Sizes, a: int, b: int, share: float) -> None:
    little, much = (capacity(replace(one, card_bytes=card), sizes) for card in sorted((a, b)))
    assert little.slots <= much.slots
    assert little.full_slots <= much.full_slots
    assert little.warm_conversations <= much.warm_conversations
    low, high = sorted((share, sizes.gpu_memory_utilization))
    less, more = (capacity(one, sized(sizes, "engine.gpu_memory_utilization", part)) for part in (low, high))
    assert less.slots <= more.slots


@given(RANKS, SIZES, st.data())
def test_longer_or_wider_steps_never_leave_the_cache_more(one: Rank, sizes: Sizes, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["max_num_seqs", "max_num_batched_tokens"]))
    more = sized(sizes, f"engine.{name}", getattr(sizes, name) + data.draw(COUNT))
    assert one.cache_bytes(more) <= one.cache_bytes(sizes)


@given(st.sampled_from(GPU_PROFILES), SHARE, st.integers(1, 1 << 16), st.integers(0, 1 << 12), st.data())
def test_nothing_above_what_is_called_largest_fits(
    name: str, share: float, seqs: int, tokens: int, data: st.DataObject
) -> None:
    values = {"gpu_memory_utilization": share, "max_num_seqs": seqs, "max_num_batched_tokens": seqs + tokens}
    subject = subject_of(name, **values)
    one = rank_of(subject, machine_of(subject).gpus)
    for key, value in fitting.largest(one).items():
        assert fitting.fits(one, sized(one.sizes, key, value))
        step = data.draw(st.integers(1, 900))
        higher = value + (step / 1000 if key == "engine.gpu_memory_utilization" else step)
        if key == "engine.max_model_len" and value == subject.model.geometry.max_position_embeddings:
            continue  # the registry refuses more
        if key == "engine.max_num_seqs" and value == values["max_num_batched_tokens"]:
            continue  # a step has no more tokens: refused by the registry too
        assert not fitting.fits(one, sized(one.sizes, key, higher))
