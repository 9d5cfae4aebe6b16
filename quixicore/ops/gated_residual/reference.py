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
    streams = mixer.streams
    normed = gemma_norm(residual, mixer.norm, groups=streams, eps=mixer.eps)
    low = activate(linear(normed, mixer.down), streams, rounding)
    mixed = gate_mean(normed, linear(low, mixer.up), streams, rounding)
    return mixed, None if mixer.inject is None else linear(normed, mixer.inject)


def activate(low: Tensor, streams: int, rounding: Rounding) -> Tensor:
    """What the down projection gives, for the up projection.

    Args:
        low: [..., L].
        streams: C; the projection's sum over streams counts as their mean.
        rounding: `hf` rounds the quotient too.

    Returns:
        [..., L], of the type of `low`.
    """
    return silu((low if rounding == "hf" else low.float()) / streams).to(low.dtype)


def gate_mean(normed: Tensor, gates: Tensor, streams: int, rounding: Rounding) -> Tensor:
    """The mean of the gated streams.

    Args:
        normed: [..., C*H].
        gates: [..., C*H], before their sigmoid.
        streams: C.
        rounding: as for `mix`.

    Returns:
        [..., H], of the type of `normed`.
    """
    apart = (*normed.shape[:-1], streams, -1)
    if rounding == "hf":
        return (torch.sigmoid(gates) * normed).reshape(apart).mean(-2)
    gated = (torch.sigmoid(gates.float()) * normed.float()).reshape(apart)
    return (sum(gated.unbind(-2), start=torch.zeros_like(gated[..., 0, :])) / streams).to(normed.dtype)


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
