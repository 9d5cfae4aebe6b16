"""Recurrent states at the blocks of the prefix cache: where a state runs, and what is kept of it at a boundary.

A request's state runs in one block. When its tokens pass a boundary, the state moves on to the next block and the old
one stays as it was, for others to begin from. With drafts a state is kept after each token of a step: the one that
counts is that of the last accepted.

Source: vllm 0.32, v1/worker/mamba_utils.py and v1/worker/gpu/model_states/mamba_hybrid.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def note_accepted(slots: Tensor, sampled: Tensor, accepted: Tensor) -> None:
    """How many tokens each request's last step left, 1 at least: [R], [R], [slots] written."""
    there = slots >= 0
    accepted[slots[there]] = sampled[: len(slots)][there].clamp_min(1).to(accepted.dtype)


def fill_accepted(slots: Tensor, accepted: Tensor, value: int) -> None:
    """The same when it is one number for all."""
    accepted[slots[slots >= 0]] = value


def advance(
    slots: Tensor,
    columns: Tensor,
    computed: Tensor,
    starts: Tensor,
    accepted: Tensor,
    from_columns: Tensor,
    from_offsets: Tensor,
    count: int,
    *,
    MAMBA_BLOCK_SIZE: int,
    **_tuning: Any,
) -> None:
    """Say for each request which block its state comes from and which it goes on in.

    Args:
        slots: [R] of which `count` count; starts: [R+1]; computed: [slots].
        columns: [slots], of the block table, where the state runs; written.
        accepted: [slots], written: 1 where a boundary was passed.
        from_columns, from_offsets: [slots], written: the column before, and the accepted tokens after the first.
        MAMBA_BLOCK_SIZE: tokens of a block.
    """
    own = slots[:count].long()
    before, kept = columns[own], accepted[own]
    from_columns[own] = before
    from_offsets[own] = (kept - 1).clamp_min(0)
    reached = computed[own] + starts[1 : count + 1] - starts[:count]
    after = ((reached + MAMBA_BLOCK_SIZE - 1) // MAMBA_BLOCK_SIZE - 1).to(columns.dtype)
    columns[own] = after
    accepted[own] = torch.where((before >= 0) & (before != after), 1, kept)


def remember(
    real: Callable[..., None],
    self: Any,
    kv_cache_config: Any,
    layers: dict[str, Any],
    copies: Any,
    tables: list[Tensor],
    batch_tables: list[Tensor],
) -> None:
    """`MambaSpecDecodeGPUContext._populate_metadata`, and the tensors themselves beside their addresses."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, is_conv_state_dim_first
    from vllm.v1.worker.mamba_utils import _get_mamba_spec_for_layer

    real(self, kv_cache_config, layers, copies, tables, batch_tables)
    found = []
    for group, number in enumerate(self.mamba_group_ids):
        cache_group = kv_cache_config.kv_cache_groups[number]
        for layer in cache_group.layer_names:
            kinds = copies[_get_mamba_spec_for_layer(cache_group, layer).mamba_type]
            for state, kind in zip(layers[layer].kv_cache, kinds, strict=False):
                windowed = kind is get_conv_copy_spec
                turned = windowed and is_conv_state_dim_first()
                found.append((state.transpose(1, 2) if turned else state, tables[group], windowed))
    self.quixicore_states = found
    self.quixicore_batch_tables = batch_tables


def copy(states: Any, slot: int, source: int, target: int, offset: int) -> None:
    """Move a request's states from one column of its block table to another.

    Args:
        states: of [blocks, ...] states, the [slots, columns] block table of each, and whether it is a window of tokens.
        slot: of the request.
        source, target: columns.
        offset: accepted tokens after the first. A window is shifted by them; any other state lies in a block a token.
    """
    for state, table, windowed in states:
        goal = state[int(table[slot, target])]
        if windowed:
            rest = state[int(table[slot, source])][offset:].clone()
            goal[: len(rest)] = rest
        else:
            goal.copy_(state[int(table[slot, source + offset])])


def move_on(
    self: Any,
    num_reqs: int,
    state_idx_gpu: Tensor,
    src_col_gpu: Tensor,
    token_bias_gpu: Tensor,
    idx_mapping: Tensor | None,
) -> None:
    """`MambaSpecDecodeGPUContext.run_fused_precopy`: before a step, states that passed a boundary move on."""
    if not self.is_initialized:
        return
    for slot in range(num_reqs) if idx_mapping is None else idx_mapping[:num_reqs].tolist():
        source, target = int(src_col_gpu[slot]), int(state_idx_gpu[slot])
        if slot >= 0 and source >= 0 and source != target:
            copy(self.quixicore_states, slot, source, target, int(token_bias_gpu[slot]))


def keep_boundary(
    self: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: Tensor,
    state_idx_gpu: Tensor,
    new_num_computed_tokens_gpu: Tensor,
    idx_mapping: Tensor,
) -> None:
    """`MambaSpecDecodeGPUContext.run_fused_postprocess_align`: after a step, keep the state at the boundary in it.

    Args:
        num_reqs: requests of the batch.
        num_accepted_tokens_gpu: [slots], written: 1 where the kept state is the running one.
        state_idx_gpu, new_num_computed_tokens_gpu: [slots], the latter after the step.
        idx_mapping: [R]; below 0, a request that is passed over.
    """
    if not self.is_initialized:
        return
    for slot in idx_mapping[:num_reqs].tolist():
        if slot < 0:
            continue
        reached, gained, source = (
            int(new_num_computed_tokens_gpu[slot]),
            int(num_accepted_tokens_gpu[slot]),
            int(state_idx_gpu[slot]),
        )
        running = reached - gained + 1
        boundary = reached // self.block_size * self.block_size
        if boundary < running:
            continue
        target, offset = boundary // self.block_size - 1, boundary - running
        if source == target:
            num_accepted_tokens_gpu[slot] = 1
        if source != target or offset:
            copy(self.quixicore_states, slot, source, target, offset)


def blocks_of_running(self: Any, seq_lens: Tensor, num_reqs: int) -> Tensor:
    """`MambaSpecDecodeGPUContext.compute_aligned_state_indices`: the blocks that each request's state runs in.

    Args:
        seq_lens: [R] int32, of the sequences.
        num_reqs: requests of the batch.

    Returns:
        [groups, num_reqs, 1 + drafts] int32, ids of blocks.
    """
    found: Tensor = self.aligned_state_indices
    first = ((seq_lens[:num_reqs].long() - 1) // self.block_size).clamp_min(0)
    columns = first[:, None] + torch.arange(found.shape[2])
    for group, table in enumerate(self.quixicore_batch_tables):
        found[group, :num_reqs] = table[:num_reqs].gather(1, columns.clamp_max(table.shape[1] - 1))
    return found[:, :num_reqs]
