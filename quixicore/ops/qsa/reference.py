"""Qwen Sparse Attention: each query scores blocks of tokens by one small key each, and attends to the best blocks.

T queries, S tokens of the sequence, B = S // R complete blocks of R tokens, IN heads of the indexer of ID dimensions,
HQ query heads and HK key heads of D dimensions. Positions count from 0.

Source: transformers, models/qwen4_exp/modeling_qwen4_exp.py, Qwen4ExpTextQSAIndexer and Qwen4ExpTextAttention; vllm
0.32, models/qwen4_exp/nvidia/{indexer_qsa,qsa}.py, nvidia/ops and v1/worker/gpu/spec_decode/mtp/speculator.py. Upstream
breaks ties of scores in no order that is stated; here it is one, so that ranks which compute the same choose the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quixicore.ops import Rounding
from quixicore.ops.norm.reference import gemma_norm


def rope(x: Tensor, positions: Tensor, rounding: Rounding, *, dims: int, theta: float) -> Tensor:
    """Rotates pairs of the first `dims` dimensions by an angle that grows with the position; the rest stays.

    Args:
        x: [T, N, D]; dimension i of the first half of `dims` forms a pair with dimension i of the second.
        positions: [T] int64.
        rounding: `hf` rounds both products; `fused` their sum alone. Sines and cosines are rounded in both.
        dims: even.
        theta: the slowest pair turns once in about 2 pi theta tokens.

    Returns:
        [T, N, D], of the type of `x`.
    """
    speeds = theta ** (-torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    angles = positions[:, None, None].float() * speeds
    return turn(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype), rounding)


def turn(x: Tensor, cosine: Tensor, sine: Tensor, rounding: Rounding) -> Tensor:
    """Rotates pairs of the first dimensions, as many as there are angles; the rest stays.

    Args:
        x: [T, N, D].
        cosine, sine: [T, 1, pairs], rounded to the type of `x`.
        rounding: as for `rope`.

    Returns:
        [T, N, D], of the type of `x`.
    """
    pairs = cosine.shape[-1]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    if rounding == "fused":
        cosine, sine, first, second = (part.float() for part in (cosine, sine, first, second))
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def index_queries(
    projected: Tensor, norm: Tensor, positions: Tensor, rounding: Rounding, *, dims: int, theta: float
) -> Tensor:
    """Queries of the indexer: normalised, then rotated.

    Args:
        projected: [T, IN, ID].
        norm: [ID], centred on zero.
        positions: [T] int64.
        rounding, dims, theta: as for `rope`.

    Returns:
        [T, IN, ID].
    """
    return rope(gemma_norm(projected, norm), positions, rounding, dims=dims, theta=theta)


def index_keys(
    pooled: Tensor, norm: Tensor, blocks: Tensor, rounding: Rounding, *, ratio: int, dims: int, theta: float
) -> Tensor:
    """The key of each block: the mean of its raw keys, normalised, and rotated by the position of its first token.

    Args:
        pooled: [n, ID], of `pool`.
        norm: [ID], centred on zero.
        blocks: [n] int64, numbers of the blocks.
        ratio: R.
        rounding, dims, theta: as for `rope`.

    Returns:
        [n, ID].
    """
    normed = gemma_norm(pooled, norm)[:, None]
    return rope(normed, blocks * ratio, rounding, dims=dims, theta=theta)[:, 0]


def pool(raw: Tensor, start: int, ring: Tensor, ratio: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means of the raw keys of the blocks that a step completes, and the ring in which the step leaves its keys.

    The ring holds the last C raw keys, that of position p in row p % C, and lasts from step to step: a block may begin
    in one and end in another. It is written after it is read. Rows of drafts that are refused are overwritten before
    anybody reads them, as long as C is at least R + the drafts of a step.

    Args:
        raw: [T, ID], keys before norm and rotation.
        start: position of the first of them.
        ring: [C, ID].
        ratio: R.

    Returns:
        [n] int64 numbers of the blocks; [n, ID] their means, in fp32 and rounded once; and [C, ID], the ring after.
    """
    places = torch.arange(start, start + len(raw))
    ends = places[(places + 1) % ratio == 0]
    members = ends[:, None] - torch.arange(ratio - 1, -1, -1)
    own = raw[(members - start).clamp_min(0)] if len(raw) else raw.new_zeros(len(ends), ratio, raw.shape[-1])
    keys = torch.where((members >= start)[..., None], own, ring[members % len(ring)])
    after = ring.clone()
    kept = places[-len(ring) :]
    after[kept % len(ring)] = raw[-len(ring) :]
    return ends // ratio, keys.float().mean(1).to(raw.dtype), after


