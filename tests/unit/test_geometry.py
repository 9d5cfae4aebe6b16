"""Every published figure about sizes, each with its source; and what makes a geometry or a layout an error.

"Semantics" is the project's specification of the model family; "baseline" are its measurements of the engine on H200.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from geometry_models import A95B, FLASH_NEXT, HYBRID, SMOLLM2, broken, checkpoint, experts

from slimserve.errors import Refused, RegistryError
from slimserve.geometry import Layout, buffers, caches, packing, shape_of, weights
from slimserve.geometry.caches import (
    compressed_bytes,
    conv_state_bytes,
    kv_bytes_a_token,
    recurrent_state_bytes,
    ring_rows,
    state_pages,
    window_bytes,
)
from slimserve.geometry.ngram import head_sizes, rows
from slimserve.geometry.weights import kv_copies
from slimserve.model import Model

GIB = 1 << 30
FP8 = FLASH_NEXT.checkpoints["fp8-block128"]
NVFP4 = FLASH_NEXT.checkpoints["nvfp4"]


def drafting(k: int, **settings: Any) -> Layout:
    return Layout(speculative_tokens=k, drafter=k > 0, **settings)


# Block sizes


@pytest.mark.parametrize("align", [16, 64])
@pytest.mark.parametrize(
    ("tp", "k", "expected"),
    [
        (1, 0, (1568, 1600)),
        (1, 2, (1600, 1600)),
        (1, 3, (1600, 1600)),
        (2, 0, (1568, 1600)),
        (2, 2, (1600, 1600)),
        (2, 3, (1600, 1600)),
        (4, 0, (784, 832)),
        (4, 2, (800, 832)),
        (4, 3, (800, 832)),
        (8, 0, (400, 448)),
        (8, 2, (400, 448)),
        (8, 3, (400, 448)),
    ],
)
def test_block_size_of_flash_next(tp: int, k: int, expected: tuple[int, int], align: int) -> None:
    """Semantics H.7, table of hybrid block sizes, BF16 KV."""
    planned = caches(FLASH_NEXT, drafting(k, tensor_parallel=tp, block_size=align))
    assert planned.block_tokens == expected[align == 64]


@pytest.mark.parametrize("align", [16, 64])
@pytest.mark.parametrize(
    ("dtype", "k", "expected"),
    [
        ("bfloat16", 0, (1040, 1088)),
        ("bfloat16", 3, (1056, 1088)),
        ("fp8", 0, (2080, 2112)),
        ("fp8", 3, (2112, 2112)),
        ("fp8", 7, (2160, 2176)),
    ],
)
def test_block_size_of_the_large_model(dtype: Any, k: int, expected: tuple[int, int], align: int) -> None:
    """Semantics H.7, the same table: 2.4T at TP8."""
    layout = drafting(k, tensor_parallel=8, kv_cache_dtype=dtype, block_size=align)
    assert caches(A95B, layout).block_tokens == expected[align == 64]


def test_the_block_of_1056_tokens_was_of_another_cache() -> None:
    """QuixiAI, Qwen3.8-Flash-Next on 8 3090s, section 4: "1,056-token QSA blocks"; semantics H.7: TurboQuant's, k=2."""
    layout = drafting(2, tensor_parallel=8, kv_cache_dtype="turboquant_k8v4")
    assert caches(FLASH_NEXT, layout).block_tokens == 1056


# Caches


def test_slots_of_the_second_tier() -> None:
    """Semantics H.7: 13 layers x 400 tokens x (1,024 + 64) B; QuixiAI, section 9: "~12,150 block slots, ~4.8M"."""
    planned = caches(FLASH_NEXT, drafting(2, tensor_parallel=8))
    assert planned.slab_bytes == 13 * 400 * (1024 + 64) == 5_657_600
    assert planned.tier_slots(64 * GIB) == 12_146
    assert planned.tier_slots(64 * GIB) * planned.block_tokens == 4_858_400


@pytest.mark.parametrize(
    ("k", "gib", "blocks", "tokens", "sizes"),
    [
        (0, 57.2, 2999, 3_853_773, [1568, 1568, 1568, 1568, 0, 1568]),
        (3, 54.5, 2583, 2_730_314, [1600, 1600, 1600, 1600, 0, 1600]),
    ],
)
def test_pool_of_the_engine_on_two_h200(k: int, gib: float, blocks: int, tokens: int, sizes: list[int]) -> None:
    """Baseline, the whole model on two H200: "57.2 GiB a GPU at 0.90 = 3,853,773 tokens", "54.5 GiB = 2,730,314"."""
    longest = 65536
    planned = caches(FLASH_NEXT, drafting(k, tensor_parallel=2, expert_parallel=True))
    assert int(blocks / planned.blocks_a_request(longest, longest) * longest) == tokens
    # The pool was printed in tenths of a GiB, and holds whole blocks.
    assert blocks * planned.slab_bytes / GIB < gib + 0.05
    assert (blocks + 1) * planned.slab_bytes / GIB > gib - 0.05
    assert [group.block_tokens for group in planned.groups] == sizes


