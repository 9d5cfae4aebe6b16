"""From logits to tokens, in the engine's second model runner.

N rows of logits over V tokens; `owners` says which slot of the requests' state a row belongs to. The random numbers
are the engine's own, a hash of a request's seed, a position and a token: a seeded answer is the same here and there,
as far as the logits are.

Source: vllm 0.32, v1/worker/gpu/sample/{gumbel,min_p,penalties,logit_bias,bad_words,logprob}.py, structured_outputs.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_DRAFT_SALT = 1 << 30  # a draft's noise and its verification's are not the same
_SERIES = 8  # terms of a logarithm near one; the engine has as many


def temperature(
    logits: Tensor, _stride: int, owners: Tensor, temperatures: Tensor, vocab_: int, **_tuning: Any
) -> None:
    """Divide each row by its temperature, in place; 0 is greedy, and divides nothing."""
    divisors = temperatures[owners.long()].float()
    logits.div_(torch.where(divisors == 0, 1, divisors)[:, None])


def min_p(logits: Tensor, _stride: int, owners: Tensor, shares: Tensor, vocab_: int, **_tuning: Any) -> None:
    """Take away what is less probable than a share of the most probable, in place."""
    least = shares[owners.long()].float()
    bound = logits.max(-1).values + least.log()
    logits.masked_fill_((logits < bound[:, None]) & (least > 0)[:, None], -torch.inf)


def hash_words(seeds: Tensor, positions: Tensor, tokens: Tensor, domain: int = 0) -> Tensor:
    """MurmurHash3 of five words: both halves of a seed, a position, a token, and their length.

    Args:
        seeds, positions, tokens: int64 that broadcast; of positions and tokens the lower 32 bits count.
        domain: where the hash begins; another gives other numbers.

    Returns:
        int64 from 0 up to 2^32.
    """
    value = torch.tensor(domain)
    for key in (seeds & _WORD, (seeds >> 32) & _WORD, positions & _WORD, tokens):
        key = _times(key, 0xCC9E2D51)
        key = _times(_turn(key, 15), 0x1B873593)
        value = (_turn(value ^ key, 13) * 5 + 0xE6546B64) & _WORD
    value = value ^ 16
    value = _times(value ^ (value >> 16), 0x85EBCA6B)
    value = _times(value ^ (value >> 13), 0xC2B2AE35)
    return value ^ (value >> 16)


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Noise with which the largest of noisy logits is a sample of their softmax.

    Args:
        seeds, positions, tokens: as for `hash_words`.

    Returns:
        fp32.
    """
    words = hash_words(seeds, positions, tokens)
    uniform = (words >> 16).float() * 2.0**-16 + ((words & 0xFFFF).float() + 0.5) * 2.0**-32
    # log(1 - u): the winning tail is where u is small, and there a series keeps what a subtraction would lose.
    series = torch.zeros_like(uniform)
    for power in range(_SERIES, 0, -1):
        series = 1 / power + uniform * series
    direct = (1 - uniform).clamp_min(2.0**-24).log()
    return -(-torch.where(uniform < 0.25, -uniform * series, direct)).log()


def sample(
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    temperature: Tensor,
    seed: Tensor,
    pos: Tensor,
    apply_temperature: bool,
    is_drafting: bool,
    logits_cache: Tensor | None = None,
    logits_cache_col: Tensor | None = None,
    use_fp64: bool = False,
    logits_cache_source: Tensor | None = None,
) -> Tensor:
    """A token of each row: the most probable at temperature 0, else one that chance chooses.

    Args:
        logits: [N, V].
        expanded_idx_mapping: [N]; below 0, a row of nobody.
        temperature, seed: [slots].
        pos: [N] int64.
        apply_temperature: divide first.
        is_drafting: noise of drafts.
        logits_cache: [slots, k, V], written: what the drafts were drawn from, before their temperature.
        logits_cache_col: the column of it, one for all or [N].
        logits_cache_source: [N, V]; None: `logits`.

    Returns:
        [N] int64.

    Raises:
        NotImplementedError: noise in fp64.
    """
    if use_fp64:
        raise NotImplementedError("the reference draws its noise in fp32")
    there, slots = expanded_idx_mapping >= 0, expanded_idx_mapping.long().clamp_min(0)
    if logits_cache is not None and logits_cache_col is not None:
        source = logits if logits_cache_source is None else logits_cache_source
        columns = logits_cache_col.expand(len(slots))
        logits_cache[slots[there], columns[there], : source.shape[-1]] = source[there]
    heat = torch.where(there, temperature[slots].float(), 0)
    scaled = logits.float()
    if apply_temperature:
        scaled = scaled / torch.where(heat == 0, 1, heat)[:, None]
    chosen = scaled.argmax(-1)
    drawn = heat != 0
    if drawn.any():
        places = pos[drawn] + (_DRAFT_SALT if is_drafting else 0)
        noise = gumbel(seed[slots[drawn]][:, None], places[:, None], torch.arange(logits.shape[-1]))
        chosen[drawn] = (scaled[drawn] + noise).argmax(-1)
    return chosen


