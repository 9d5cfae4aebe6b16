"""Inputs of a step in the engine's second model runner: what each request feeds, and what a step leaves behind.

The engine's kernels of these names work on one request a program; here a loop does. R requests are in the batch;
`slots` says which row of the requests' state each has. A parameter that ends in `_` is a stride or a size that a
kernel needs and a tensor knows.

Source: vllm 0.32, v1/worker/gpu/input_batch.py, v1/worker/gpu/sample/prompt_logprob.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def rows(slots: Tensor, starts: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Each request of a batch: its row, its slot, and where its tokens begin and end."""
    bounds = starts[: len(slots) + 1].tolist()
    for row, slot in enumerate(slots.tolist()):
        yield row, slot, bounds[row], bounds[row + 1]


def prefill_inputs(
    input_ids: Tensor,
    ahead: Tensor,
    ahead_: int,
    most: int,
    slots: Tensor,
    starts: Tensor,
    tokens: Tensor,
    tokens_: int,
    prefill_lengths: Tensor,
    computed: Tensor,
    **_tuning: Any,
) -> None:
    """Take each prefilling request's next tokens, and note those that follow.

    Args:
        input_ids: [T] int32, written.
        ahead: [most, slots] int32, written: the tokens right after, 0 beyond the prefill.
        slots: [R]; starts: [R+1].
        tokens: [slots, length] int32, of every request.
        prefill_lengths, computed: [slots].
    """
    for _, slot, first, last in rows(slots, starts):
        done, whole = int(computed[slot]), int(prefill_lengths[slot])
        if done >= whole:
            continue
        reached = done + last - first
        input_ids[first:last] = tokens[slot, done:reached]
        following = tokens[slot, reached : min(reached + most, whole)]
        ahead[:most, slot] = 0
        ahead[: len(following), slot] = following


def positions(
    places: Tensor, lengths: Tensor, slots: Tensor, starts: Tensor, computed: Tensor, most: int, **_tuning: Any
) -> None:
    """Number each token, and say how long each sequence is after the step.

    Args:
        places: [T] int64, written.
        lengths: [most] int32, written; 0 where there is no request.
        slots: [R]; starts: [R+1]; computed: [slots].
    """
    for row, slot, first, last in rows(slots, starts):
        done = int(computed[slot])
        lengths[row] = done + last - first
        torch.arange(done, done + last - first, out=places[first:last])
    lengths[len(slots) : most] = 0


def sampled_and_drafts(
    input_ids: Tensor,
    slots: Tensor,
    last_sampled: Tensor,
    starts: Tensor,
    lengths: Tensor,
    prefill_lengths: Tensor,
    drafts: Tensor,
    drafts_: int,
    logit_starts: Tensor,
    logit_rows: Tensor,
    *,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
    **_tuning: Any,
) -> None:
    """Feed each decoding request its last token and its drafts, and say which rows give logits.

    Args:
        input_ids: [T] int32, written where tokens are not the prompt's.
        last_sampled: [slots, 1]; drafts: [slots, k]; lengths: [R]; prefill_lengths: [slots].
        logit_starts: [R+1]; logit_rows: [logits] int64, written.
        NUM_NEW_SAMPLED_TOKENS: tokens of each request beside its drafts, 0 or 1.
    """
    for row, slot, _, last in rows(slots, starts):
        begin, end = int(logit_starts[row]), int(logit_starts[row + 1])
        count = end - begin
        logit_rows[begin:end] = torch.arange(last - count, last)
        length, prefill = int(lengths[row]), int(prefill_lengths[slot])
        if length <= prefill:
            continue
        if NUM_NEW_SAMPLED_TOKENS and length - count >= prefill:
            input_ids[last - count] = last_sampled[slot, 0]
        drafted = count - NUM_NEW_SAMPLED_TOKENS
        if drafted > 0:
            input_ids[last - drafted : last] = drafts[slot, :drafted]


def sampled_and_rejected(
    sampled: Tensor, rejected: Tensor, lengths: Tensor, logit_starts: Tensor, slots: Tensor, prefill_lengths: Tensor
) -> None:
    """How many tokens each request gained, and how many of its drafts did not hold; none while it prefills.

    Args:
        sampled: [R] int32, corrected in place; rejected: [R], written.
    """
    count = len(slots)
    prefilling = lengths[:count] < prefill_lengths[slots]
    sampled.masked_fill_(prefilling, 0)
    rejected.copy_((logit_starts[1 : count + 1] - logit_starts[:count] - sampled).masked_fill(prefilling, 0))


def after_step(
    slots: Tensor,
    computed: Tensor,
    last_sampled: Tensor,
    counts: Tensor | None,
    counts_: int,
    sampled: Tensor,
    sampled_: int,
    num_sampled: Tensor,
    num_rejected: Tensor,
    starts: Tensor | None,
    tokens: Tensor,
    tokens_: int,
    totals: Tensor,
    **_tuning: Any,
) -> None:
    """Write what was sampled into the requests' state.

    Args:
        slots: [R]; below 0, a request that is passed over.
        computed, totals: [slots]; last_sampled: [slots, 1]; tokens: [slots, length]; all written.
        counts: [slots, V], of output tokens, written; None: nobody asked for penalties.
        sampled: [R, k+1]; num_sampled, num_rejected: [R].
        starts: [R+1]; None: no tokens were computed.
    """
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        gained, total = int(num_sampled[row]), int(totals[slot])
        if gained:
            new = sampled[row, :gained]
            last_sampled[slot, 0] = new[-1]
            tokens[slot, total : total + gained] = new
            totals[slot] = total + gained
            if counts is not None:
                counts[slot].index_add_(0, new.long(), counts.new_ones(gained))
        fed = int(starts[row + 1] - starts[row]) if starts is not None else 0
        computed[slot] += fed - int(num_rejected[row])


def advance(slots: Tensor, computed: Tensor, starts: Tensor) -> None:
    """Count a step's tokens as computed: [R], [slots] written, [R+1]."""
    for _, slot, first, last in rows(slots, starts):
        computed[slot] += last - first


def expand(slots: Tensor, expanded: Tensor, places: Tensor, logit_starts: Tensor, **_tuning: Any) -> None:
    """Each row of logits: the slot of its request, and its place in it.

    Args:
        slots: [R]; logit_starts: [R+1].
        expanded: [logits], written; places: [logits] int32, written.
    """
    for _, slot, first, last in rows(slots, logit_starts):
        expanded[first:last] = slot
        torch.arange(last - first, out=places[first:last])


def prompt_targets(
    targets: Tensor, starts: Tensor, slots: Tensor, computed: Tensor, tokens: Tensor, tokens_: int, **_tuning: Any
) -> None:
    """The token that follows each of a prompt's, whose probability is asked for: [T] int64, written."""
    for _, slot, first, last in rows(slots, starts):
        done = int(computed[slot]) + 1
        following = tokens[slot, done : done + last - first]
        targets[first : first + len(following)] = following


def requests_of_tokens(starts: Tensor, owners: Tensor, count: int, mapped: int, total: int, **_tuning: Any) -> None:
    """The request that each token belongs to: [R+1] to [T] int32 written; 0 for tokens that belong to none."""
    places = torch.arange(total, dtype=starts.dtype)
    found = torch.searchsorted(starts[1 : count + 1].contiguous(), places, right=True).clamp_max(count - 1)
    owners[:total] = torch.where(places < mapped, found, 0)