def ring_rows(ratio: int, drafts: int) -> int:
    """Rows of a ring that `drafts` refused tokens a step do not harm: a multiple of `ratio`."""
    return -(-(ratio + drafts) // ratio) * ratio


def scores(queries: Tensor, keys: Tensor) -> Tensor:
    """How well each block answers each query: what the heads agree on, none of them negative.

    Args:
        queries: [T, IN, ID], of `index_queries`.
        keys: [B, ID], of `index_keys`.

    Returns:
        [T, B] fp32, at least 0; many are exactly that.
    """
    products = torch.einsum("tnd,bd->tnb", queries.float(), keys.float())
    return products.relu().sum(1) / math.sqrt(queries.shape[-1])


def visible(positions: Tensor, length: int, ratio: int) -> Tensor:
    """Blocks that each query may choose from: those that end with it or before it, and are complete.

    Args:
        positions: [T] int64.
        length: tokens of the sequence.
        ratio: R.

    Returns:
        [T] int64; blocks from 0 up to that number.
    """
    return ((positions + 1) // ratio).clamp(0, length // ratio)


def select(scored: Tensor, seen: Tensor, most: int) -> Tensor:
    """The best blocks of each query: the higher score first, of equal ones the lower block.

    A query's own token is not chosen for being its own: where its block has just been completed, it competes.

    Args:
        scored: [T, B] fp32, of `scores`.
        seen: [T] int64, of `visible`.
        most: blocks to choose.

    Returns:
        [T, most] int64, rising; -1 behind the last.
    """
    blocks = torch.arange(scored.shape[-1])
    hidden = blocks >= seen[:, None]
    # Adding 0 makes +0 of -0; a stable sort leaves equal ones in the order of the blocks.
    ranked = (scored + 0.0).masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :most]
    taken = torch.arange(ranked.shape[-1]) < seen[:, None]
    rising = torch.where(taken, ranked, scored.shape[-1]).sort(-1).values
    found = torch.where(rising < scored.shape[-1], rising, -1)
    return torch.nn.functional.pad(found, (0, most - found.shape[-1]), value=-1)


def expand(blocks: Tensor, positions: Tensor, ratio: int) -> Tensor:
    """Tokens that each query attends to: those of its blocks, and those of the block that is not complete at it.

    Args:
        blocks: [T, n] int64, of `select`.
        positions: [T] int64.
        ratio: R.

    Returns:
        [T, n * R + R - 1] int64, with the tail right behind the last block; -1 behind it.
    """
    within = torch.arange(ratio)
    tokens = torch.where(blocks[..., None] >= 0, blocks[..., None] * ratio + within, -1).flatten(1)
    tail = ((positions + 1) // ratio * ratio)[:, None] + within[:-1]
    tail = torch.where(tail <= positions[:, None], tail, -1)
    row = torch.cat([tokens, tail], -1)
    order = (row < 0).to(torch.int8).sort(dim=-1, stable=True).indices  # what there is comes first, in its order
    return row.gather(-1, order)


def reused(tokens: Tensor, captured: Tensor, positions: Tensor, steps: int) -> Tensor:
    """What a later draft attends to with the selection of an earlier one: that, and the tokens drafted since.

    The engine's own drafter appends none (`steps` below 0 here); both choose among drafts and change no answer.

    Args:
        tokens: [T, W] int64, of `expand`, of the last accepted row.
        captured: [T] int64, tokens of the sequence when it was captured.
        positions: [T] int64, of the drafts.
        steps: drafts after the first.

    Returns:
        [T, W + steps + 1] int64.
    """
    later = captured[:, None] + torch.arange(steps + 1)
    return torch.cat([tokens, torch.where(later <= positions[:, None], later, -1)], -1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, gate: Tensor, rounding: Rounding) -> Tensor:
    """Grouped-query attention over chosen tokens, then a gate of the output.

    Args:
        queries: [T, HQ, D], normalised and rotated.
        keys, values: [S, HK, D]; key head h serves query heads h * HQ / HK and on.
        tokens: [T, W] int64, of `expand`; -1 is nobody. Each query has at least one.
        gate: [T, HQ, D], before its sigmoid.
        rounding: `hf` rounds scores, probabilities, outputs and gates; `fused` outputs, and what the gate leaves.

    Returns:
        [T, HQ, D], of the type of `queries`.
    """
    near = tokens.clamp_min(0)
    return attend_to(queries, keys[near], values[near], tokens >= 0, gate, rounding)


def attend_to(queries: Tensor, keys: Tensor, values: Tensor, held: Tensor, gate: Tensor, rounding: Rounding) -> Tensor:
    """The same with the keys and values of each query at hand.

    Args:
        queries, gate, rounding: as for `attend`.
        keys, values: [T, W, HK, D].
        held: [T, W] bool, which of them count; a query without any gives zeros.

    Returns:
        [T, HQ, D], of the type of `queries`.
    """
    kv_heads, kind = keys.shape[2], queries.dtype
    grouped = queries.reshape(len(queries), kv_heads, -1, queries.shape[-1])
    if rounding == "fused":
        grouped, keys, values = grouped.float(), keys.float(), values.float()
    products = torch.einsum("thgd,twhd->thgw", grouped, keys) * queries.shape[-1] ** -0.5
    shares = products.float().masked_fill(~held[:, None, None], -torch.inf).softmax(-1).nan_to_num(0)
    output = torch.einsum("thgw,twhd->thgd", shares.to(values.dtype), values).flatten(1, 2).to(kind)
    return _gated(output, gate, rounding)


def attend_among(
    queries: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, gate: Tensor, rounding: Rounding
) -> Tensor:
    """The same as `attend`, by one product with all keys: for queries that share most of them.

    Args:
        queries, keys, values, gate, rounding: as for `attend`.
        tokens: [T, W] int64, of `expand`; a query without any gives zeros.

    Returns:
        [T, HQ, D], of the type of `queries`.
    """
    count, heads, width = queries.shape
    kind, groups = queries.dtype, heads // keys.shape[1]
    if rounding == "fused":
        queries, keys, values = queries.float(), keys.float(), values.float()
    by_head = queries.reshape(count, -1, groups, width).permute(1, 2, 0, 3)  # [HK, groups, T, D]
    products = by_head @ keys.permute(1, 2, 0)[:, None] * width**-0.5
    held = torch.zeros(count, len(keys) + 1, dtype=torch.bool)
    held.scatter_(1, torch.where(tokens >= 0, tokens, len(keys)), True)
    shares = products.float().masked_fill(~held[:, :-1], -torch.inf).softmax(-1).nan_to_num(0)
    output: Tensor = shares.to(values.dtype) @ values.transpose(0, 1)[:, None]
    output = output.permute(2, 0, 1, 3).flatten(1, 2).to(kind)
    return _gated(output, gate, rounding)


def _gated(output: Tensor, gate: Tensor, rounding: Rounding) -> Tensor:
    if rounding == "hf":
        return output * torch.sigmoid(gate)
    return (output.float() * torch.sigmoid(gate.float())).to(output.dtype)
