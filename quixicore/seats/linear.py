"""Matrix products on a processor without bfloat16 arithmetic: in fp32, from a copy of the weights, and rounded once.

Where oneDNN has no bfloat16 (below AVX-512) the engine falls back to torch's own product, which converts element by
element: for 24 tokens it took four to thirteen times as long as this, for 512 six to twenty-six. The copy costs
twice the weight's bytes.

Source: vllm 0.32, model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm and cpu_unquantized_gemm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def product(theirs: Any, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`cpu_unquantized_gemm`: [..., K] with [N, K] to [..., N], of the type of `x`.

    What the engine has packed for the processor's own instructions and taken away, or is not bfloat16, stays its own.
    A weight is copied once: what is written into it later does not count.
    """
    if weight.numel() == 0 or weight.dtype != torch.bfloat16 or x.dtype != torch.bfloat16:
        own: Tensor = theirs(layer, x, weight, bias)
        return own
    kept = getattr(layer, "slimserve_wide", None)
    if kept is None or kept[0] is not weight:
        layer.slimserve_wide = kept = (weight, weight.detach().float())
    return functional.linear(x.float(), kept[1], None if bias is None else bias.float()).to(x.dtype)
