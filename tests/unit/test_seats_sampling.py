"""From logits to tokens: the engine's own random numbers, and what a request may ask of its tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quixicore.seats import drafts, sampling

WORD = 0xFFFFFFFF
ONE = torch.zeros(1, dtype=torch.int64)


def murmur(words: list[int], domain: int = 0) -> int:
    """MurmurHash3 of 32-bit words, as it is published, without its length."""

    def turn(value: int, places: int) -> int:
        return ((value << places) | (value >> (32 - places))) & WORD

    value = domain
    for word in words:
        key = turn(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        value = (turn(value ^ key, 13) * 5 + 0xE6546B64) & WORD
    value ^= 16
    value = (value ^ (value >> 16)) * 0x85EBCA6B & WORD
    value = (value ^ (value >> 13)) * 0xC2B2AE35 & WORD
    return value ^ (value >> 16)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 250_000), st.integers(0, WORD))
def test_the_hash_is_that_of_the_engine(seed: int, position: int, token: int, domain: int) -> None:
    words = [seed & WORD, (seed >> 32) & WORD, position & WORD, token]
    found = sampling.hash_words(torch.tensor(seed), torch.tensor(position), torch.tensor(token), domain)
    assert int(found) == murmur(words, domain)


def test_samples_are_distributed_as_the_logits_say() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, -math.inf])
    count = 20_000
    rows = logits.expand(count, -1)
    found = sampling.sample(
        rows, ONE.expand(count), torch.ones(1), torch.tensor([11]), torch.arange(count), False, False
    )
    shares = torch.bincount(found, minlength=5) / count
    assert (shares - logits.softmax(-1)).abs().max() < 5 * 0.5 / math.sqrt(count)
    assert shares[4] == 0


def test_a_seed_and_a_position_say_it_all() -> None:
    logits = torch.randn(1, 50)

    def draw(seed: int, rows: int = 1) -> list[int]:
        wide, seeds = logits.expand(rows, -1), torch.tensor([seed])
        found = sampling.sample(wide, ONE.expand(rows), torch.ones(1), seeds, (ONE + 9).expand(rows), False, False)
        return [int(token) for token in found]

    assert draw(1, 3) == 3 * draw(1)
    assert len({token for seed in range(40) for token in draw(seed)}) > 5


def test_greedy_rows_and_rows_of_nobody_take_the_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 1.0]])
    owners = torch.tensor([0, -1])
    found = sampling.sample(logits, owners, torch.zeros(1), ONE, torch.tensor([4, 4]), True, False)
    assert found.tolist() == [1, 0]


def test_drafts_are_kept_with_what_they_were_drawn_from() -> None:
    logits, cache = torch.randn(2, 4), torch.zeros(3, 2, 4)
    sampling.sample(
        logits,
        torch.tensor([2, 0]),
        torch.ones(3),
        torch.arange(3),
        torch.tensor([5, 6]),
        True,
        True,
        cache,
        torch.tensor(1),
    )
    assert torch.equal(cache[2, 1], logits[0])
    assert torch.equal(cache[0, 1], logits[1])
    assert not cache[:, 0].any()


@pytest.mark.parametrize("certain", [False, True])
def test_verified_drafts_leave_the_distribution_as_it_is(certain: bool) -> None:
    """Leviathan's theorem: whatever the drafter proposes, the first token is distributed as the target says."""
    target = torch.tensor([0.1, 0.6, 0.3]).log()
    guess = torch.tensor([0.5, 0.2, 0.3]).log()
    count = 2_000
    chance = torch.Generator().manual_seed(5)
    proposed = torch.multinomial(guess.exp(), count, replacement=True, generator=chance)
    if certain:
        proposed.fill_(0)
    fed = torch.stack([torch.zeros_like(proposed), proposed], -1).flatten()
    slots = torch.arange(count)
    sampled, counts = drafts.verify(
        target.expand(2 * count, -1),
        None if certain else guess.expand(count, 1, -1),
        fed,
        torch.arange(0, 2 * count + 1, 2),
        torch.arange(2 * count),
        slots,
        slots.repeat_interleave(2),
        torch.arange(2).repeat(count),
        torch.ones(count),
        torch.arange(count) * 7919,
        1,
    )
    shares = torch.bincount(sampled[:, 0], minlength=3) / count
    assert (shares - target.exp()).abs().max() < 5 * 0.5 / math.sqrt(count)
    accepted = (counts == 2).float().mean()
    expected = target.exp()[0] if certain else torch.minimum(target.exp(), guess.exp()).sum()
    assert abs(accepted - expected) < 5 * 0.5 / math.sqrt(count)


def test_greedy_drafts_hold_as_far_as_they_are_the_best() -> None:
    logits = torch.eye(4)[[2, 1, 3]] * 9
    fed = torch.tensor([0, 2, 0])  # the first draft holds, the second does not
    sampled, counts = drafts.verify(
        logits,
        None,
        fed,
        torch.tensor([0, 3]),
        torch.arange(3),
        ONE,
        ONE.expand(3),
        torch.arange(3),
        torch.zeros(1),
        ONE,
        2,
    )
    assert counts.tolist() == [2]
    assert sampled[0, :2].tolist() == [2, 1]


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_draft_that_stands_for_none_never_holds(heat: float) -> None:
    logits = torch.tensor([[0.0, 9.0], [0.0, 9.0]])
    fed = torch.tensor([0, -1])
    _, counts = drafts.verify(
        logits,
        None,
        fed,
        torch.tensor([0, 2]),
        torch.arange(2),
        ONE,
        ONE.expand(2),
        torch.arange(2),
        torch.full((1,), heat),
        ONE,
        1,
    )
    assert counts.tolist() == [1]


