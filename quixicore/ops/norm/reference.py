"""RMS norms.

Source: transformers, models/qwen4_exp/modeling_qwen4_exp.py, Qwen4ExpTextRMSNorm and Qwen4ExpTextRMSNormGated;
vllm 0.32, third_party/flash_linear_attention/ops/layernorm_guard.py.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from quixicore.ops import Rounding

Activation = Literal["sigmoid", "silu"]


def gemma_norm(x: Tensor, weight: Tensor, *, groups: int = 1, eps: float = 1e-6) -> Tensor:
    """RMSNorm whose weight is centred on zero, in fp32 and rounded once.

    Args:
        x: [..., D], of any floating type.
        weight: [D].
        groups: D is normalised in so many equal parts.
        eps: added to the mean square.

    Returns:
        [..., D], of the type of `x`.
    """
    wide = x.float().reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.flatten(-2) * (1 + weight.float())).to(x.dtype)


def gated_norm(
    x: Tensor, weight: Tensor, gate: Tensor, *, activation: Activation, rounding: Rounding, eps: float = 1e-6
) -> Tensor:
    """RMSNorm with a plain weight, then a gate.

    Args:
        x: [..., D].
        weight: [D].
        gate: [..., D], before its activation.
        activation: of the gate; Flash-Next has `sigmoid`, the 2.4T and Qwen3.5 have `silu`.
        rounding: `hf` rounds the normed values, and again what the weight makes of them.
        eps: added to the mean square.

    Returns:
        [..., D], of the type of `x`.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled = weight * normed.to(x.dtype) if rounding == "hf" else weight.float() * normed
    opened = torch.sigmoid(gate.float()) if activation == "sigmoid" else torch.nn.functional.silu(gate.float())
    return (scaled * opened).to(x.dtype)
