"""Gated DeltaNet's convolutions on a processor without matrix tiles, where the engine's own take 5 to 20 times as long.

What runs there is torch's grouped convolution in bfloat16, an order slower than in float32; the sums are in float32 in
both, and rounded once. The recurrence itself is the engine's C++.

Source: vllm 0.32, model_executor/layers/mamba/ops/cpu/{causal_conv1d,gdn_attention}.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional


def convolution(
    inputs: Tensor, weight: Tensor, bias: Tensor | None = None, padding: int = 0, groups: int = 1
) -> Tensor:
    """`torch.nn.functional.conv1d` in fp32, rounded once: [N, D, T] and [D, 1, W] to [N, D, T + 2 * padding - W + 1]."""
    wide = None if bias is None else bias.float()
    return functional.conv1d(inputs.float(), weight.float(), wide, padding=padding, groups=groups).to(inputs.dtype)


class Functions:
    """`torch.nn.functional` as a module of the engine's sees it: all of it, but for that convolution."""

    conv1d = staticmethod(convolution)

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)


functions = Functions()
