"""Gated DeltaNet on a processor, the same whether a token is decoded or part of a prompt.

The references keep the recurrence in fp32 and round a convolution once, after its activation, as kernels on a card do.
Of the engine's own the convolution of prompts, and of drafts where a processor has no matrix tiles, is rounded twice,
and the recurrence rounds strengths, chunks, and normalised queries and keys to bfloat16, each kernel others of them: a
sequence would depend on which of its tokens were computed together. Besides, torch's grouped convolution in bfloat16
takes 5 to 20 times as long there as in fp32.

Source: vllm 0.32, model_executor/layers/mamba/ops/cpu/{causal_conv1d,gdn_attention}.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quixicore.ops.gated_delta import reference


def prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
    **kwargs: Any,
) -> Tensor:
    """`causal_conv1d_fn_cpu`: the convolution of each sequence, and the state that it leaves.

    Args:
        x: [D, T]; weight: [D, W].
        conv_states: [blocks, D, W-1 or more], written.
        query_start_loc: [R+1]; cache_indices: [R], None: their own numbers; has_initial_state: [R], None: none has.

    Returns:
        [D, T], of the type of `x`.

    Raises:
        NotImplementedError: a bias, or another activation than SiLU.
    """
    if bias is not None or activation not in ("silu", "swish"):
        raise NotImplementedError("the reference of the convolution has SiLU behind it, and no bias")
    result, reach = torch.empty_like(x), weight.shape[1] - 1
    for row, (first, last) in enumerate(itertools.pairwise(query_start_loc.tolist())):
        block = row if cache_indices is None else int(cache_indices[row])
        if last == first or block == pad_slot_id:
            continue
        known = has_initial_state is not None and bool(has_initial_state[row])
        before = conv_states[block, :, :reach].T if known else None
        said, state = reference.conv(x[:, first:last].T, weight, before)
        result[:, first:last] = said.T
        conv_states[block, :, :reach] = state.T
    return result


class Functions:
    """`torch.nn.functional` as the engine's code for drafts sees it, whose convolution is not rounded yet."""

    @staticmethod
    def conv1d(inputs: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """[N, D, T] and [D, 1, W] to [N, D, T - W + 1] fp32."""
        if bias is not None or groups != inputs.shape[1]:
            raise NotImplementedError("the convolution is each channel's with itself, and has no bias")
        # A product and a sum: torch's grouped convolution takes several times as long to begin as this does in all.
        return (inputs.float().unfold(-1, weight.shape[-1], 1) * weight.float()).sum(-1)

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)


functions = Functions()


class Operations:
    """The engine's compiled operations as its code for this layer sees them, with a recurrence that stays in fp32."""

    @staticmethod
    def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """Decays and strengths: [T, HV] twice to [1, T, HV] fp32 twice."""
        decay, strength = reference.gates(a, b, A_log, dt_bias, "fused")
        return decay[None], strength[None]

    @staticmethod
    def chunk_gated_delta_rule_cpu(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        output_final_state: bool,
        cu_seqlens: Tensor,
        head_first: bool,
        use_qk_l2norm_in_kernel: bool,
        initial_state_indices: Tensor,
    ) -> tuple[Tensor, None]:
        """The recurrence over the tokens of each sequence.

        Args:
            query, key: [1, T, HK, K], not normalised; value: [1, T, HV, V]; g, beta: [1, T, HV] fp32.
            initial_state: [blocks, HV, K, V], written; initial_state_indices: [R]; cu_seqlens: [R+1].

        Returns:
            [1, T, HV, V]; the states stay where they are.
        """
        result = torch.empty_like(value)
        for row, (first, last) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            if last > first:
                state = initial_state[int(initial_state_indices[row])]
                q, k, v, decay, strength = (x[0, first:last] for x in (query, key, value, g, beta))
                result[0, first:last], after = reference.chunked(q, k, v, decay, strength, state)
                state.copy_(after)
        return result, None

    @staticmethod
    def fused_sigmoid_gating_delta_rule_update_cpu(
        A_log: Tensor,
        dt_bias: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        initial_state_source: Tensor,
        initial_state_indices: Tensor,
        cu_seqlens: Tensor,
        use_qk_l2norm_in_kernel: bool,
    ) -> Tensor:
        """A token of each sequence.

        Args:
            q, k: [1, R, HK, K], not normalised; v: [1, R, HV, V]; a, b: [R, HV].
            initial_state_source: [blocks, HV, K, V], written; initial_state_indices: [R].

        Returns:
            [R, 1, HV, V].
        """
        blocks = initial_state_indices.long()
        gates = reference.gates(a, b, A_log, dt_bias, "fused")
        result, states = reference.step(q[0], k[0], v[0], *gates, initial_state_source[blocks].float())
        initial_state_source[blocks] = states.to(initial_state_source.dtype)
        return result[:, None]

    @staticmethod
    def fused_sigmoid_gating_delta_rule_update_spec_cpu(
        A_log: Tensor,
        dt_bias: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        initial_state_source: Tensor,
        spec_state_indices: Tensor,
        num_accepted_tokens: Tensor,
        cu_seqlens: Tensor,
        use_qk_l2norm_in_kernel: bool,
    ) -> Tensor:
        """A token of each sequence and its drafts, and the state after each of them in a block of its own.

        Args:
            q, k: [T, HK, K], not normalised; v: [T, HV, V]; a, b: [T, HV].
            initial_state_source: [blocks, HV, K, V], written.
            spec_state_indices: [R, 1 + k], a block for each token; a sequence begins at that of the last accepted.
            num_accepted_tokens: [R], of the step before; cu_seqlens: [R+1].

        Returns:
            [T, HV, V].
        """
        decay, strength = reference.gates(a, b, A_log, dt_bias, "fused")
        starts, lengths, blocks = cu_seqlens[:-1].long(), cu_seqlens.diff().long(), spec_state_indices.long()
        rows, places = torch.arange(len(lengths)), torch.arange(int(lengths.max()))
        there = places < lengths[:, None]
        tokens = torch.where(there, starts[:, None] + places, 0)
        states = initial_state_source[blocks[rows, num_accepted_tokens.long() - 1]].float()
        kept = there[..., None]  # sequences with fewer drafts are filled up with tokens that change nothing
        said, after = reference.steps(
            q[tokens], k[tokens], v[tokens], decay[tokens] * kept, strength[tokens] * kept, states
        )
        initial_state_source[blocks[:, : len(places)][there]] = after[there].to(initial_state_source.dtype)
        result = torch.empty_like(v)
        result[tokens[there]] = said[there]
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(_custom_ops(), name)


operations = Operations()


def _custom_ops() -> Any:
    import vllm._custom_ops

    return vllm._custom_ops
