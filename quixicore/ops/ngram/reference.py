"""Hashed n-gram embeddings (PLE): rows of a table that the last tokens choose, gated into every residual stream.

T tokens, N the longest n-gram, S heads of hashing for each length from 2 to N, C streams of H features.

Source: transformers, models/qwen4_exp/modeling_qwen4_exp.py, Qwen4ExpTextNGramEmbedding and Qwen4ExpTextPLELayer; vllm
0.32, models/qwen4_exp/common/ngram_embedding.py and common/ple.py. Both round after each operation: there is one way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from quixicore.ops.experts.reference import from_nvfp4
from quixicore.ops.norm.reference import gemma_norm

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_LARGEST = (1 << 63) - 1
_TABLE_STEP = 10007


def multipliers(vocab_size: int, longest: int, seed: int, table: int = 0) -> tuple[int, ...]:
    """An odd factor for each place of an n-gram, so small that no product with a token leaves 63 bits.

    Args:
        vocab_size: of the tokens.
        longest: N.
        seed: of the config.
        table: number of the layer's table among the tables, from 0.
    """
    half = max(1, _LARGEST // max(vocab_size, 1) // 2)
    base = seed + _TABLE_STEP * table
    return tuple(2 * (_split_mix((base + _GAMMA * (place + 1)) & _WORD) % half) + 1 for place in range(longest))


def history(tokens: Tensor, before: Tensor, longest: int, end_token: int) -> Tensor:
    """Each token with those before it, newest first; what lies behind an end of text counts as that end.

    A token that is itself an end does not cut off its own past.

    Args:
        tokens: [T] int64.
        before: [N-1] int64, the tokens before these, oldest first; `end_token` where there are none.
        longest: N.
        end_token: id.

    Returns:
        [T, N] int64.
    """
    seen = torch.cat([before, tokens])
    places = torch.arange(len(tokens)) + len(before)
    columns = [tokens]
    cut = torch.zeros(len(tokens), dtype=torch.bool)
    for back in range(1, longest):
        earlier = seen[places - back]
        cut = cut | (earlier == end_token)
        columns.append(torch.where(cut, end_token, earlier))
    return torch.stack(columns, -1)


def ids(past: Tensor, factors: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Rows of the table, one for each head: first those of pairs, then of triples, and so on.

    Args:
        past: [T, N], of `history`.
        factors: N, of `multipliers`.
        sizes: S * (N - 1) rows of the heads, primes (`slimserve.geometry.ngram.head_sizes`).

    Returns:
        [T, S * (N - 1)] int64.
    """
    products = past * torch.tensor(factors)
    heads = len(sizes) // (past.shape[-1] - 1)
    offsets = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    mixed, found = products[:, 0], []
    for length in range(1, past.shape[-1]):
        mixed = mixed ^ products[:, length]
        own = slice((length - 1) * heads, length * heads)
        found.append(mixed[:, None] % torch.tensor(sizes[own]) + offsets[own])
    return torch.cat(found, -1)


def rows(table: Tensor, found: Tensor, scales: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """The rows that the hashes choose, side by side.

    Args:
        table: [R, D] bfloat16; [R, D] float8_e4m3fn with `scale`; [R, D / 2] uint8, of two four-bit values a byte, with
            `scales` and `scale`.
        found: [T, S], of `ids`.
        scales: [R, D / 16] float8_e4m3fn.
        scale: scalar, of the whole table; with eight bits rounded to bfloat16, as the engine has it.

    Returns:
        [T, S * D] bfloat16.
    """
    chosen = table[found]
    if scales is not None and scale is not None:
        wide = from_nvfp4(chosen.flatten(0, 1), scales[found].flatten(0, 1), scale)
        return wide.reshape(len(found), -1).to(torch.bfloat16)
    if scale is not None:
        chosen = chosen.to(torch.bfloat16) * scale.to(torch.bfloat16)
    return chosen.flatten(1).to(torch.bfloat16)


def gated_values(
    residual: Tensor, keys: Tensor, values: Tensor, norm_query: Tensor, norm_key: Tensor, *, eps: float = 1e-6
) -> Tensor:
    """What the embedding says to each stream, as far as the stream asks for it.

    Args:
        residual: [T, C*H].
        keys: [T, C*H], projected from the token's embedding.
        values: [T, H], likewise; all streams share them.
        norm_query, norm_key: [C*H], centred on zero, over H each.
        eps: of these norms.

    Returns:
        [T, C*H], of the type of `residual`.
    """
    streams = keys.shape[-1] // values.shape[-1]
    query, key = (
        gemma_norm(x, weight, groups=streams, eps=eps).reshape(*x.shape[:-1], streams, -1)
        for x, weight in ((residual, norm_query), (keys, norm_key))
    )
    score = (key * query).sum(-1, keepdim=True) / values.shape[-1] ** 0.5
    gate = score.abs().clamp_min(1e-6).sqrt() * score.sign()
    return (torch.sigmoid(gate) * values.unsqueeze(-2)).flatten(-2)


def with_context(
    gated: Tensor, norm: Tensor, weight: Tensor, *, streams: int, dilation: int, window: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gated values, and a convolution of their norms over tokens some way back, added.

    Args:
        gated: [T, C*H], of `gated_values`.
        norm: [C*H], centred on zero, over H each.
        weight: [C*H, W], the newest token last.
        streams: C.
        dilation: tokens from one tap to the next.
        window: [(W-1) * dilation, C*H], norms before these, oldest first; None: there were none, which is zeros.

    Returns:
        [T, C*H], to be added to the residual, of the type of `gated`; and the window after them.
    """
    normed = gemma_norm(gated, norm, groups=streams)
    reach = (weight.shape[-1] - 1) * dilation
    window = normed.new_zeros(reach, normed.shape[-1]) if window is None else window
    local, seen = convolve(normed, weight, dilation, window)
    return gated + silu(local), seen[len(gated) :]


def convolve(normed: Tensor, weight: Tensor, dilation: int, window: Tensor) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel with itself, in fp32 and rounded once.

    Args:
        normed: [T, D].
        weight: [D, W], the newest token last.
        dilation: tokens from one tap to the next.
        window: [(W-1) * dilation, D], what came before, oldest first.

    Returns:
        [T, D]; and [(W-1) * dilation + T, D], the window with these behind it.
    """
    seen = torch.cat([window, normed])
    total = torch.zeros(normed.shape, dtype=torch.float32)
    for place in range(weight.shape[-1]):
        tap = seen[place * dilation : place * dilation + len(normed)]
        total += weight[:, place].float() * tap.float()
    return total.to(normed.dtype), seen


def _split_mix(value: int) -> int:
    value = (value + _GAMMA) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
