"""What the drafter of Flash-Next reads: the token after each position, and the target's residual before its mixer.

T tokens, C streams of H features. What follows is a layer like the target's sparse ones, the mixer of its own, and the
target's head; later steps read the drafter's own residual.

Source: vllm 0.32, models/qwen4_exp/nvidia/mtp.py; transformers has none.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from quixicore.ops.norm.reference import gemma_norm


def enter(
    embedded: Tensor,
    residual: Tensor,
    norm_embedding: Tensor,
    norm_hidden: Tensor,
    from_embedding: Tensor,
    from_hidden: Tensor,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """The residual that goes into the drafter's layer.

    Args:
        embedded: [T, H], of the token after each position.
        residual: [T, C*H], of each position, before the target's last mixer.
        norm_embedding: [H]; norm_hidden: [C*H], over all streams together; both centred on zero.
        from_embedding, from_hidden: [H, H]; the latter serves every stream.
        eps: of the norms.

    Returns:
        [T, C*H], of the type of `residual`: the sum is rounded once.
    """
    streams = residual.shape[-1] // embedded.shape[-1]
    token = linear(gemma_norm(embedded, norm_embedding, eps=eps), from_embedding)
    normed = gemma_norm(residual, norm_hidden, eps=eps).reshape(*residual.shape[:-1], streams, -1)
    summed: Tensor = linear(normed, from_hidden).float() + token.float().unsqueeze(-2)
    return summed.flatten(-2).to(residual.dtype)


def shifted(tokens: Tensor, following: Tensor) -> Tensor:
    """The token after each position: [T], and one more, to [T]."""
    return torch.cat([tokens[1:], following.reshape(1)])
