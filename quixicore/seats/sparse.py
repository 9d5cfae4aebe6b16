"""Sparse attention over the engine's pages: each request's keys are found through its block table.

T tokens of R requests, H heads of the indexer of ID dimensions, HQ query heads and HK key heads of D dimensions, of
which the first ID / 2 turn with the position, in both.

Source: vllm 0.32, models/qwen4_exp/nvidia/ops/{qsa_prepare,qsa_indexer,qsa}.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from quixicore.ops.norm.reference import gemma_norm
from quixicore.ops.qsa import reference

_ROWS = 64
"""Queries whose keys are gathered together: memory is for so many times their selection, and no more."""
_MANY = 16
"""Queries of one request that are worth a product with all of its keys: they choose much the same ones."""
_NEAR = 16
"""Unless it has so many times as many tokens as a query chooses."""


def prepare(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    eps: float,
    q_out: Tensor,
    state_cache: Tensor,
    state_slots: Tensor,
    state_block_table: Tensor,
    query_start_loc: Tensor,
    logical_positions: Tensor,
    compressed_cache: Tensor,
    compressed_slots: Tensor,
    k_work_metadata: Tensor,
    *,
    compress_ratio: int,
    mrope_section: tuple[int, int, int] | None,
    rope_pos_offset: int | None,
    main_qkv: Tensor,
    main_q_norm_weight: Tensor,
    main_k_norm_weight: Tensor,
    main_eps: float,
    main_kv_cache: Tensor,
    main_slot_mapping: Tensor,
    main_k_scale: float,
    main_v_scale: float,
) -> tuple[Tensor, Tensor]:
    """Ready the indexer's queries, its blocks' keys and the ring, and attention's queries, keys and values.

    Args:
        q: [T, H*ID], projected; k: [T, ID], raw keys.
        positions: [T] int64, which text turns by.
        cos_sin_cache: [positions, ID / 2], cosines, then sines.
        q_out: [T, H, ID], written.
        state_cache: [blocks, C, 1, ID], rings, written at `state_slots`; state_block_table: [R, 1], whose.
        query_start_loc: [R+1]; logical_positions: [T], from the beginning of the sequence.
        compressed_cache: [blocks, page, 1, ID], written at `compressed_slots`: [T], -1 where no block ends.
        main_qkv: [T, (2*HQ + 2*HK) * D]: a query and its gate of each head, then keys, then values.
        main_kv_cache: [blocks, page, HK, 2*D], written at `main_slot_mapping`: [T].

    Returns:
        [T, HQ, D] queries, and [T, HQ, D] their gates before the sigmoid.

    Raises:
        NotImplementedError: positions in three dimensions, or a cache of another type than bfloat16.
    """
    if positions.dim() != 1 or rope_pos_offset is not None:
        raise NotImplementedError("the reference turns by the positions of text alone")
    if main_kv_cache.dtype != main_qkv.dtype or compressed_cache.dtype != q.dtype:
        raise NotImplementedError("the reference keeps keys and values as they are, in bfloat16")
    tokens, width = len(q), main_kv_cache.shape[-1] // 2
    turns = cos_sin_cache[positions]
    q_out.copy_(_turn(gemma_norm(q.view_as(q_out), q_norm_weight, eps=eps), turns))

    bounds = query_start_loc.tolist()
    for row, (first, last) in enumerate(itertools.pairwise(bounds)):
        last = min(last, tokens)
        if last <= first:
            continue
        ring = state_cache[int(state_block_table[row, 0]), :, 0, : k.shape[1]]
        blocks, means, after = reference.pool(k[first:last], int(logical_positions[first]), ring, compress_ratio)
        ends = first + (blocks + 1) * compress_ratio - 1 - int(logical_positions[first])
        slots = compressed_slots[ends]
        keys = gemma_norm(means, k_norm_weight, eps=eps)[:, None]
        keys = _turn(keys, cos_sin_cache[blocks * compress_ratio])
        there = slots >= 0
        page = compressed_cache.shape[1]
        compressed_cache[slots[there] // page, slots[there] % page] = keys[there].view(-1, *compressed_cache.shape[2:])
        if bool((state_slots[first:last] >= 0).any()):
            ring.copy_(after)

    heads = main_qkv.view(tokens, -1, width)
    kv_heads = main_kv_cache.shape[2]
    own, keys, values = heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]
    queries, gates = own[:, 0::2], own[:, 1::2]
    queries = _turn(gemma_norm(queries, main_q_norm_weight, eps=main_eps), turns)
    keys = _turn(gemma_norm(keys, main_k_norm_weight, eps=main_eps), turns)
    there = main_slot_mapping >= 0
    slots, page = main_slot_mapping[there], main_kv_cache.shape[1]
    main_kv_cache[slots // page, slots % page] = torch.cat([keys, values], -1)[there]
    return queries.contiguous(), gates.contiguous()


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    """[T, N, D] rotated by [T, rotated dimensions], cosines then sines."""
    cosine, sine = turns.to(x.dtype).chunk(2, -1)
    return reference.turn(x, cosine[:, None], sine[:, None], "fused")


def choose_decoding(
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    visible_blocks: Tensor,
    token_topk: int,
    compress_ratio: int,
    decode_query_len: int,
    block_indices: Tensor,
) -> None:
    """Choose blocks for requests that have as many queries each: [T, token_topk / compress_ratio] int32, written.

    Args:
        q: [T, H, ID]; k_cache: [blocks, page, 1, ID]; page_table: [R, pages]; visible_blocks: [T].
        decode_query_len: queries of a request.
    """
    starts = torch.arange(0, len(q) + 1, decode_query_len)
    _choose(q, k_cache, page_table, starts, visible_blocks, block_indices)


def choose_prefilling(
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    visible_blocks: Tensor,
    token_topk: int,
    compress_ratio: int,
    max_query_len: int,
    block_indices: Tensor,
    max_seq_len: int,
) -> None:
    """The same for requests of their own lengths; `query_start_loc` may count from the middle of a batch: [R+1]."""
    _choose(q, k_cache, page_table, query_start_loc - query_start_loc[0], visible_blocks, block_indices)


def _choose(q: Tensor, k_cache: Tensor, page_table: Tensor, starts: Tensor, seen: Tensor, found: Tensor) -> None:
    bounds = starts.tolist()
    for row, (first, last) in enumerate(itertools.pairwise(bounds)):
        last = min(last, len(q))
        if last <= first:
            continue
        visible = seen[first:last].long()
        most = int(visible.max())
        if most <= found.shape[1]:  # nothing to choose: all of them, as `select` would say
            blocks = torch.arange(found.shape[1])
            found[first:last] = torch.where(blocks < visible[:, None], blocks, -1)
            continue
        pages = page_table[row, : -(-most // k_cache.shape[1])].long()
        keys = k_cache[pages].flatten(0, 1)[:most, 0]
        scored = reference.scores(q[first:last], keys)
        found[first:last] = reference.select(scored, visible, found.shape[1])


def expand(
    block_indices: Tensor,
    query_positions: Tensor,
    visible_blocks: Tensor,
    compress_ratio: int,
    token_topk: int,
    out: Tensor,
) -> None:
    """The tokens of the chosen blocks, the tail behind them, and in the last column how many there are.

    Args:
        block_indices: [T, n] int32; query_positions: [T].
        out: [T, n * R + R] int32, written.
    """
    tokens = reference.expand(block_indices.long(), query_positions, compress_ratio)
    out[:, :-1] = tokens
    out[:, -1] = (tokens >= 0).sum(-1)


def _parts(requests: Tensor) -> Iterator[tuple[slice, bool]]:
    """Rows that are computed together, and whether all are of one request: many of one by themselves, others mixed."""
    begun = 0
    changes = (requests.diff().nonzero().flatten() + 1).tolist()
    for first, last in itertools.pairwise([0, *changes, len(requests)]):
        if last - first >= _MANY:
            yield from ((part, False) for part in _cut(begun, first))
            yield from ((part, True) for part in _cut(first, last))
            begun = last
    yield from ((part, False) for part in _cut(begun, len(requests)))


def _cut(first: int, last: int) -> Iterator[slice]:
    for start in range(first, last, _ROWS):
        yield slice(start, min(start + _ROWS, last))


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    logical_indices: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    use_prefill_config: bool,
    out: Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    *,
    output_gate: Tensor,
) -> Tensor:
    """Attention of each query over its chosen tokens, and the gate of its output.

    Args:
        q, output_gate: [T, HQ, D]; k_cache, v_cache: [blocks, page, HK, D].
        logical_indices: [T, W+1] int32, of `expand`; rows without tokens give zeros.
        block_table: [R, pages]; token_to_req: [T].

    Returns:
        [T, HQ, D], `out` where it is given.

    Raises:
        NotImplementedError: caches of another type than bfloat16.
    """
    if k_scale is not None or v_scale is not None:
        raise NotImplementedError("the reference reads keys and values in bfloat16")
    result = torch.empty_like(q) if out is None else out
    page = k_cache.shape[1]
    for part, alone in _parts(token_to_req):
        counts = logical_indices[part, -1]
        tokens = logical_indices[part, : max(int(counts.max()), 1)].long()
        length = int(tokens.max()) + 1
        if alone and 0 < length <= _NEAR * tokens.shape[1]:
            pages = block_table[int(token_to_req[part.start]), : -(-length // page)].long()
            keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            result[part] = reference.attend_among(q[part], keys, values, tokens, output_gate[part], "fused")
            continue
        near = tokens.clamp_min(0)
        blocks = block_table[token_to_req[part].long()].gather(1, near // page).long()
        keys, values = k_cache[blocks, near % page], v_cache[blocks, near % page]
        result[part] = reference.attend_to(q[part], keys, values, tokens >= 0, output_gate[part], "fused")
    return result
