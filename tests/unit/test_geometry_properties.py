"""What holds for every geometry and layout: sums add up, more of something never costs less of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from geometry_models import A95B, FLASH_NEXT, HYBRID, SMOLLM2, broken, checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimserve.errors import Finding, SlimserveError
from slimserve.geometry import Caches, Layout, buffers, caches, packing, shape_of, weights
from slimserve.geometry.caches import state_pages
from slimserve.model import Geometry, Model

MODELS = (FLASH_NEXT, A95B, HYBRID, SMOLLM2)
LONGEST = 1 << 20
CHECKPOINTS = {
    one.id: next(iter(one.checkpoints.values())) if one is not HYBRID and one is not SMOLLM2 else checkpoint()
    for one in MODELS
}

quick = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def planned(draw: st.DrawFn) -> tuple[Model, Layout]:
    """A model in a layout that the engine accepts."""
    one = draw(st.sampled_from(MODELS))
    k = draw(st.integers(0, 4)) if one.geometry.mtp_num_hidden_layers else 0
    layout = Layout(
        tensor_parallel=draw(st.sampled_from(one.geometry.legal_tensor_parallel())),
        expert_parallel=one.geometry.num_experts is not None,
        speculative_tokens=k,
        drafter=k > 0,
        prefix_caching=draw(st.booleans()),
        block_size=draw(st.sampled_from((16, 32, 64, 128))),
    )
    try:
        caches(one, layout)
    except SlimserveError:  # SmolLM2's vocabulary over three ranks, say: refusals have tests of their own
        return SMOLLM2, Layout()
    return one, layout


@st.composite
def geometries(draw: st.DrawFn) -> Model:
    """Small numbers for any architecture: some contradict each other, and now and then one is missing."""
    drawn = {
        "hidden_size": st.sampled_from((64, 128, 192)),
        "num_hidden_layers": st.integers(1, 12),
        "vocab_size": st.integers(1, 5000),
        "tie_word_embeddings": st.booleans(),
        "full_attention_interval": st.integers(1, 6),
        "mamba_ssm_dtype": st.sampled_from(("float32", "bfloat16")),
        "ple_layer_ids": st.lists(st.integers(1, 3), max_size=2).map(tuple),
        "ple_embed_dim": st.sampled_from((64, 192)),
        "ngram_size": st.integers(1, 4),
        "ngram_vocab_size_base": st.integers(2, 3000),
    }
    names = list(Geometry.__dataclass_fields__)
    fields: dict[str, Any] = {name: draw(drawn.get(name, st.sampled_from((1, 2, 4, 8)))) for name in names}
    if draw(st.integers(0, 3)):
        fields |= {"num_key_value_heads": 1, "linear_num_key_heads": 1}
    if draw(st.integers(0, 3)) == 0:
        fields[draw(st.sampled_from(names))] = None
    known = ("LlamaForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen4ExpForCausalLM", "Unknown")
    return broken(HYBRID, Geometry(**fields), draw(st.sampled_from(known)))


@quick
@given(planned())
def test_parts_add_up(case: tuple[Model, Layout]) -> None:
    one, layout = case
    held = weights(one, CHECKPOINTS[one.id], layout)
    names = [part.name for part in held.parts]
    assert len(set(names)) == len(names)
    assert held.device_bytes + held.host_bytes == sum(held.bytes_of(name) for name in names)
    assert all(part.bytes > 0 for part in held.parts)


@quick
@given(planned())
def test_groups_hold_every_layer_once(case: tuple[Model, Layout]) -> None:
    one, layout = case
    shape, laid = shape_of(one), caches(one, layout)
    layers = {kind: sum(g.layers for g in laid.groups if g.kind == kind) for kind in ("attention", "state", "ring")}
    attending = shape.attention.layers + (shape.drafter_layers if layout.drafter else 0)
    assert layers["attention"] == attending
    assert layers["state"] == (shape.linear.layers if shape.linear else 0)
    assert layers["ring"] == (attending if shape.indexer else 0)


@quick
@given(planned())
def test_pages_fit_what_they_hold(case: tuple[Model, Layout]) -> None:
    one, layout = case
    laid = caches(one, layout)
    assert laid.slab_bytes == max(group.bytes for group in laid.groups)
    assert all(group.used_bytes <= group.page_bytes for group in laid.groups)
    assert laid.block_tokens % layout.kernel_block == 0
    largest = max(state_pages(shape_of(one), layout).values(), default=0)
    assert all(group.page_bytes >= largest for group in laid.groups if group.kind != "ring")


def _blocks(laid: Caches, context: int, **how: Any) -> int:
    return laid.blocks_a_request(context, LONGEST, **how)


@quick
@given(planned(), st.integers(1, LONGEST), st.integers(1, LONGEST))
def test_a_longer_request_never_takes_fewer_blocks(case: tuple[Model, Layout], one: int, other: int) -> None:
    laid = caches(*case)
    short, long = sorted((one, other))
    assert _blocks(laid, short) <= _blocks(laid, long)
    assert _blocks(laid, short, settled=True) <= _blocks(laid, short)
    kind, count = laid.heaviest(short, LONGEST)
    assert count == sum(laid.blocks(group, short, LONGEST) for group in laid.groups if group.kind == kind)


@quick
@given(planned(), st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(1, LONGEST))
def test_more_memory_never_holds_fewer_requests(case: tuple[Model, Layout], a: int, b: int, context: int) -> None:
    laid = caches(*case)
    little, much = sorted((a, b))
    assert laid.slots(little, context, LONGEST) <= laid.slots(much, context, LONGEST)
    taken = laid.slots(much, context, LONGEST) * _blocks(laid, context) * laid.slab_bytes
    assert taken <= much


@quick
@given(st.sampled_from((FLASH_NEXT, A95B)), st.sampled_from((1, 2, 4, 8)), st.integers(0, 3), st.integers(1, LONGEST))
def test_more_drafted_tokens_never_cost_less(one: Model, tp: int, k: int, context: int) -> None:
    fewer, more = (caches(one, Layout(tensor_parallel=tp, speculative_tokens=n, drafter=n > 0)) for n in (k, k + 1))
    assert fewer.slab_bytes <= more.slab_bytes
    # Blocks may grow with k and so be fewer: what never shrinks is bytes, and the states held.
    states = [
        sum(laid.blocks(g, context, LONGEST, settled=True) for g in laid.groups if g.kind == "state")
        for laid in (fewer, more)
    ]
    assert states[0] < states[1]


@pytest.mark.parametrize("one", MODELS, ids=lambda one: one.id)
def test_more_ranks_never_hold_more_each(one: Model) -> None:
    legal = one.geometry.legal_tensor_parallel()
    legal = tuple(tp for tp in legal if tp in (1, 2, 4, 8, 16))
    layouts = [Layout(tensor_parallel=tp, expert_parallel=one.geometry.num_experts is not None) for tp in legal]
    held = [weights(one, CHECKPOINTS[one.id], layout).device_bytes for layout in layouts]
    assert held == sorted(held, reverse=True)
    states = [state_pages(shape_of(one), layout).get("state", 0) for layout in layouts]
    assert states == sorted(states, reverse=True)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(
    geometries(),
    st.sampled_from((1, 1, 2, 3, 0, -1)),
    st.integers(0, 2),
    st.integers(-1, 4),
    st.booleans(),
    st.booleans(),
)
def test_any_geometry_is_planned_or_refused_in_words(
    one: Model, tensor: int, data: int, k: int, experts: bool, drafter: bool
) -> None:
    """Nothing but the project's own errors comes out, each with its reason."""
    layout = Layout(
        tensor_parallel=tensor, data_parallel=data, expert_parallel=experts, speculative_tokens=k, drafter=drafter
    )
    held = replace(checkpoint(), host_bytes=1 << 20)
    questions: list[tuple[int, Callable[[], int]]] = [
        (1, lambda: caches(one, layout).blocks_a_request(100, 4096)),
        (1, lambda: weights(one, held, layout).device_bytes),
        (0, lambda: sum(part.bytes for part in buffers(one, held, layout, 2048))),
        (1, lambda: packing(one, layout).slab_bytes),
    ]
    for least, ask in questions:
        findings: tuple[Finding, ...] = ()
        try:
            assert ask() >= least
        except SlimserveError as error:
            findings = error.findings
        assert all(finding.what and finding.why and finding.do for finding in findings)
