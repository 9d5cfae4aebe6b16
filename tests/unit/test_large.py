"""The model of 2.4T: published sizes, its drafter, and profiles of several nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_support import REGISTRY, WEIGHTS, machine_of, rank, setting, subject_of, with_engine

from slimserve.consistency import check_consistency
from slimserve.errors import Refused
from slimserve.geometry import Layout, caches, dspark, weights
from slimserve.plan import make_plan
from slimserve.planner.host import host_budget, ranks_here
from slimserve.profile import Speculation
from slimserve.shapes import ShapeError, build

MODEL = REGISTRY.models["qwen38-2.4t-a95b"]
DRAFTER = MODEL.drafters["dspark"]
NODES2, NODES4, NODE = "qwen38max-fp8-b200x8-nodes2", "qwen38max-fp8-gb300x4-nodes4", "qwen38max-nvfp4-b200x8"


def drafting(tp: int, k: int = 7, **settings: Any) -> Layout:
    return Layout(tensor_parallel=tp, kv_cache_dtype="fp8", speculative_tokens=k, draft_model=DRAFTER, **settings)


def whole(quant: str) -> int:
    """Bytes of a checkpoint, the MTP layer's among them, as one rank would hold it."""
    return weights(MODEL, MODEL.checkpoints[quant], Layout(speculative_tokens=1, drafter=True)).device_bytes


def test_the_shapes_give_the_published_size_of_nvfp4() -> None:
    """vLLM recipe, variants: index total_size 1,447,265,951,488 B. A_log is fp32 in the engine, bf16 in the file."""
    a_log = 69 * 128 * 2
    assert whole("nvfp4") - a_log == MODEL.checkpoints["nvfp4"].bytes == 1_447_265_951_488


def test_the_shapes_give_the_published_size_of_fp8() -> None:
    """vLLM recipe, variants: index total_size 2,496,154,358,768 B."""
    assert whole("fp8-block128") == pytest.approx(2_496_154_358_768, rel=1e-4)


def test_the_drafter_has_the_published_number_of_parameters() -> None:
    """Model card: 3,298,141,697 parameters; five layers, 64 and 8 heads of 128, hidden 8192, six layers read."""
    assert dspark.parameters(DRAFTER, 8192, 248_320) == 3_298_141_697
    assert DRAFTER.checkpoint.bytes == 2 * 3_298_141_697


def test_no_other_inner_size_and_rank_give_that_number() -> None:
    """What the card leaves out follows from what it has."""
    found = [
        (inner, markov)
        for inner in range(1024, 65_536, 128)
        for markov in range(32, 2049, 32)
        if dspark.parameters(replace(DRAFTER, intermediate_size=inner, markov_rank=markov), 8192, 248_320)
        == 3_298_141_697
    ]
    assert found == [(DRAFTER.intermediate_size, DRAFTER.markov_rank)]


def test_a_block_of_seven_drafts_makes_the_block_that_semantics_gives() -> None:
    """Semantics H.7: 2.4T, TP8, FP8 KV, k = 7: 2,160 tokens."""
    laid = caches(MODEL, drafting(8))
    assert laid.block_tokens == 2160
    # v1/core/kv_cache_utils.py: groups of as many layers as the scarcest kind has, the drafter's five.
    assert [(group.kind, group.layers) for group in laid.groups].count(("state", 5)) == 13  # and one of four
    assert sum(group.layers for group in laid.groups if group.kind == "state") == 69
    assert sum(group.layers for group in laid.groups if group.kind == "attention") == 23 + 5
    assert len({group.page_bytes for group in laid.groups}) == 1


