"""The comparison with other load clients: what is compared, and what counts as agreement."""

from __future__ import annotations

import random

import pytest
from harness_support import ModelServer

from harness.agreement import by_ours, compared, numbers, prompts_of, verdict
from harness.stats import Interval


def test_numbers_of_a_run() -> None:
    assert numbers([0.1, 0.2, 0.4], [0.01, 0.01, 0.04], tokens=300, seconds=2.0) == {
        "ttft_ms": 200.0,
        "itl_ms": 10.0,
        "itl_mean_ms": pytest.approx(20.0),
        "tokens_a_second": 150.0,
    }


def test_ten_percent_is_no_agreement_and_noise_around_nothing_is() -> None:
    rng = random.Random(3)
    ours = [numbers([rng.uniform(0.99, 1.01)], [rng.uniform(0.99, 1.01)], 100, 1.0) for _ in range(12)]
    theirs = [numbers([one["ttft_ms"] / 900], [rng.uniform(0.99, 1.01)], 100, 1.0) for one in ours]
    found = compared(ours, theirs)
    assert {name: one["verdict"] for name, one in found.items()} == {
        "ttft_ms": "differ",
        "itl_ms": "agree",
        "itl_mean_ms": "agree",
        "tokens_a_second": "agree",
    }
    assert found["ttft_ms"]["ratio"] == pytest.approx(0.9)


def test_an_interval_that_would_hold_a_tenth_proves_nothing() -> None:
    assert verdict(Interval(1.0, 0.97, 1.03)) == "agree"
    assert verdict(Interval(0.99, 0.9, 1.01)) == verdict(Interval(1.0, 0.99, 1.06)) == "inconclusive"
    assert verdict(Interval(0.9, 0.85, 0.95)) == "differ"


def test_what_only_one_side_tells_is_not_compared_and_one_pair_is_nothing() -> None:
    ours = [numbers([1.0], [1.0], 100, 1.0)] * 3
    theirs = [{"ttft_ms": 1000.0, "tokens_a_second": 100.0}] * 2
    assert compared(ours, theirs).keys() == {"ttft_ms", "tokens_a_second"}
    assert compared(ours, theirs[:1]) == {}


def test_our_side_of_a_round() -> None:
    with ModelServer(interval=0.001) as server:
        found = by_ours(server.url, "fake", prompts_of(random.Random(), 6), 3, 10, 0)
        state = server.state
    assert found.keys() == {"ttft_ms", "itl_ms", "itl_mean_ms", "tokens_a_second"}
    assert (state["requests"], state["most"], state["prompt_tokens"]) == (6, 3, 6 * 64)
