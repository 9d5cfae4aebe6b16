"""Published figures about weights and the n-gram table, each with its source.

"Semantics" is the project's specification of the model family; "baseline" are its measurements of the engine on H200.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from geometry_models import A95B, FLASH_NEXT, SMOLLM2, checkpoint, drafting

from slimserve.geometry import Layout, buffers, weights
from slimserve.geometry.ngram import head_sizes, rows
from slimserve.geometry.reading import shape_of

GIB = 1 << 30
FP8 = FLASH_NEXT.checkpoints["fp8-block128"]
NVFP4 = FLASH_NEXT.checkpoints["nvfp4"]


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