def test_a_way_of_verification_that_nobody_chose_is_refused() -> None:
    with pytest.raises(NotImplementedError):
        drafts.verify(*[torch.zeros(1)] * 10, 1, use_block_verification=True)


@given(st.lists(st.integers(0, 63), min_size=1, max_size=30), st.lists(st.integers(0, 63), max_size=10))
def test_penalties_count_prompt_output_and_drafts(prompt: list[int], output: list[int]) -> None:
    tokens = torch.tensor([prompt + output + [0] * 50])
    bits, counts = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 64, dtype=torch.int32)
    lengths = torch.tensor([len(prompt)]), torch.tensor([len(prompt) + len(output)])
    sampling.count_tokens(ONE, tokens, 0, *lengths, bits, 0, counts, 0)
    assert sampling.unpack(bits[0], 64).nonzero().flatten().tolist() == sorted(set(prompt))
    logits = torch.linspace(-2, 2, 64).expand(2, -1).clone()
    before = logits.clone()
    fed, places = torch.tensor([7, 9]), torch.tensor([0, 1])  # the second row comes after draft 9
    three = torch.tensor([1.5]), torch.tensor([0.25]), torch.tensor([0.125])
    sampling.penalise(logits, 64, ONE.expand(2), fed, places, *three, bits, 0, counts, 0, 64)
    for row in range(2):
        said = [*output, *([9] if row else [])]
        for token in range(64):
            value = float(before[row, token])
            if token in prompt or token in said:
                value = value / 1.5 if value > 0 else value * 1.5
            value -= 0.25 * said.count(token) + 0.125 * (token in said)
            assert math.isclose(float(logits[row, token]), value, abs_tol=1e-5)


def test_biases_allow_favour_and_keep_from_ending() -> None:
    logits = torch.arange(12.0).view(2, 6).clone()
    allowed, biased = torch.tensor([[1, 4, 0]]), torch.tensor([[4, 0, 0]])
    sampling.bias(
        logits,
        6,
        6,
        ONE.expand(2),
        torch.tensor([2]),
        allowed,
        3,
        torch.tensor([1]),
        biased,
        3,
        torch.tensor([[10.0, 0, 0]]),
        3,
        torch.tensor([3, 9]),
        torch.tensor([8]),
        torch.tensor([1]),
        torch.tensor([False]),
        torch.tensor([[1]]),
        1,
    )
    assert logits[0].tolist() == [-math.inf, -math.inf, -math.inf, -math.inf, 14.0, -math.inf]
    assert logits[1].tolist() == [-math.inf, 7.0, -math.inf, -math.inf, 20.0, -math.inf]


def test_a_word_that_is_not_wanted_is_not_completed() -> None:
    words, offsets = torch.tensor([[3, 5, 4]]), torch.tensor([[0, 2, 3]])
    tokens = torch.tensor([[9, 9, 3, 0, 0]])
    logits = torch.zeros(2, 10)
    sampling.forbid(
        logits,
        10,
        ONE.expand(2),
        words,
        3,
        offsets,
        3,
        torch.tensor([2]),
        tokens,
        5,
        torch.tensor([2]),
        torch.tensor([3]),
        torch.tensor([3, 8]),
        torch.tensor([0, 1]),
    )
    assert logits[0].isneginf().nonzero().flatten().tolist() == [4, 5]
    assert logits[1].isneginf().nonzero().flatten().tolist() == [4]


def test_a_grammar_masks_its_own_rows() -> None:
    bits = torch.tensor([[0b1010], [0b0001]], dtype=torch.int32)
    logits = torch.zeros(3, 4)
    starts = torch.tensor([0, 2, 3])
    mapping = torch.tensor([1, 3 * 1 + 0])  # the first request's second row, and the second's first
    sampling.masked_by_grammar(logits, 4, mapping, starts, bits, 1, 4, MASK_STRIDE=3)
    assert logits[0].tolist() == [0.0] * 4
    assert logits[1].tolist() == [-math.inf, 0.0, -math.inf, 0.0]
    assert logits[2].tolist() == [0.0, -math.inf, -math.inf, -math.inf]


def test_the_least_probable_go_by_the_most_probable() -> None:
    logits = torch.tensor([[0.0, -1.0, -3.0], [0.0, -1.0, -3.0]])
    sampling.min_p(logits, 3, torch.tensor([0, 1]), torch.tensor([0.1, 0.0]), 3)
    assert logits[0].tolist() == [0.0, -1.0, -math.inf]
    assert logits[1].tolist() == [0.0, -1.0, -3.0]


def test_what_is_told_of_probabilities() -> None:
    logits = torch.randn(2, 6)
    tokens = torch.tensor([[1, 5], [0, 2]])
    assert torch.allclose(sampling.log_probabilities(logits, tokens), logits.log_softmax(-1).gather(1, tokens))
    found = torch.zeros(2, dtype=torch.int64)
    sampling.ranks(found, logits, 6, logits.argmax(-1), 6)
    assert found.tolist() == [1, 1]
    wanted, valid = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.bool)
    best = torch.tensor([[4, 3], [2, 1]])
    sampling.wanted_tokens(
        wanted,
        3,
        valid,
        3,
        torch.tensor([5, 0]),
        best,
        2,
        torch.tensor([0, 1]),
        torch.tensor([0, 1]),
        torch.tensor([[9], [3]]),
        1,
        NUM_TOPK=2,
    )
    assert wanted.tolist() == [[5, 4, 3], [0, 3, 0]]
    assert valid.tolist() == [[True, True, True], [True, True, False]]
