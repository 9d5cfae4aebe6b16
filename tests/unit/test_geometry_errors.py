"""What makes a geometry, a checkpoint or a layout an error, and that the error names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from geometry_models import FLASH_NEXT, SMOLLM2, broken, drafting, experts

from slimserve.errors import Refused, RegistryError
from slimserve.geometry import Layout, caches, packing, shape_of, weights
from slimserve.model import Model

FP8 = FLASH_NEXT.checkpoints["fp8-block128"]


def without(**fields: Any) -> Model:
    """Flash-Next with some fields changed."""
    return broken(FLASH_NEXT, replace(FLASH_NEXT.geometry, **fields))


NEEDED_BY_FLASH_NEXT = [
    name
    for name, value in vars(FLASH_NEXT.geometry).items()
    if value is not None and name not in ("num_experts_per_tok", "max_position_embeddings", "mtp_num_hidden_layers")
]


@pytest.mark.parametrize("name", NEEDED_BY_FLASH_NEXT)
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(RegistryError) as caught:
        shape_of(without(**{name: None}))
    assert any(f"geometry.{name} is missing" in finding.what for finding in caught.value.findings)


@pytest.mark.parametrize(
    "name",
    [name for name in NEEDED_BY_FLASH_NEXT if name not in ("tie_word_embeddings", "mamba_ssm_dtype", "ple_layer_ids")],
)
@pytest.mark.parametrize("value", [0, -1, True])
def test_an_absurd_number_is_named(name: str, value: int) -> None:
    with pytest.raises(RegistryError) as caught:
        shape_of(without(**{name: value}))
    assert any(f"geometry.{name} = {value}" in finding.what for finding in caught.value.findings)


def test_all_that_is_missing_is_said_at_once() -> None:
    with pytest.raises(RegistryError) as caught:
        shape_of(without(num_experts=None, hc_count=0, head_dim=0))
    assert len(caught.value.findings) == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 5}, "geometry.num_key_value_heads = 5 does not divide"),
        ({"linear_num_key_heads": 7}, "geometry.linear_num_key_heads = 7 does not divide"),
        ({"full_attention_interval": 49}, "geometry.full_attention_interval = 49 exceeds"),
        ({"ple_layer_ids": (49,)}, "geometry.ple_layer_ids names layer 49 of 48"),
        ({"ple_embed_dim": 2561}, "geometry.ple_embed_dim = 2561 is not shared evenly"),
    ],
)
def test_a_contradiction_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RegistryError) as caught:
        shape_of(without(**fields))
    assert any(words in finding.what for finding in caught.value.findings)


def test_an_unknown_architecture_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(RegistryError, match="architecture = GPT2LMHeadModel is not known") as caught:
        shape_of(replace(SMOLLM2, architecture="GPT2LMHeadModel"))
    assert "LlamaForCausalLM" in caught.value.findings[0].do


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tensor_parallel=3), "linear_num_key_heads = 16 does not divide over tensor_parallel_size = 3"),
        (Layout(tensor_parallel=5), "num_attention_heads = 24 does not divide over tensor_parallel_size = 5"),
        (Layout(tensor_parallel=0), "tensor_parallel_size = 0 is not above zero"),
        (Layout(data_parallel=-1), "data_parallel_size = -1 is not above zero"),
        (Layout(data_parallel=3, expert_parallel=True), "num_experts = 512 does not divide"),
        (Layout(data_parallel=7), "moe_intermediate_size = 640 does not divide"),
        (Layout(drafter=True), "num_speculative_tokens = 0"),
        (Layout(speculative_tokens=-1), "num_speculative_tokens = -1"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(layout: Layout, words: str) -> None:
    for ask in (lambda: caches(FLASH_NEXT, layout), lambda: weights(FLASH_NEXT, FP8, layout)):
        with pytest.raises(Refused) as caught:
            ask()
        assert any(words in finding.what for finding in caught.value.findings)


def test_a_shard_that_cuts_a_scale_is_refused() -> None:
    """QuixiAI, section 5: 640/8 = 80 cannot carry 128 x 128 scales."""
    with pytest.raises(Refused, match="a shard of 640/8 is no multiple of the scale block 128"):
        weights(FLASH_NEXT, FP8, Layout(tensor_parallel=8))


def test_a_model_without_drafter_is_told_so() -> None:
    with pytest.raises(Refused, match="mtp_num_hidden_layers is missing"):
        caches(SMOLLM2, drafting(2))


def test_a_ring_must_divide_the_block() -> None:
    """vllm qsa_cache.py asserts it: at TP8, rings of 8 and 16 rows divide their blocks, one of 12 does not."""
    assert caches(FLASH_NEXT, drafting(4, tensor_parallel=8)).block_tokens == 416
    assert caches(FLASH_NEXT, drafting(12, tensor_parallel=8)).block_tokens == 432
    with pytest.raises(Refused, match="a ring of 12 rows does not divide a block of 416 tokens"):
        caches(FLASH_NEXT, drafting(5, tensor_parallel=8))


def test_what_a_checkpoint_gets_wrong_is_named() -> None:
    with pytest.raises(RegistryError, match="host_bytes = 51200245761 is not a multiple"):
        weights(FLASH_NEXT, replace(FP8, host_bytes=51_200_245_761), Layout())
    with pytest.raises(RegistryError, match="host_bytes = 0 is not a multiple"):
        weights(FLASH_NEXT, replace(FP8, host_bytes=0), Layout())
    other = experts("fp8", (128, 128), 2560, 512, drafter=False)
    with pytest.raises(RegistryError, match=r"has the shape \[1024, 2560\], the geometry gives \[1280, 2560\]"):
        weights(FLASH_NEXT, replace(FP8, quantisation=other), Layout())
    assert FP8.quantisation is not None
    renamed = replace(FP8.quantisation.tensors[0], name="self_attn.q_proj")
    with pytest.raises(RegistryError, match=r"quantised tensor self_attn\.q_proj is not known"):
        weights(FLASH_NEXT, replace(FP8, quantisation=replace(FP8.quantisation, tensors=(renamed,))), Layout())


@pytest.mark.parametrize("context", [0, -1, 8193])
def test_a_context_beyond_the_longest_is_refused(context: int) -> None:
    with pytest.raises(Refused, match=f"a context of {context} tokens"):
        caches(SMOLLM2, Layout()).blocks_a_request(context, 8192)


@pytest.mark.parametrize("block", [0, 24])
def test_a_block_that_kernels_cannot_read_is_refused(block: int) -> None:
    with pytest.raises(Refused, match=f"block_size = {block}"):
        caches(SMOLLM2, Layout(block_size=block))


def test_packing_needs_states() -> None:
    with pytest.raises(Refused, match="has no recurrent states"):
        packing(SMOLLM2, Layout())