def penalise(
    logits: Tensor,
    _stride: int,
    owners: Tensor,
    input_ids: Tensor,
    places: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    prompt_bits: Tensor,
    prompt_bits_: int,
    counts: Tensor,
    counts_: int,
    vocab: int,
    **_tuning: Any,
) -> None:
    """Make tokens that were there less probable, or more, in place.

    Args:
        logits: [N, V] fp32.
        owners: [N].
        input_ids, places: [N]: the token fed at each row, and the row's place among its request's: those before it
            in the step are drafts, and count as said.
        repetition, frequency, presence: [slots].
        prompt_bits: [slots, V / 32] int32, which tokens the prompt has.
        counts: [slots, V] int32, of output tokens.
    """
    for row, (slot, place) in enumerate(zip(owners.tolist(), places.tolist(), strict=True)):
        repeated, often, present = float(repetition[slot]), float(frequency[slot]), float(presence[slot])
        if repeated == 1 and often == 0 and present == 0:
            continue
        said = counts[slot, :vocab].clone()
        for draft in input_ids[row - place + 1 : row + 1].tolist():
            if 0 <= draft < vocab:
                said[draft] += 1
        own = logits[row]
        if repeated != 1:
            known = unpack(prompt_bits[slot], vocab) | (said > 0)
            own.copy_(torch.where(known, torch.where(own > 0, own / repeated, own * repeated), own))
        own.sub_(often * said + present * (said > 0))


def unpack(words: Tensor, count: int) -> Tensor:
    """[..., count] bool of int32 words, the lowest bit first."""
    bits = (words[..., None] >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.flatten(-2)[..., :count].bool()


def count_tokens(
    slots: Tensor,
    tokens: Tensor,
    tokens_: int,
    prompt_lengths: Tensor,
    prefill_lengths: Tensor,
    prompt_bits: Tensor,
    prompt_bits_: int,
    counts: Tensor,
    counts_: int,
    **_tuning: Any,
) -> None:
    """Which tokens a prompt has, and how often an answer that began earlier has each: both zero before."""
    for slot in slots.tolist():
        prompt, whole = int(prompt_lengths[slot]), int(prefill_lengths[slot])
        known = torch.zeros(prompt_bits.shape[1] * 32, dtype=torch.int64)
        known[tokens[slot, :prompt].long()] = 1
        words = (known.view(-1, 32) << torch.arange(32)).sum(-1)
        prompt_bits[slot] = torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).to(torch.int32)
        output = tokens[slot, prompt:whole].long()
        counts[slot].index_add_(0, output, counts.new_ones(len(output)))


def bias(
    logits: Tensor,
    _stride: int,
    vocab: int,
    owners: Tensor,
    num_allowed: Tensor,
    allowed: Tensor,
    allowed_: int,
    num_biased: Tensor,
    biased: Tensor,
    biased_: int,
    biases: Tensor,
    biases_: int,
    positions: Tensor,
    least: Tensor,
    num_stops: Tensor,
    restores: Tensor,
    stops: Tensor,
    stops_: int,
    *,
    CHECK_ALL_MASKED_ROWS: bool = False,
    **_tuning: Any,
) -> None:
    """Allow some tokens alone, favour some, and let no row end too early, in place.

    Args:
        logits: [N, V] fp32.
        owners, positions: [N].
        num_allowed, num_biased, num_stops, least, restores: [slots].
        allowed, biased, biases, stops: [slots, most].
    """
    for row, (slot, position) in enumerate(zip(owners.tolist(), positions.tolist(), strict=True)):
        own = logits[row]
        if count := int(num_allowed[slot]):
            kept = allowed[slot, :count].long()
            values = own[kept].clone()
            own.fill_(-torch.inf)
            own[kept] = values
        if count := int(num_biased[slot]):
            own[biased[slot, :count].long()] += biases[slot, :count]
        if (count := int(num_stops[slot])) and position + 1 < int(least[slot]):
            ends = stops[slot, :count].long()
            values = own[ends].clone()
            own[ends] = -torch.inf
            if CHECK_ALL_MASKED_ROWS and restores[slot] and own.max() == -torch.inf:
                own[ends] = torch.where(values.isfinite(), values, -torch.inf)


