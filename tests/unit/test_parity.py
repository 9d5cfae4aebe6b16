"""The comparison with a definition notices what is wrong, and lets rounding pass."""

from __future__ import annotations

import numpy
import pytest

from harness.parity import checkpoint, comparison

RNG = numpy.random.default_rng(7)
TRUTH = [RNG.normal(size=(80, 64)) * 3]
NOISE = [RNG.normal(size=(80, 64)) * 0.02]
FLOOR = comparison._spread(NOISE[0])


def line_of(said: numpy.ndarray) -> comparison.Line:
    return comparison._against("small", "prompts, definition", [said], TRUTH, NOISE)


def test_as_much_rounding_as_the_definition_s_own_passes() -> None:
    line = line_of(TRUTH[0] + RNG.permutation(NOISE[0]))
    assert (line.fault, line.tokens) == ("", 80)
    assert line.found == pytest.approx(line.noise)


def test_more_of_it_does_not() -> None:
    assert "further apart" in line_of(TRUTH[0] + 1.4 * NOISE[0]).fault


def test_another_first_choice_is_noticed_however_near_the_rest_is() -> None:
    said = TRUTH[0] + NOISE[0]
    row = int(numpy.ptp(numpy.sort(TRUTH[0], -1)[:, -2:], axis=-1).argmax())
    best = said[row].argmax()
    said[row, best] -= 50
    assert "another first choice at 1 positions" in line_of(said).fault


def test_a_near_tie_is_no_other_choice() -> None:
    truth = TRUTH[0].copy()
    order = truth[0].argsort()
    truth[0, order[-2]] = truth[0, order[-1]] - FLOOR[2] / 4
    said = truth.copy()
    said[0, order[-2]] += FLOOR[2] / 2
    assert comparison._against("small", "x", [said], [truth], NOISE).fault == ""


def test_circumstances_are_held_to_less_than_the_noise() -> None:
    assert comparison._between("small", "x", [0.3 * NOISE[0]], FLOOR).fault == ""
    assert "apart by more" in comparison._between("small", "x", [0.7 * NOISE[0]], FLOOR).fault
    assert comparison._between("small", "x", [0 * NOISE[0]], FLOOR, "nothing was found").fault == "nothing was found"


def under(name: str, other: numpy.ndarray, tokens: list[int], preempted: int = 1) -> str:
    plain = {f"2-{n}": TRUTH[0][:3] for n in range(len(comparison._LENGTHS))}
    plain |= {f"2-{n}-tokens": numpy.array([5, 6, 7]) for n in range(len(comparison._LENGTHS))}
    plain |= {f"3-{n}": TRUTH[0] for n in range(len(comparison._LENGTHS))}
    found = {**plain, "preempted": numpy.array(preempted)}
    found |= {key.replace("2-", "1-", 1): value for key, value in plain.items() if key.startswith("2-")}
    found |= {f"2-{n}": TRUTH[0] for n in range(len(comparison._LENGTHS))}
    found |= {"1-0": other, "1-0-tokens": numpy.array(tokens)}
    return next(comparison._under("small", name, found, plain, FLOOR)).fault


def test_texts_may_part_at_a_near_tie_alone() -> None:
    same = TRUTH[0][:3]
    assert under("chunked", same, [5, 6, 7]) == ""
    assert "another token after 1" in under("chunked", same, [5, 9, 9])
    assert under("preempted", same, [5, 6, 7], preempted=0) == "no request had to make room"


def test_prompts_are_the_same_each_time_and_hold_ends_of_text() -> None:
    first, again = comparison._prompts(), comparison._prompts()
    assert first == again
    assert [len(tokens) for tokens in first] == list(comparison._LENGTHS)
    assert any(checkpoint.END in tokens for tokens in first)
    assert all(0 < token < checkpoint.VOCAB for tokens in first for token in tokens)
