"""Drafts and their verification, in the engine's second model runner.

R requests, each with up to k drafts. A draft is verified where it is fed: the logits of the row before it say whether
it holds.

Source: vllm 0.32, v1/worker/gpu/spec_decode/{rejection_sampler,rejection_sampler_utils}.py and
target_dependent_ar/speculator.py; Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quixicore.seats.batch import rows
from quixicore.seats.sampling import hash_words, sample

_VERIFYING = 0x5DEECE66  # another stream than that of the samples


def first_inputs(
    last_rows: Tensor,
    step: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    starts: Tensor,
    lengths: Tensor,
    target_ids: Tensor,
    target_positions: Tensor,
    slots: Tensor,
    last_sampled: Tensor,
    ahead: Tensor,
    sampled: Tensor,
    rejected: Tensor,
    target_starts: Tensor,
    target_lengths: Tensor,
    most: int,
    **_tuning: Any,
) -> None:
    """The drafter's inputs for its first step: the target's, each token replaced by the one after it.

    Args:
        last_rows: [most] int64, written: where each request's last token lies that counts.
        step: written: 0.
        input_ids, positions, starts, lengths: the drafter's, written.
        target_ids, target_positions, target_starts, target_lengths: the target's.
        slots: [R]; last_sampled: [slots, 1].
        ahead: [..., slots], in its first row the next token of a prompt, for a request that sampled none.
        sampled, rejected: [R].
    """
    count = len(slots)
    for row, slot, first, last in rows(slots, target_starts):
        end = last - int(rejected[row])
        following = last_sampled[slot, 0] if int(sampled[row]) else ahead.view(-1)[slot]
        input_ids[first : end - 1] = target_ids[first + 1 : end]
        input_ids[end - 1] = following
        positions[first:end] = target_positions[first:end]
        last_rows[row] = end - 1
    step.fill_(0)
    starts[: count + 1] = target_starts[: count + 1]
    starts[count + 1 : most + 1] = target_starts[count]
    lengths[:count] = target_lengths[:count]
    lengths[count:most] = 0
    last_rows[count:most] = 0


def next_inputs(
    drafts: Tensor,
    drafts_: int,
    target_lengths: Tensor,
    rejected: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    sources: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    most: int,
    *,
    ADVANCE_DRAFT_POSITIONS: bool,
    **_tuning: Any,
) -> None:
    """The drafter's inputs for its second step: one row a request.

    Args:
        drafts, target_lengths, rejected: [R].
        input_ids, positions, sources, starts, lengths: written; `sources` are positions that noise is drawn for.
        longest: of a sequence; positions do not pass it.
    """
    count = len(drafts)
    starts[: most + 1] = torch.arange(most + 1, dtype=starts.dtype).clamp_max(count)
    lengths[count:most] = 0
    input_ids[:count] = drafts
    sources[:count] += 1
    kept = target_lengths[:count] - rejected
    if ADVANCE_DRAFT_POSITIONS:
        positions[:count] = (positions[:count] + 1).clamp_max(longest - 1)
        kept = (kept + 1).clamp_max(longest)
    lengths[:count] = kept


def after_draft(
    output: Tensor,
    output_: int,
    next_hidden: Tensor,
    next_hidden_: int,
    input_ids: Tensor,
    positions: Tensor,
    sources: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    step: Tensor,
    hidden: Tensor,
    hidden_: int,
    size: int,
    longest: int,
    steps: int,
    *,
    ADVANCE_DRAFT_POSITIONS: bool,
    **_tuning: Any,
) -> None:
    """Keep a draft, and make it the input of the next step, if there is one.

    Args:
        output: [R, k], written at the step's column; drafts: [R].
        next_hidden: [T, size], written; hidden: [R, size].
        input_ids, positions, sources, lengths: as for `next_inputs`.
    """
    count, number = len(drafts), int(step)
    output[:count, number] = drafts
    if number >= steps - 1:
        return
    sources[:count] += 1
    input_ids[:count] = drafts
    next_hidden[:count, :size] = hidden[:count]
    if ADVANCE_DRAFT_POSITIONS:
        positions[:count] = (positions[:count] + 1).clamp_max(longest - 1)
        lengths[:count] = (lengths[:count] + 1).clamp_max(longest)


def fed_drafts(
    drafts: Tensor,
    fed_positions: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    logit_rows: Tensor,
    owners: Tensor,
    places: Tensor,
    prefill_lengths: Tensor,
    count_: int,
    **_tuning: Any,
) -> None:
    """The token and the position of each row of logits; -1 for a draft that stands for none.

    Args:
        drafts, fed_positions: [N], written.
        input_ids, positions: [T]; logit_rows, owners, places: [N]; prefill_lengths: [slots].
    """
    fed_positions.copy_(positions[logit_rows])
    nothing = (places > 0) & (fed_positions - places < prefill_lengths[owners.long()])
    drafts.copy_(input_ids[logit_rows].masked_fill(nothing, -1))


def flatten(flat: Tensor, sampled: Tensor, sampled_: int, counts: Tensor, starts: Tensor, **_tuning: Any) -> None:
    """What each request sampled, at its rows of logits: [N] written, [R, k+1], [R], [R+1]."""
    for row, (first, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=False)):
        flat[first : first + count] = sampled[row, :count]


def verify(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    idx_mapping: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temperature: Tensor,
    seed: Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    contexts: Tensor | None = None,
    watermarking: Tensor | None = None,
    watermarking_skip_mask: Tensor | None = None,
    watermark_key: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Keep the drafts that hold, and one token more: what is sampled is distributed as without drafts.

    Args:
        target_logits: [N, V], of the target, after temperature and all else.
        draft_logits: [slots, k, V], before temperature; None: each draft was certain.
        draft_sampled: [N], the token fed at each row; a request's first is no draft. -1 holds never.
        cu_num_logits: [R+1]; pos, expanded_idx_mapping, expanded_local_pos: [N]; idx_mapping: [R].
        temperature, seed: [slots].
        num_speculative_steps: k.

    Returns:
        [R, k+1] tokens, and [R] int32, how many of them count.

    Raises:
        NotImplementedError: a way of verification that profiles do not choose.
    """
    if use_block_verification or use_fp64 or contexts is not None or synthetic_conditional_rates is not None:
        raise NotImplementedError("the reference verifies token by token, in fp32, without watermarks")
    sampled = draft_sampled.new_zeros(len(idx_mapping), num_speculative_steps + 1)
    counts = torch.zeros(len(idx_mapping), dtype=torch.int32)
    for row, slot, first, last in rows(idx_mapping, cu_num_logits):
        heat = float(temperature[slot])
        kept, left = 0, None
        for number, index in enumerate(range(first, last - 1)):
            draft = int(draft_sampled[index + 1])
            if heat == 0:
                best = int(target_logits[index].argmax())
                if best != draft:
                    left = torch.tensor(best)
                    break
            else:
                target = target_logits[index].float().softmax(-1)
                guess = None if draft_logits is None else (draft_logits[slot, number].float() / heat).softmax(-1)
                guess = None if guess is None else guess[: len(target)]
                chance = (hash_words(seed[slot], pos[index], torch.tensor(0), _VERIFYING).double() + 0.5) * 2.0**-32
                proposed = 1.0 if guess is None else float(guess[draft])
                if draft < 0 or float(target[draft]) <= float(chance) * proposed:
                    left = _resampled(target_logits[index], target, guess, draft, pos[index], temperature, seed, slot)
                    break
            sampled[row, number] = draft
            kept += 1
        if left is None:
            end = slice(last - 1, last)
            left = sample(target_logits[end], expanded_idx_mapping[end], temperature, seed, pos[end], False, False)[0]
        sampled[row, kept] = left
        counts[row] = kept + 1
    return sampled, counts


def _resampled(
    logits: Tensor,
    target: Tensor,
    guess: Tensor | None,
    draft: int,
    position: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    slot: int,
) -> Tensor:
    """A token of what the target says beyond the drafter."""
    if draft < 0:
        rest = logits.float()
    elif guess is None:
        rest = logits.float().clone()
        rest[draft] = -torch.inf
    else:
        over = target[: len(guess)] - guess
        rest = torch.where(over > 0, over.log(), -torch.inf)
    owner = torch.tensor([slot])
    return sample(rest[None], owner, temperatures, seeds, position[None], False, False)[0]