def forbid(
    logits: Tensor,
    _stride: int,
    owners: Tensor,
    words: Tensor,
    words_: int,
    offsets: Tensor,
    offsets_: int,
    num_words: Tensor,
    tokens: Tensor,
    tokens_: int,
    prompt_lengths: Tensor,
    totals: Tensor,
    input_ids: Tensor,
    places: Tensor,
    **_tuning: Any,
) -> None:
    """Keep each row from completing a word that is not wanted, in place.

    Args:
        logits: [N, V] fp32; owners, input_ids, places: [N], as for `penalise`.
        words, offsets: [slots, most]: tokens of the words, and where each begins.
        num_words, prompt_lengths, totals: [slots]; tokens: [slots, length].
    """
    for row, (slot, place) in enumerate(zip(owners.tolist(), places.tolist(), strict=True)):
        if not (count := int(num_words[slot])):
            continue
        said = tokens[slot, int(prompt_lengths[slot]) : int(totals[slot])].tolist()
        said += input_ids[row - place + 1 : row + 1].tolist()
        bounds = offsets[slot, : count + 1].tolist()
        for first, last in itertools.pairwise(bounds):
            *before, end = words[slot, first:last].tolist()
            if len(before) <= len(said) and said[len(said) - len(before) :] == before:
                logits[row, end] = -torch.inf


def masked_by_grammar(
    logits: Tensor,
    _stride: int,
    mapping: Tensor,
    logit_starts: Tensor,
    bits: Tensor,
    bits_: int,
    vocab: int,
    *,
    MASK_STRIDE: int,
    **_tuning: Any,
) -> None:
    """Take away what a grammar does not allow, in place.

    Args:
        logits: [N, V].
        mapping: [masks]: a request times MASK_STRIDE plus a place in it.
        logit_starts: [R+1].
        bits: [masks, V / 32] int32, 1 where a token is allowed.
    """
    for number, place in enumerate(mapping[: len(bits)].tolist()):
        request, within = divmod(place, MASK_STRIDE)
        row = int(logit_starts[request]) + within
        if row < int(logit_starts[request + 1]):
            logits[row, :vocab].masked_fill_(~unpack(bits[number], vocab), -torch.inf)


def log_probabilities(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities of some token_ids: [N, V] and [N, n] to [N, n] fp32."""
    wide = logits.float()
    return wide.gather(-1, token_ids.long()) - wide.logsumexp(-1, keepdim=True)


def ranks(found: Tensor, logits: Tensor, _stride: int, tokens: Tensor, vocab_: int, **_tuning: Any) -> None:
    """How many tokens of each row are at least as probable as one: [N] int64 written, [N, V], [N]."""
    own = logits.gather(-1, tokens.long()[:, None])
    found.copy_((logits >= own).sum(-1))


def wanted_tokens(
    found: Tensor,
    found_: int,
    valid: Tensor,
    valid_: int,
    sampled: Tensor,
    best: Tensor,
    best_: int,
    owners: Tensor,
    num_wanted: Tensor,
    wanted: Tensor,
    wanted_: int,
    *,
    NUM_TOPK: int,
    **_tuning: Any,
) -> None:
    """The tokens of each row whose probability is told: the sampled one, then those asked for, or the best.

    Args:
        found: [N, 1 + n] int64, written; valid: [N, 1 + n] bool, written.
        sampled: [N]; best: [N, NUM_TOPK]; owners: [N].
        num_wanted: [slots]; wanted: [slots, most].
    """
    found[:, 0], valid[:, 0] = sampled, True
    for row, slot in enumerate(owners.tolist()):
        count = int(num_wanted[slot])
        row_tokens = wanted[slot, :count] if count else best[row, :NUM_TOPK]
        found[row, 1 : 1 + len(row_tokens)] = row_tokens
        valid[row, 1 : 1 + len(row_tokens)] = True


def not_numbers(logits: Tensor, _stride: int, found: Tensor, vocab_: int, **_tuning: Any) -> None:
    """How many logits of each row are none: [N, V], [N] int32 written."""
    found.copy_(logits.isnan().sum(-1))


def _times(value: Tensor, factor: int) -> Tensor:
    # 32 bits times 32 bits may leave 63: the upper half of the factor is multiplied apart, where only 16 bits count.
    low, high = factor & 0xFFFF, factor >> 16
    return (value * low + (((value * high) & 0xFFFF) << 16)) & _WORD


def _turn(value: Tensor, places: int) -> Tensor:
    return ((value << places) | (value >> (32 - places))) & _WORD
