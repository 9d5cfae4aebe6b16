"""Block tables and other rows that the engine's second model runner changes a few at a time.

The engine's kernels find the tables of the cache groups by address; here the tensors themselves are at hand.

Source: vllm 0.32, v1/worker/gpu/buffer_utils.py and block_table.py.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_NO_SLOT = -1
_WORD = 4  # bytes; the engine counts strides and sizes of blocks in words


def write_staged(self: Any) -> None:
    """`StagedWriteTensor.apply_write`: write what was staged, in its order, and forget it."""
    begin = 0
    for index, start, end in zip(
        self._staged_write_indices, self._staged_write_starts, self._staged_write_cu_lens, strict=True
    ):
        row = self.gpu[index] if self.gpu.dim() > 1 else self.gpu[index:]
        row[start : start + end - begin] = torch.tensor(self._staged_write_contents[begin:end], dtype=self.dtype)
        begin = end
    self.clear_staged_writes()


def write_all_staged(self: Any, tensors: Any, output_ptrs: Tensor, output_strides: Tensor) -> None:
    """`FusedStagedWriter.apply`: the same for several."""
    for tensor in tensors:
        tensor.apply_write()


def gather(
    self: Any,
    idx_mapping: Tensor,
    num_reqs_padded: int,
    out: tuple[Tensor, ...] | None = None,
    out_ptrs: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """`BlockTables.gather_block_tables`: each group's rows of the batch, zeros behind them.

    Args:
        idx_mapping: [R].
        num_reqs_padded: rows to return.

    Returns:
        a group's [num_reqs_padded, blocks] int32 each.
    """
    targets = tuple(self.input_block_tables) if out is None else out
    for table, target in zip(self.block_tables, targets, strict=True):
        target[: len(idx_mapping)] = table.gpu[idx_mapping.long()]
        target[len(idx_mapping) : num_reqs_padded] = 0
    return tuple(target[:num_reqs_padded] for target in targets)


def slot_mappings(
    self: Any,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    num_tokens_padded: int,
    out: Tensor | None = None,
) -> Tensor:
    """`BlockTables.compute_slot_mappings`: where in its group's cache each token goes.

    Args:
        idx_mapping: [R]; below 0, a request without blocks.
        query_start_loc: [R+1]; positions: [T].
        num_tokens_padded: tokens to return.

    Returns:
        [groups, num_tokens_padded] int64; -1: nowhere.

    Raises:
        NotImplementedError: context parallelism.
    """
    if self.cp_size != 1:
        raise NotImplementedError("the reference computes no slots under context parallelism")
    mappings = self.slot_mappings if out is None else out
    bounds = query_start_loc[: len(idx_mapping) + 1].long()
    total = int(bounds[-1])
    owners = torch.repeat_interleave(idx_mapping.long(), bounds[1:] - bounds[:-1], output_size=total)
    places, nobody = positions[:total], owners < 0
    owners = owners.clamp_min(0)
    for group, (table, size) in enumerate(zip(self.block_tables, self.block_sizes, strict=True)):
        mappings[group, total:] = _NO_SLOT
        if not self._slot_mapping_enabled[group]:
            mappings[group, :total] = _NO_SLOT
            continue
        blocks = table.gpu[owners, places // size].long()
        mappings[group, :total] = (blocks * size + places % size).masked_fill(nobody, _NO_SLOT)
    return mappings[:, :num_tokens_padded]


def zero_blocks(self: Any, block_ids: list[int]) -> None:
    """`KVBlockZeroer.zero_block_ids`: empty new blocks, so that nothing old is read as theirs."""
    if self._meta is None:
        return
    addresses, strides, sizes = (part.tolist() for part in self._meta[:3])
    for block in block_ids:
        for address, stride, size in zip(addresses, strides, sizes, strict=True):
            ctypes.memset(address + block * stride * _WORD, 0, size * _WORD)