def test_blocks_of_a_chat_request() -> None:
    """QuixiAI, section 4: "roughly 13-14 blocks at chat context", of QSA, ring, GDN states at k=2 and the drafter.

    Their blocks: 3 of attention, 1 ring, 3 x 3 states. 0.32 has a group for the n-gram window too, and holds one state
    more in each group of states for two steps after every block boundary.
    """
    theirs = caches(FLASH_NEXT, drafting(2, tensor_parallel=8, kv_cache_dtype="turboquant_k8v4"))
    counted = {
        kind: sum(theirs.blocks(g, 3000, 262144, settled=True) for g in theirs.groups if g.kind == kind)
        for kind in ("attention", "ring", "state", "window")
    }
    assert counted == {"attention": 3, "ring": 1, "state": 9, "window": 3}
    ours = caches(FLASH_NEXT, drafting(2, tensor_parallel=8))
    assert ours.blocks_a_request(3000, 262144, settled=True) == 8 + 1 + 9 + 3
    assert ours.blocks_a_request(3000, 262144) == 8 + 1 + 12 + 4
    assert ours.heaviest(3000, 262144) == ("state", 12)
    assert ours.heaviest(262144, 262144) == ("attention", 656)


def test_bytes_a_token_and_a_layer() -> None:
    """Semantics A.5: 2,048 B of K and V unsharded, 1,024 from TP2 on; 64 B of compressed keys; rings of 4 and 8."""
    shape = shape_of(FLASH_NEXT)
    assert shape.indexer is not None
    sizes = [kv_bytes_a_token(shape.attention, Layout(tensor_parallel=tp)) for tp in (1, 2, 4, 8)]
    assert sizes == [2048, 1024, 1024, 1024]
    assert compressed_bytes(shape.indexer, 400) == 400 * 64
    assert [ring_rows(shape.indexer, drafting(k)) for k in range(5)] == [4, 8, 8, 8, 8]
    assert compressed_bytes(shape.indexer, 128) == 8192  # H.2


def test_states_of_a_request() -> None:
    """Semantics B (108 MiB and 552 MiB a checkpoint, convolution states), D.3 (window), H.7 (406,016 B at TP8, k=2)."""
    flash, large, one = shape_of(FLASH_NEXT), shape_of(A95B), Layout()
    assert flash.linear is not None
    assert large.linear is not None
    assert recurrent_state_bytes(flash.linear, one) == 3_145_728
    assert recurrent_state_bytes(flash.linear, one) * flash.linear.layers == 108 << 20
    assert conv_state_bytes(flash.linear, one) == 61_440
    assert recurrent_state_bytes(large.linear, one) == 8_388_608
    assert recurrent_state_bytes(large.linear, one) * large.linear.layers == 552 << 20
    assert conv_state_bytes(large.linear, one) == 122_880
    assert window_bytes(flash, one) == window_bytes(flash, Layout(tensor_parallel=8)) == 184_320
    assert state_pages(flash, drafting(2, tensor_parallel=8)) == {"state": 406_016, "window": 225_280}


def test_the_recurrent_state_in_bf16_is_half() -> None:
    """Semantics B: SGLang recipes set a bfloat16 state; the engine takes mamba_ssm_cache_dtype."""
    linear = shape_of(FLASH_NEXT).linear
    assert linear is not None
    halved = recurrent_state_bytes(linear, Layout(mamba_ssm_cache_dtype="bfloat16"))
    assert halved * 2 == recurrent_state_bytes(linear, Layout())


def test_a_dense_model_has_one_group() -> None:
    """30 layers of 3 heads x 64 x (K, V) x bf16; blocks of 128 on the CPU (vllm/platforms/cpu.py)."""
    planned = caches(SMOLLM2, Layout(block_size=128, kernel_block=32))
    assert planned.slab_bytes == 30 * 128 * 3 * 64 * 2 * 2
    assert [(group.kind, group.layers) for group in planned.groups] == [("attention", 30)]
    assert planned.blocks_a_request(8192, 8192) == 64


