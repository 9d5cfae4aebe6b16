"""The reference of routed experts: weights of few bits, the order of experts, and against transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quixicore.ops.experts import reference as experts
from slimserve.engine import torchvision_cpu


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0), (0.25, 0), (0.26, 1), (0.74, 1), (0.75, 2), (1.25, 2), (1.26, 3), (1.74, 3), (1.75, 4), (2.5, 4),
        (2.51, 5), (3.49, 5), (3.5, 6), (5.0, 6), (5.01, 7), (99.0, 7), (-0.0, 8), (-1.0, 10), (-5.01, 15),
    ],
)  # fmt: skip
def test_thresholds_of_four_bits(value: float, code: int) -> None:
    """Semantics E.2: to the nearest, ties to the even code."""
    assert experts.to_fp4(torch.tensor(value)).item() == code


def test_all_sixteen_codes_come_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4)[None]
    found = experts.from_nvfp4(packed, torch.ones(1, 1).to(torch.float8_e4m3fn), torch.tensor(1.0))[0]
    assert found.tolist() == [*experts.FP4_VALUES, *(-value for value in experts.FP4_VALUES)]
    assert torch.equal(experts.to_fp4(found)[1:], codes[1:])


def test_scales_of_four_bits_are_those_of_their_sixteen() -> None:
    packed = torch.full((2, 16), 0x22, dtype=torch.uint8)  # 1.0 everywhere
    scales = torch.tensor([[1.0, 2.0], [4.0, 0.5]]).to(torch.float8_e4m3fn)
    found = experts.from_nvfp4(packed, scales, torch.tensor(0.5))
    assert found[:, [0, 15, 16, 31]].tolist() == [[0.5, 0.5, 1.0, 1.0], [2.0, 2.0, 0.25, 0.25]]


def test_tiles_of_eight_bits_are_cut_at_the_edge() -> None:
    packed = torch.ones(130, 129).to(torch.float8_e4m3fn)
    found = experts.from_fp8_blocks(packed, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert (found[0, 0], found[0, 128], found[128, 127], found[129, 128]) == (1, 2, 3, 4)


def test_activations_of_eight_bits_come_back_within_their_step() -> None:
    x = noise(3, 256, dtype=torch.float32)
    x[1, 128:] = 0.0
    packed, scales = experts.to_fp8_groups(x)
    assert scales.shape == (3, 2)
    back = packed.float() * scales.repeat_interleave(128, -1)
    torch.testing.assert_close(back, x, rtol=2**-4, atol=float(scales.max()) * 2**-9)
    assert not back[1, 128:].any()


def test_of_equal_experts_the_lower_is_chosen() -> None:
    weights, chosen = experts.route(torch.tensor([[1.0, 2.0, 2.0, 2.0]]), 2, "fused")
    assert chosen.tolist() == [[1, 2]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_weights_add_up_to_one() -> None:
    weights, chosen = experts.route(noise(9, 64, dtype=torch.float32), 10, "fused")
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))
    assert all(len(set(row)) == 10 for row in chosen.tolist())


@pytest.fixture(scope="module")
def hf() -> Any:
    """The module of transformers in which the model is defined."""
    torchvision_cpu.install()
    return pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")


@torch.no_grad()
def test_the_block_is_that_of_transformers(hf: Any) -> None:
    config = SimpleNamespace(
        hidden_size=32, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=8,
        num_experts_per_tok=3, norm_topk_prob=True, hidden_act="silu", _experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    block = hf.Qwen4ExpTextSparseMoeBlock(config)
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    block = block.to(torch.bfloat16)
    x = noise(7, 32)
    expected = block(x[None])
    expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
    one = block.shared_expert
    gate_up = torch.cat([one.gate_proj.weight, one.up_proj.weight])
    beside = experts.shared(x, gate_up, one.down_proj.weight, block.shared_expert_gate.weight)
    for rounding in ("hf", "fused"):
        weights, chosen = experts.route(torch.nn.functional.linear(x, block.gate.weight), 3, rounding)  # type: ignore[arg-type]
        own = block.experts
        found = experts.routed(x, own.gate_up_proj, own.down_proj, weights, chosen, rounding)  # type: ignore[arg-type]
        torch.testing.assert_close((found + beside).float(), expected.float(), rtol=2e-2, atol=1e-2)
