"""The n-gram embedding's gate and its convolution over the window that each request keeps.

Source: vllm 0.32, models/qwen4_exp/common/ops/ple.py.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from quixicore.ops.ngram import reference
from quixicore.ops.norm.reference import gemma_norm

_NULL_BLOCK = 0


def gate(
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    norm_key_w: Tensor,
    norm_query_w: Tensor,
    norm_conv_w: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """[T, C*H] gated value, and their norms, which go into the convolution."""
    gated = reference.gated_values(hidden, key, value, norm_query_w, norm_key_w, eps=eps)
    return gated, gemma_norm(gated, norm_conv_w, groups=key.shape[-1] // value.shape[-1], eps=eps)


def convolve(
    inputs: Tensor,
    residual: Tensor,
    conv_state: Tensor,
    conv_weights: Tensor,
    state_indices: Tensor,
    outer_residual: Tensor | None,
    *,
    mode: str,
    dilation: int,
    query_start_loc: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    has_initial_states: Tensor | None = None,
    spec_query_len: int = 1,
    token_indices: Tensor | None = None,
) -> None:
    """Add what the last tokens' norms say to the gated values, and keep the window for the next step.

    Args:
        inputs: [T, C*H], norms.
        residual: [T, C*H], gated values, written.
        conv_state: [blocks, C*H, W], windows, oldest first, written; longer by a column a draft.
        conv_weights: [C*H, K].
        state_indices: [R] or [R, n], the block of each request's window; 0 is nobody's.
        outer_residual: [T, C*H] that is added too; None: it is not.
        mode: `decode`, a token a request; `prefill`; `spec`, a token and its drafts.
        dilation: tokens from one tap to the next.
        query_start_loc: [R+1], except for `decode`.
        num_accepted_tokens: [R], of the step before, for `spec`: the window begins at the last of them.
        has_initial_states: [R]; None: all have.
        token_indices: [tokens], where each of these lies in the batch; None: in their order.
    """
    reach = (conv_weights.shape[1] - 1) * dilation
    blocks = (state_indices if state_indices.dim() == 1 else state_indices[:, 0]).tolist()
    if mode == "decode":
        count = len(inputs) if token_indices is None else len(token_indices)
        bounds = list(range(count + 1))
    else:
        assert query_start_loc is not None
        bounds = query_start_loc[: len(blocks) + 1].tolist()
    for row, block in enumerate(blocks[: len(bounds) - 1]):
        first, last = bounds[row], bounds[row + 1]
        own: Tensor | slice = slice(first, last) if token_indices is None else token_indices[first:last].long()
        known = block != _NULL_BLOCK and (has_initial_states is None or bool(has_initial_states[row]))
        offset = 0
        if mode == "spec":
            assert num_accepted_tokens is not None
            offset = min(max(int(num_accepted_tokens[row]) - 1, 0), spec_query_len - 1)
        window = inputs.new_zeros(reach, inputs.shape[1])
        if known:
            window.copy_(conv_state[block, :, offset : offset + reach].T)
        said, seen = reference.convolve(inputs[own], conv_weights, dilation, window)
        if block != _NULL_BLOCK or mode == "spec":
            value = residual[own] + silu(said)
            residual[own] = value if outer_residual is None else outer_residual[own] + value
        elif outer_residual is not None:
            residual[own] = outer_residual[own] + residual[own]
        if block != _NULL_BLOCK and last > first:
            # With drafts the window that the next step reads is not known yet: all that it may be are kept.
            kept = seen[1:] if mode == "spec" else seen[last - first :]
            conv_state[block, :, : len(kept)] = kept.T