def test_a_plain_hybrid_has_pages_of_one_size() -> None:
    """vllm v1/core/kv_cache_utils.py: as many layers a group as the scarcer kind has."""
    planned = caches(HYBRID, Layout())
    assert [(group.kind, group.layers) for group in planned.groups] == [("state", 2)] * 3 + [("attention", 2)]
    assert len({group.page_bytes for group in planned.groups}) == 1


def test_without_prefix_caching_one_state_is_live() -> None:
    """vllm v1/kv_cache_interface.py, MambaSpec.max_memory_usage_bytes: 1 + k blocks, else 2 + k."""
    kept, live = (caches(HYBRID, Layout(prefix_caching=caching)) for caching in (True, False))
    assert kept.blocks_a_request(4096, 4096) - live.blocks_a_request(4096, 4096) == 3


# FlatKV


@pytest.mark.parametrize(
    ("model", "layout", "factor"),
    [
        (A95B, Layout(tensor_parallel=8, kv_cache_dtype="fp8"), 32),
        (A95B, Layout(tensor_parallel=8), 16),
        (FLASH_NEXT, Layout(tensor_parallel=4), 12),
        (FLASH_NEXT, Layout(tensor_parallel=4, kv_cache_dtype="fp8"), 24),
        (FLASH_NEXT, Layout(tensor_parallel=8), 6),
        (FLASH_NEXT, Layout(tensor_parallel=1), 24),
    ],
)
def test_packing(model: Model, layout: Layout, factor: int) -> None:
    """Semantics H.2, table of K_full : K_state at P=128; TokenSpeed's FlatKV article: about 32 KV pages a state."""
    packed = packing(model, layout)
    assert (packed.attention_pages, packed.state_pages) == (factor, 1)


def test_dead_space_of_a_packed_state() -> None:
    """Semantics H.2, Flash-Next TP4 + MTP: slab 20,447,232 B, states 9,621,504 B, padding fraction 1.125."""
    packed = packing(FLASH_NEXT, Layout(tensor_parallel=4, drafter=True, speculative_tokens=3))
    assert packed.slab_bytes == 13 * 2 * 786_432 == 20_447_232
    without = packing(FLASH_NEXT, Layout(tensor_parallel=4))
    assert without.state_bytes == 12 * (786_432 + 15_360) == 9_621_504
    assert packed.slab_bytes / without.state_bytes - 1 == pytest.approx(1.125, abs=0.0005)


def test_kv_pages_are_replicated_beyond_their_heads() -> None:
    """Semantics K: "4 KV heads -> TP8 replicates 2x, TP16 4x"."""
    assert [kv_copies(shape_of(A95B).attention, tp) for tp in (1, 4, 8, 16)] == [1, 1, 2, 4]


# The n-gram table


def test_rows_of_the_ngram_table() -> None:
    """Semantics D.1: sixteen primes from 20,000,000 on, verified there against the checkpoint's buffers."""
    ngram = shape_of(FLASH_NEXT).ngram
    assert ngram is not None
    ends = [3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171]
    assert head_sizes(ngram) == tuple(20_000_000 + end for end in ends)
    assert sum(head_sizes(ngram)) == 320_001_446
    assert rows(ngram) == 320_001_536


@pytest.mark.parametrize(("value_bytes", "gib"), [(1, 47.68), (2, 95.37)])
def test_bytes_of_the_ngram_table(value_bytes: int, gib: float) -> None:
    """Semantics D.1: 47.68 GiB at one byte a value, 95.37 GiB in BF16."""
    held = checkpoint(host_bytes=320_001_536 * 160 * value_bytes)
    assert weights(FLASH_NEXT, held, Layout()).host_bytes / GIB == pytest.approx(gib, abs=0.006)


def test_a_rank_holds_its_share_of_the_ngram_table_on_one_side() -> None:
    """Semantics D.4: TokenSpeed TP4 FP8, an 11.92 GiB shard freed on each rank."""
    host = weights(FLASH_NEXT, FP8, Layout(tensor_parallel=4, expert_parallel=True))
    device = weights(FLASH_NEXT, FP8, Layout(tensor_parallel=4, expert_parallel=True, engram_on_host=False))
    assert host.host_bytes / GIB == pytest.approx(11.92, abs=0.005)
    assert device.host_bytes == 0
    assert device.device_bytes - host.device_bytes == host.host_bytes


# Weights

# Rows that the engine adds to each merged matrix of a hyper-connection; the checkpoint has none.
PADDING = (336 - 324) * 10240 * 2
MIXERS = 2 * 48


