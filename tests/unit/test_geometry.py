"""Published figures about caches and packing, each with its source.

"Semantics" is the project's specification of the model family; "baseline" are its measurements of the engine on H200.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from geometry_models import A95B, FLASH_NEXT, HYBRID, SMOLLM2, drafting

from slimserve.geometry import Layout, caches, packing
from slimserve.geometry.caches import (
    compressed_bytes,
    conv_state_bytes,
    kv_bytes_a_token,
    recurrent_state_bytes,
    ring_rows,
    state_pages,
    window_bytes,
)
from slimserve.geometry.reading import shape_of
from slimserve.geometry.weights import kv_copies
from slimserve.model import Model

GIB = 1 << 30


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

# Heads of Qwen3.5-397B-A17B; nothing else of it counts for packing.
QWEN35_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 2, "linear_num_value_heads": 64}
QWEN35 = replace(A95B, geometry=replace(A95B.geometry, **QWEN35_HEADS))


@pytest.mark.parametrize(
    ("model", "layout", "factor"),
    [
        (QWEN35, Layout(tensor_parallel=4, kv_cache_dtype="fp8"), 32),
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


def test_it_loads_neither_torch_nor_the_engine() -> None:
    """Planning answers within 250 ms on a machine that has neither."""
    code = "import sys, slimserve.geometry; print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
