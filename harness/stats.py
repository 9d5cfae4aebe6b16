"""Quantiles, bootstrap intervals, noise: all the statistics that receipts and comparisons rest on.

Intervals are percentile bootstraps with a seeded generator: the same samples give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAWS = 10_000
CONFIDENCE = 0.95

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate with the interval in which it lies; all three in the unit of what was estimated."""

    estimate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """The longer of the two sides."""
        return max(self.high - self.estimate, self.estimate - self.low)

    def contains(self, value: float) -> bool:
        """Whether `value` lies inside, ends included."""
        return self.low <= value <= self.high


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, linear between neighbours.

    Raises:
        ValueError: there are no values.
    """
    if not len(values):
        raise ValueError("of nothing there is no quantile")
    return float(np.quantile(np.asarray(values, dtype=np.float64), share))


def median(values: Sequence[float]) -> float:
    """The middle of `values`.

    Raises:
        ValueError: there are no values.
    """
    return quantile(values, 0.5)


def spread(medians: Sequence[float]) -> float | None:
    """How far repetitions of one thing lie apart: largest minus smallest, as a share of the median.

    None for fewer than two, or when the median is nothing that others could be a share of.
    """
    if len(medians) < 2 or median(medians) <= 0:
        return None
    return (max(medians) - min(medians)) / median(medians)


def paired_ratio(
    ones: Sequence[float], others: Sequence[float], *, draws: int = DRAWS, confidence: float = CONFIDENCE
) -> Interval:
    """The median of `ones[i] / others[i]`, and the interval of that median.

    Raises:
        ValueError: there are no pairs, or not as many on both sides.
    """
    ratios = _ratios(ones, others)
    return interval(float(np.median(ratios)), np.median(_drawn(ratios, draws), axis=1), confidence)


def paired_mean_ratio(
    ones: Sequence[float], others: Sequence[float], *, draws: int = DRAWS, confidence: float = CONFIDENCE
) -> Interval:
    """The geometric mean of `ones[i] / others[i]`, and its interval, which is narrower than the median's when no pair
    lies far from the others.

    Raises:
        ValueError: there are no pairs, or not as many on both sides.
    """
    logs = np.log(_ratios(ones, others))
    return interval(float(np.exp(logs.mean())), np.exp(_drawn(logs, draws).mean(axis=1)), confidence)


def _ratios(ones: Sequence[float], others: Sequence[float]) -> Floats:
    if len(ones) != len(others) or not len(ones):
        raise ValueError(f"{len(ones)} and {len(others)} values make no pairs")
    return np.asarray(ones, dtype=np.float64) / np.asarray(others, dtype=np.float64)


def _drawn(values: Floats, draws: int) -> Floats:
    """As many samples of `values` as there are draws, each as large as it, drawn with replacement."""
    rng = np.random.default_rng(0)
    return values[rng.integers(0, len(values), (draws, len(values)))]


def rate_ratio(served: Sequence[float], bare: Sequence[float]) -> dict[str, Any]:
    """The two paired ratios as the benchmarks of the appliance print them; nothing of no pairs."""
    if not served:
        return {}
    middle, mean = paired_ratio(served, bare), paired_mean_ratio(served, bare)
    return {
        "rate_ratio_served_to_bare": round(middle.estimate, 4),
        "rate_ratio_95": [round(middle.low, 4), round(middle.high, 4)],
        "mean_rate_ratio": round(mean.estimate, 4),
        "mean_rate_ratio_95": [round(mean.low, 4), round(mean.high, 4)],
    }


def difference_of_medians(
    ones: Sequence[float], others: Sequence[float], *, draws: int = DRAWS, confidence: float = CONFIDENCE
) -> Interval:
    """The median of `ones` minus that of `others`, which are no pairs, and the interval of that difference.

    Raises:
        ValueError: a side has no values.
    """
    first, second = np.asarray(ones, dtype=np.float64), np.asarray(others, dtype=np.float64)
    if not len(first) or not len(second):
        raise ValueError("a side has no values")
    rng = np.random.default_rng(0)
    drawn = [np.median(side[rng.integers(0, len(side), (draws, len(side)))], axis=1) for side in (first, second)]
    return interval(float(np.median(first) - np.median(second)), drawn[0] - drawn[1], confidence)


def share(right: int, asked: int) -> Interval:
    """A rate of successes with its 95% interval after Wilson, which holds at 0 and at 1 too.

    Raises:
        ValueError: nothing was asked, or more was right than asked.
    """
    if not 0 <= right <= asked or asked == 0:
        raise ValueError(f"{right} of {asked} is no rate")
    z, rate = 1.959964, right / asked
    middle = (rate + z * z / (2 * asked)) / (1 + z * z / asked)
    half = z * ((rate * (1 - rate) + z * z / (4 * asked)) / asked) ** 0.5 / (1 + z * z / asked)
    return Interval(rate, max(0.0, middle - half), min(1.0, middle + half))


def widening(freedom: int, confidence: float) -> float:
    """By how much an interval that was drawn from few rounds is too narrow: Student's t over the normal quantile.

    Args:
        freedom: degrees of freedom: the rounds of both sides together, less one for each of them.
        confidence: of the interval.

    Raises:
        ValueError: there is one round, of which nothing follows for the next.
    """
    if freedom < 1:
        raise ValueError("of one round nothing follows for the next")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    # Cornish and Fisher's expansion of t; 1% below it at four degrees of freedom, closer from there on.
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return t / z


def interval(estimate: float, drawn: Floats, confidence: float) -> Interval:
    """The estimate between the quantiles of what was drawn."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(estimate, float(low), float(high))