@pytest.mark.parametrize(
    ("names", "billions", "digits"),
    [
        (("routed_experts",), 120.80, 2),
        (("linear_attention",), 2.087, 3),
        (("attention", "indexer"), 0.617, 3),
        (("hyper_connections",), 0.641, 3),
        (("embedding",), 0.636, 3),
        (("lm_head",), 0.636, 3),
        (("drafter",), 0.091, 3),
        (("drafter_routed_experts",), 2.517, 3),
    ],
)
def test_census_of_parameters(names: tuple[str, ...], billions: float, digits: int) -> None:
    """Semantics G.1, size census, in billions of parameters."""
    held = weights(FLASH_NEXT, checkpoint(host_bytes=320_001_536 * 320), drafting(1))
    padding = {"hyper_connections": MIXERS * PADDING, "drafter": 2 * PADDING}
    counted = sum(held.bytes_of(name) - padding.get(name, 0) for name in names) / 2 / 1e9
    assert round(counted, digits) == billions


VISION = 0.449e9 * 2
"""bytes; semantics G.1, census"""


@pytest.mark.parametrize("held", [FP8, NVFP4], ids=["fp8-block128", "nvfp4"])
def test_parts_add_up_to_the_checkpoint(held: Any) -> None:
    """profiles/weights: the bytes of all files; vision, tokenizer and headers are what else is in them.

    Headers and index name each expert's tensors one by one, up to 295,000 of them.
    """
    layout = drafting(1)
    planned = weights(FLASH_NEXT, held, layout)
    total = planned.device_bytes + planned.host_bytes - (MIXERS + 2) * PADDING + VISION
    assert 0 < held.bytes - total < 0.0008 * held.bytes


def test_parts_of_the_default_model_add_up() -> None:
    """profiles/models/smollm2-135m-instruct.yaml: 134.5M parameters in bf16, and 2 MB of tokenizer and headers."""
    planned = weights(SMOLLM2, SMOLLM2.checkpoints["bf16"], Layout())
    assert planned.device_bytes == 134_515_008 * 2
    assert 0 < SMOLLM2.checkpoints["bf16"].bytes - planned.device_bytes < 3_000_000


@pytest.mark.parametrize(("name", "terabytes"), [("bf16", 4.892), ("fp8", 2.496), ("nvfp4", 1.447)])
def test_sizes_of_the_large_model(name: str, terabytes: float) -> None:
    """Semantics G.2: BF16 4.892 TB, FP8 2.496 TB, NVFP4 1.447 TB (which quantises more than the routed experts)."""
    total = weights(A95B, A95B.checkpoints[name], drafting(1)).device_bytes / 1e12
    assert total == pytest.approx(terabytes, rel=0.02 if name == "nvfp4" else 0.0005)


def test_weights_that_the_engine_reported_on_two_h200() -> None:
    """Baseline, the whole model on two H200: 65.0 GiB of weights a GPU, which its log counts with the buffers.

    It does not say for which of its two runs; with the drafter, and steps of the engine's default of 16,384 tokens.
    """
    layout = drafting(3, tensor_parallel=2, expert_parallel=True)
    held = weights(FLASH_NEXT, FP8, layout).device_bytes
    held += sum(part.bytes for part in buffers(FLASH_NEXT, FP8, layout, 16_384))
    assert held / GIB == pytest.approx(65.0, rel=0.01)


def test_marlin_repeats_scales() -> None:
    """vllm utils/marlin_utils_fp8.py: [in/128, out] bf16 instead of [in/128, out/128] fp32: 64 times as much."""
    plain, marlin = (
        weights(FLASH_NEXT, FP8, Layout(tensor_parallel=8, expert_parallel=True, moe_backend=backend))
        for backend in (None, "marlin")
    )
    assert marlin.bytes_of("routed_scales") == 64 * plain.bytes_of("routed_scales")
    assert marlin.bytes_of("routed_experts") == plain.bytes_of("routed_experts")


def test_the_shared_expert_is_whole_when_its_tokens_are_split() -> None:
    """vllm qwen2_moe.py: not sharded under sequence-parallel MoE; with other all-to-all kernels it is."""
    layout = Layout(tensor_parallel=4, data_parallel=4, expert_parallel=True)
    whole = weights(A95B, A95B.checkpoints["fp8"], layout).bytes_of("shared_expert")
    other = replace(layout, all2all_backend="flashinfer_nvlink_two_sided")
    sharded = weights(A95B, A95B.checkpoints["fp8"], other).bytes_of("shared_expert")
    gates = 92 * 8192 * 2
    assert whole - gates == 4 * (sharded - gates)


# Errors


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


def test_it_loads_neither_torch_nor_the_engine() -> None:
    """Planning answers within 250 ms on a machine that has neither."""
    code = "import sys, slimserve.geometry; print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
