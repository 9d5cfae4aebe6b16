"""The gated residual (hyper-connection): C residual streams of H features side by side, stream by stream.

Each layer reads a mean of its streams, gated by themselves, and adds its output to each stream with a weight of the
stream's own. All streams begin as the embedding.

Source: transformers, models/qwen4_exp/modeling_qwen4_exp.py, Qwen4ExpTextGatedResidual and Qwen4ExpTextDecoderLayer;
vllm 0.32, models/qwen4_exp/common/hyperconnection.py and nvidia/ops/hc.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from quixicore.ops import Rounding
from quixicore.ops.norm.reference import gemma_norm


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """Weights of one mixer; L is the rank of its gates.

    Args:
        streams: C.
        norm: [C*H], centred on zero.
        down: [L, C*H].
        up: [C*H, L].
        inject: [C, C*H]; None after the last layer, which nothing is added to.
        eps: of the norm.
    """

    streams: int
    norm: Tensor
    down: Tensor
    up: Tensor
    inject: Tensor | None
    eps: float = 1e-6


def mix(residual: Tensor, mixer: Mixer, rounding: Rounding) -> tuple[Tensor, Tensor | None]:
    """A layer's input, and what its output is to be added with.

    Args:
        residual: [T, C*H].
        mixer: the weights.
        rounding: `hf` rounds after each operation; `fused` after each matrix product and at the end.

    Returns:
        [T, H], the arithmetic mean of the gated, normalised streams: their gates need not add up to one; and
        [T, C], the logits of the injection, None where the mixer has none. Both of the type of `residual`.
    """
    streams, kind = mixer.streams, residual.dtype
    normed = gemma_norm(residual, mixer.norm, groups=streams, eps=mixer.eps)
    low = linear(normed, mixer.down)
    if rounding == "hf":
        gates = torch.sigmoid(linear(silu(low / streams), mixer.up))
        mixed = (gates * normed).reshape(*normed.shape[:-1], streams, -1).mean(-2)
    else:
        gates = torch.sigmoid(linear(silu(low.float() / streams).to(kind), mixer.up).float())
        gated = (gates * normed.float()).reshape(*normed.shape[:-1], streams, -1)
        mixed = (sum(gated.unbind(-2), start=torch.zeros_like(gated[..., 0, :])) / streams).to(kind)
    return mixed, None if mixer.inject is None else linear(normed, mixer.inject)


def combine(residual: Tensor, output: Tensor, injection: Tensor, rounding: Rounding) -> Tensor:
    """The residual after a layer.

    Args:
        residual: [T, C*H], as it went into `mix`, before any norm.
        output: [T, H], of the layer.
        injection: [T, C], as `mix` returned it. Minus infinity leaves a stream as it was.
        rounding: `hf` rounds weight, product and sum; `fused` the sum alone.

    Returns:
        [T, C*H], of the type of `residual`.
    """
    streams = injection.shape[-1]
    wide = (lambda x: x) if rounding == "hf" else Tensor.float
    weight = 2 * torch.sigmoid(wide(injection) / streams)
    added = (weight.unsqueeze(-1) * wide(output).unsqueeze(-2)).flatten(-2)
    return (wide(residual) + added).to(residual.dtype)


def combine_norm(
    residual: Tensor, output: Tensor, injection: Tensor, norm: Tensor, rounding: Rounding, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """The residual after a layer, and its norm for the next mixer.

    A kernel that does both rounds the residual before it is normalised, so that it equals the two apart.

    Args:
        residual, output, injection, rounding: as for `combine`.
        norm: [C*H], of the next mixer.
        eps: of that norm.

    Returns:
        [T, C*H] and [T, C*H].
    """
    after = combine(residual, output, injection, rounding)
    return after, gemma_norm(after, norm, groups=injection.shape[-1], eps=eps)
