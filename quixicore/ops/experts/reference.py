"""Routed experts, and a shared one with a gate of its own.

T tokens, E experts of which K are chosen, H hidden and I inner features.

Source: transformers, models/qwen4_exp/modeling_qwen4_exp.py, Qwen4ExpTextTopKRouter, Qwen4ExpTextExperts and
Qwen4ExpTextSparseMoeBlock; vllm 0.32, model_executor/models/qwen3_next.py, layers/fused_moe/router and
layers/quantization/utils/{fp8_utils,nvfp4_emulation_utils}.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from quixicore.ops import Rounding

E4M3_MOST = 448.0
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""magnitudes of the codes 0 to 7; bit 3 is the sign"""
FP4_GROUP = 16


def route(logits: Tensor, count: int, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """The experts of each token, and their weights, which add up to one.

    Args:
        logits: [T, E].
        count: K.
        rounding: `hf` rounds the weights to the type of the logits; `fused` keeps fp32.

    Returns:
        [T, K] weights, the largest first; and [T, K] int64, of equal ones the lower expert first.
    """
    shares = logits.float().softmax(-1)
    ranked = shares.sort(dim=-1, descending=True, stable=True)
    chosen = ranked.values[:, :count]
    weights = chosen / chosen.sum(-1, keepdim=True)
    return weights.to(logits.dtype) if rounding == "hf" else weights, ranked.indices[:, :count]


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """What one expert makes of its tokens.

    Args:
        x: [T, H].
        gate_up: [2*I, H], the gate's rows first.
        down: [H, I].

    Returns:
        [T, H], of the type of `x`.
    """
    gate, up = linear(x, gate_up).chunk(2, -1)
    return linear(silu(gate) * up, down)


def routed(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, rounding: Rounding) -> Tensor:
    """The weighted sum over the chosen experts.

    Args:
        x: [T, H].
        gate_up: [E, 2*I, H].
        down: [E, H, I].
        weights: [T, K], of `route`.
        chosen: [T, K] int64.
        rounding: `hf` rounds each expert's output and each sum; `fused` weighs and sums in fp32, in the order of
            `chosen`, and rounds once.

    Returns:
        [T, H], of the type of `x`.
    """
    wide = x.dtype if rounding == "hf" else torch.float32
    parts = torch.zeros(*chosen.shape, x.shape[-1], dtype=wide)
    for expert in sorted(set(chosen.flatten().tolist())):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        made = mlp(x[token], gate_up[expert], down[expert]).to(wide)
        parts[token, place] = made * weights[token, place, None].to(wide)
    total = torch.zeros(len(x), x.shape[-1], dtype=wide)
    for place in range(chosen.shape[-1]):
        total = total + parts[:, place]
    return total.to(x.dtype)


def shared(x: Tensor, gate_up: Tensor, down: Tensor, gate: Tensor) -> Tensor:
    """What the expert of all tokens makes of them, as far as its gate lets it.

    Args:
        x: [T, H].
        gate_up: [2*I, H].
        down: [H, I].
        gate: [1, H].

    Returns:
        [T, H], of the type of `x`.
    """
    return torch.sigmoid(linear(x, gate)) * mlp(x, gate_up, down)


def from_fp8_blocks(packed: Tensor, scales: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """Weights with one scale a tile.

    Args:
        packed: [N, M] float8_e4m3fn.
        scales: [ceil(N / block), ceil(M / block)] fp32, which the values are multiplied with.
        block: rows and columns of a tile; those at the edge may be cut.

    Returns:
        [N, M] fp32.
    """
    rows, columns = packed.shape
    spread = scales.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return packed.float() * spread


def to_fp8_groups(x: Tensor, group: int = 128) -> tuple[Tensor, Tensor]:
    """Activations as the engine quantises them: a scale for each group of a token.

    Args:
        x: [T, M]; M is a multiple of `group`.
        group: values that share a scale.

    Returns:
        [T, M] float8_e4m3fn, and [T, M / group] fp32.
    """
    parts = x.float().reshape(len(x), x.shape[-1] // group, group)
    scales = parts.abs().amax(-1).clamp_min(1e-10) / E4M3_MOST
    packed = (parts / scales[..., None]).clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn)
    return packed.reshape(x.shape), scales


def from_nvfp4(packed: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    """Weights of four bits: two in a byte, the even one in its low half.

    Args:
        packed: [N, M / 2] uint8.
        scales: [N, M / 16] float8_e4m3fn, of 16 values each.
        scale: fp32 scalar, of the whole tensor.

    Returns:
        [N, M] fp32.
    """
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    values = torch.tensor(FP4_VALUES)[codes & 7] * (1 - 2 * (codes >> 3))
    return values * scales.float().repeat_interleave(FP4_GROUP, -1) * scale


def to_fp4(x: Tensor) -> Tensor:
    """The nearest code of each value; of two that are equally near the even one.

    Args:
        x: any shape, fp32, already divided by its scale.

    Returns:
        Of that shape, uint8 from 0 to 15.
    """
    values = torch.tensor(FP4_VALUES)
    middles = (values[1:] + values[:-1]) / 2
    size = x.abs()
    above = (size[..., None] > middles).sum(-1)
    tied = (size[..., None] == middles).any(-1)
    code = above + (tied & (above % 2 == 1))
    return (code + 8 * torch.signbit(x)).to(torch.uint8)
