"""Quantiles, intervals and spreads, against values that are known."""

from __future__ import annotations

import random
import statistics

import pytest

from harness import stats


def test_quantiles_lie_between_neighbours_and_of_nothing_there_are_none() -> None:
    assert [stats.quantile([1, 2, 3, 4, 5], share) for share in (0, 0.5, 0.8, 1)] == [1, 3, pytest.approx(4.2), 5]
    assert stats.median([4, 1]) == 2.5
    with pytest.raises(ValueError, match="of nothing"):
        stats.quantile([], 0.5)


def test_the_spread_of_one_thing_is_not_known() -> None:
    assert stats.spread([10.0]) is None
    assert stats.spread([0.0, 0.0]) is None
    assert stats.spread([9.0, 10.0, 11.0]) == pytest.approx(0.2)


def test_a_paired_ratio_is_that_of_the_pairs_whatever_mood_each_pair_was_in() -> None:
    moods = [1, 10, 100, 3, 30, 300]
    found = stats.paired_ratio([1.1 * mood for mood in moods], moods)
    assert found.estimate == pytest.approx(1.1)
    assert found.low == pytest.approx(1.1)
    assert found.high == pytest.approx(1.1)
    with pytest.raises(ValueError, match="make no pairs"):
        stats.paired_ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="make no pairs"):
        stats.paired_ratio([], [])


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    luck = random.Random(7)
    held = 0
    for _ in range(200):
        ones, others = ([luck.gauss(mean, 1) for _ in range(60)] for mean in (10, 8))
        held += stats.difference_of_medians(ones, others, draws=500).contains(2.0)
    assert 180 <= held <= 200


def test_the_same_samples_give_the_same_interval() -> None:
    values = [float(value) for value in range(1, 30)]
    assert stats.paired_ratio(values, values[::-1]) == stats.paired_ratio(values, values[::-1])


def test_a_rate_has_an_interval_at_both_ends_too() -> None:
    assert stats.share(0, 20).low == 0.0
    assert 0.1 < stats.share(0, 20).high < 0.2
    assert stats.share(20, 20).high == 1.0
    assert stats.share(5, 10).estimate == 0.5
    with pytest.raises(ValueError, match="is no rate"):
        stats.share(1, 0)


@pytest.mark.parametrize(("freedom", "t"), [(4, 2.776), (8, 2.306), (20, 2.086)])
def test_few_rounds_widen_an_interval_as_students_t_does(freedom: int, t: float) -> None:
    normal = statistics.NormalDist().inv_cdf(0.975)
    assert stats.widening(freedom, 0.95) == pytest.approx(t / normal, rel=0.01)
    with pytest.raises(ValueError, match="of one round"):
        stats.widening(0, 0.95)


def test_rates_of_the_appliances_benchmarks() -> None:
    assert stats.rate_ratio([], []) == {}
    assert stats.rate_ratio([2.0, 2.0], [1.0, 1.0]) == {
        "rate_ratio_served_to_bare": 2.0,
        "rate_ratio_95": [2.0, 2.0],
        "mean_rate_ratio": 2.0,
        "mean_rate_ratio_95": [2.0, 2.0],
    }


def test_the_mean_of_ratios_is_that_of_their_logarithms() -> None:
    found = stats.paired_mean_ratio([1.0, 4.0, 2.0, 2.0] * 50, [2.0, 2.0, 1.0, 4.0] * 50)
    assert found.estimate == pytest.approx(1.0)
    assert found.contains(1.0)
    assert 0.05 < found.half_width < 0.15
    for ones, others in (([], []), ([1.0], [])):
        with pytest.raises(ValueError, match="make no pairs"):
            stats.paired_mean_ratio(ones, others)
