"""The gated residual's glue between the engine's own matrix products.

Source: vllm 0.32, models/qwen4_exp/nvidia/ops/hc.py.
"""

from __future__ import annotations

from torch import Tensor

from quixicore.ops.gated_residual import reference
from quixicore.ops.norm.reference import gemma_norm


def norm(x: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
    """[T, C*H] normalised over each of C streams."""
    return gemma_norm(x, weight, groups=num_groups, eps=eps)


def low_rank(x: Tensor, hc_count: int) -> Tensor:
    """[T, L] after the down projection, made ready for the up projection."""
    return reference.activate(x, hc_count, "fused")


def mix(x: Tensor, gate: Tensor, hc_count: int) -> Tensor:
    """[T, C*H] and the logits of their gates to a layer's input [T, H]."""
    return reference.gate_mean(x, gate, hc_count, "fused")


def combine(residual: Tensor, block_output: Tensor, injection_logits: Tensor | None, hc_count: int) -> Tensor:
    """[T, C*H], [T, H] and [T, C] to the residual after a layer; None adds the output as it is."""
    if injection_logits is None:
        streams = residual.float().reshape(*residual.shape[:-1], hc_count, -1)
        added: Tensor = streams + block_output.float().unsqueeze(-2)
        return added.flatten(-2).to(residual.dtype)
    return reference.combine(residual, block_output, injection_logits, "fused")


def combine_norm(
    residual: Tensor,
    block_output: Tensor,
    injection_logits: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    hc_count: int,
) -> tuple[Tensor, Tensor]:
    """The same, and its norm for the next mixer: [T, C*H] both."""
    after = combine(residual, block_output, injection_logits, hc_count)
    return after, norm(after, norm_weight, eps, hc_count)
