"""One reading of a `/metrics` text, and what lies between two of them: rates, ratios, quantiles.

Counters fall to zero when the process that holds them is started anew. What happened across such a moment is not known,
so every function here answers None for it, and never a negative number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

# The counters of a process are comparable as long as this gauge, which every Python client exports, stands still.
BIRTH = "process_start_time_seconds"

Series = tuple[Mapping[str, str], float]


@dataclass(frozen=True, slots=True)
class Reading:
    """All samples of one text.

    Args:
        time: when it was read, in seconds since the epoch.
        samples: sample name, such as `vllm:prompt_tokens_total`, -> its series.
    """

    time: float
    samples: Mapping[str, tuple[Series, ...]]

    def values(self, name: str, labels: Mapping[str, str] | None = None) -> Iterator[float]:
        """The finite values of the series of `name` that have these labels among theirs."""
        for own, value in self.samples.get(name, ()):
            if math.isfinite(value) and (not labels or all(own.get(key) == wanted for key, wanted in labels.items())):
                yield value

    def total(self, name: str, labels: Mapping[str, str] | None = None) -> float | None:
        """Their sum over all engines, ranks and labels; None when there is none."""
        found = list(self.values(name, labels))
        return sum(found) if found else None

    def buckets(self, name: str) -> dict[float, float]:
        """Upper bound -> observations at or below it, of the histogram `name`, summed over its other labels.

        Empty when there is none, or when its counts are no numbers.
        """
        result: dict[float, float] = {}
        for labels, value in self.samples.get(f"{name}_bucket", ()):
            bound = float(labels["le"])
            result[bound] = result.get(bound, 0.0) + value
        return dict(sorted(result.items())) if all(map(math.isfinite, result.values())) else {}


def parse(text: str, time: float) -> Reading:
    """Read Prometheus' text form.

    Args:
        text: the body of a `/metrics` answer.
        time: when it was asked for, in seconds since the epoch.

    Raises:
        ValueError: it is not of that form.
    """
    samples: dict[str, list[Series]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        for name, series in samples.items():
            if name.endswith("_bucket"):
                for labels, _ in series:
                    if math.isnan(float(labels["le"])):
                        raise ValueError(f"a bucket of {name} has no bound")
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"not Prometheus' text form: {error}") from None
    return Reading(time, {name: tuple(series) for name, series in samples.items()})


def same_process(before: Reading, after: Reading) -> bool:
    """Whether the counters of the two readings may be compared."""
    return after.time > before.time and before.total(BIRTH) == after.total(BIRTH)


def increase(before: Reading, after: Reading, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    """By how much the counter `name` grew; None when that cannot be known.

    A series that is new in `after` grew from zero: labels appear with their first use.
    """
    now = after.total(name, labels)
    if now is None or not same_process(before, after):
        return None
    grown = now - (before.total(name, labels) or 0.0)
    return grown if grown >= 0 else None


def rate(before: Reading, after: Reading, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    """Growth of the counter `name` a second."""
    grown = increase(before, after, name, labels)
    return None if grown is None else grown / (after.time - before.time)


def ratio(before: Reading, after: Reading, part: str, whole: str) -> float | None:
    """Growth of one counter over growth of another, 0 to 1; None as well when the second did not grow."""
    over, under = increase(before, after, part), increase(before, after, whole)
    if over is None or not under:
        return None
    return min(over / under, 1.0)


def quantile(before: Reading, after: Reading, name: str, q: float) -> float | None:
    """The q-quantile of what the histogram `name` observed between the readings, in its own unit.

    Linear within a bucket, from 0 in the first; an answer in the last, unbounded one is the highest finite bound: the
    rule of Prometheus' own `histogram_quantile`, so that this page and a dashboard on the same data agree.

    Args:
        q: 0 to 1.

    Returns:
        None when nothing was observed, or when that cannot be known.
    """
    old, new = before.buckets(name), after.buckets(name)
    if not new or not same_process(before, after) or (old and old.keys() != new.keys()):
        return None
    grown = {bound: count - old.get(bound, 0.0) for bound, count in new.items()}
    counts = list(grown.values())
    # Cumulative counts never fall from bucket to bucket; where they seem to, the two readings are of different lives.
    if counts[0] < 0 or any(high < low for low, high in itertools.pairwise(counts)) or counts[-1] <= 0:
        return None
    rank = q * counts[-1]
    low_bound, low_count = 0.0, 0.0
    for bound, count in grown.items():
        if count >= rank and count > low_count:
            if math.isinf(bound):
                return low_bound
            return low_bound + (bound - low_bound) * max(rank - low_count, 0.0) / (count - low_count)
        if not math.isinf(bound):
            low_bound, low_count = bound, count
    return low_bound