def test_ranks_share_the_drafter_but_for_its_heads() -> None:
    one, eight = (dspark.weight_bytes(DRAFTER, 8192, 248_320, tp) for tp in (1, 8))
    joined = 2 * (6 * 8192 * 8192 + 2 * 248_320 * 256)
    assert joined < eight < one
    assert eight - joined == pytest.approx((one - joined) / 8, rel=0.01)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (drafting(4), "keeps 1024 B a token and layer, the target 512"),
        (drafting(8, 8), "num_speculative_tokens = 8"),
        (drafting(8, 0), "num_speculative_tokens = 0"),
        (replace(drafting(8), draft_kv_dtype="fp8"), "keeps 256 B a token and layer, the target 512"),
    ],
)
def test_what_the_drafter_does_not_do_is_refused(layout: Layout, says: str) -> None:
    with pytest.raises(Refused, match=says):
        caches(MODEL, layout)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"method": "dspark", "num_speculative_tokens": 7}, "a model of its own"),
        ({"method": "mtp", "num_speculative_tokens": 3, "model": "dspark"}, "a model of its own"),
        ({"method": "mtp", "num_speculative_tokens": 3, "kv_cache_dtype": "bfloat16"}, "a drafter with weights"),
    ],
)
def test_speculation_that_contradicts_itself_is_refused(data: dict[str, Any], says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        build(Speculation, data)


def test_a_drafter_that_the_model_does_not_have_is_named() -> None:
    other = Speculation(method="dspark", model="eagle", num_speculative_tokens=3)
    problems = list(check_consistency(subject_of(NODE, speculative_config=other)))
    assert [problem.what for problem in problems] == ["engine.speculative_config.model = eagle does not exist"]
    assert "dspark" in problems[0].do


# Several nodes


def test_one_machine_is_asked_for_one_nodes_share() -> None:
    for name, here, together in ((NODES2, 8, 16), (NODES4, 4, 16)):
        subject = subject_of(name)
        plan = make_plan(subject, machine_of(subject), WEIGHTS)
        assert len(plan.gpus) == here == ranks_here(plan.room.rank)
        assert plan.room.rank.layout.ranks == together
        processes = next(line for line in host_budget(plan.room.rank, plan.machine).lines if line.name == "processes")
        assert processes.bytes == (here + 2) * subject.platform.needs.process_bytes.value


def test_experts_span_the_nodes_and_attention_does_not() -> None:
    """TokenSpeed: EP16 gives each GPU a sixteenth of the experts; each TP8 group maps to one node."""
    two, alone = rank(NODES2), rank(NODES2, data_parallel_size=1)
    assert two.held.bytes_of("routed_experts") * 2 == alone.held.bytes_of("routed_experts")
    assert two.held.bytes_of("attention") == alone.held.bytes_of("attention")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"nnodes": None}, "engine.nnodes is not stated"),
        ({"nnodes": 3}, "engine.nnodes is 3"),
        ({"data_parallel_size_local": None}, "engine.data_parallel_size_local is not stated"),
        ({"data_parallel_size_local": 2}, "engine.data_parallel_size_local is 2"),
        ({"data_parallel_size": 1}, "8 ranks for 16 devices"),
        ({"tensor_parallel_size": 16, "data_parallel_size": 1}, "1 replicas on 2 nodes"),
    ],
)
def test_nodes_that_do_not_add_up_are_refused(values: dict[str, Any], says: str) -> None:
    problems = [problem.what for problem in check_consistency(subject_of(NODES2, **values))]
    assert any(says in problem for problem in problems), problems


def test_one_node_has_no_word_for_several() -> None:
    problems = [problem.what for problem in check_consistency(subject_of(NODE, nnodes=2))]
    assert problems == ["engine.nnodes is 2"]


def test_the_cap_counts_the_slots_of_all_replicas() -> None:
    from slimserve.policies import broken

    profile = REGISTRY.profiles[NODES4]
    low = replace(profile, admission=replace(profile.admission, max_in_flight=setting(127)))
    (problem,) = broken(REGISTRY.subject(low))
    assert "less than engine.max_num_seqs = 128, of 4 replicas together" in problem.what
    assert not list(broken(REGISTRY.subject(with_engine(profile))))
