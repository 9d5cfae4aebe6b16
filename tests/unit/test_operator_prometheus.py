"""Readings of a metrics text and what lies between two of them."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimserve.operator.history import INTERVAL_SECONDS, POINTS, History, make_point
from slimserve.operator.prometheus import Reading, increase, parse, quantile, rate, ratio
from slimserve.shapes import plain

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "operator"))

from live import RECORDED, run_on

BOUNDS = (0.1, 0.5, 1.0, math.inf)
RATES = {
    "generated_per_s",
    "prompt_per_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "itl_p50_s",
    "itl_p95_s",
    "cache_hits",
    "tier_hits",
    "too_many_per_s",
}


def counter(value: float, time: float, born: float = 1.0) -> Reading:
    return parse(f"process_start_time_seconds {born}\nc_total {value}\n", time)


def histogram(counts: list[int], time: float) -> Reading:
    """A reading of one histogram from the observations in each of its buckets."""
    lines, sum_so_far = [], 0
    for bound, count in zip(BOUNDS, counts, strict=True):
        sum_so_far += count
        lines.append(f'h_bucket{{le="{"+Inf" if math.isinf(bound) else bound}"}} {sum_so_far}')
    return parse("\n".join(lines) + "\n", time)


def test_the_text_of_a_real_engine_is_read() -> None:
    reading = parse(RECORDED, 5.0)
    assert reading.total("vllm:generation_tokens_total") == 481.0
    assert reading.total("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}) == 709.0
    assert reading.buckets("vllm:time_to_first_token_seconds")[math.inf] == 13.0
    assert reading.total("nothing_of_the_kind") is None


@pytest.mark.parametrize("text", ["<html>no</html>", "h_bucket 3", 'h_bucket{le="wide"} 3', "name one"])
def test_what_is_no_such_text_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match="not Prometheus' text form"):
        parse(text, 1.0)


@given(st.text() | st.text('abc_{}="#+-.0123456789 \n\\,leINFnaHELPTYP'))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        reading = parse(text, 1.0)
        assert all(math.isfinite(value) for name in reading.samples for value in reading.values(name))
        for name in reading.samples:
            quantile(reading, Reading(2.0, reading.samples), name.removesuffix("_bucket"), 0.5)


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.floats(0.1, 100.0), st.booleans())
def test_a_rate_is_growth_over_time_and_never_negative(old: int, new: int, seconds: float, restarted: bool) -> None:
    result = rate(counter(old, 10.0), counter(new, 10.0 + seconds, 2.0 if restarted else 1.0), "c_total")
    if restarted or new < old:
        assert result is None
    else:
        assert result == pytest.approx((new - old) / seconds)


def test_no_time_between_two_readings_gives_no_rate() -> None:
    assert rate(counter(1, 10.0), counter(2, 10.0), "c_total") is None


def test_a_series_that_appears_grew_from_zero() -> None:
    before, after = parse("other 1\n", 1.0), parse('other 1\nc_total{a="b"} 3\n', 2.0)
    assert increase(before, after, "c_total") == 3.0


def test_a_ratio_needs_something_underneath() -> None:
    before = parse("hit_total 1\nask_total 4\n", 1.0)
    assert ratio(before, parse("hit_total 1\nask_total 4\n", 2.0), "hit_total", "ask_total") is None
    assert ratio(before, parse("hit_total 2\nask_total 8\n", 2.0), "hit_total", "ask_total") == 0.25


counts = st.lists(st.integers(0, 1000), min_size=len(BOUNDS), max_size=len(BOUNDS))


@given(counts, counts, st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_bucket_that_holds_its_rank(before: list[int], grown: list[int], q: float) -> None:
    after = [old + new for old, new in zip(before, grown, strict=True)]
    result = quantile(histogram(before, 1.0), histogram(after, 2.0), "h", q)
    if not sum(grown):
        assert result is None
        return
    rank, seen = q * sum(grown), 0
    for index, count in enumerate(grown):
        seen += count
        if count and seen >= rank:
            low = BOUNDS[index - 1] if index else 0.0
            high = BOUNDS[index] if math.isfinite(BOUNDS[index]) else BOUNDS[index - 1]
            break
    assert result is not None
    assert low <= result <= high + 1e-12


@given(counts, counts)
def test_quantiles_are_in_order(before: list[int], grown: list[int]) -> None:
    after = [old + new for old, new in zip(before, grown, strict=True)]
    found = [quantile(histogram(before, 1.0), histogram(after, 2.0), "h", q) for q in (0.05, 0.5, 0.95)]
    if sum(grown):
        known = [value for value in found if value is not None]
        assert len(known) == 3
        assert known == sorted(known)
    else:
        assert found == [None] * 3


@given(counts, counts)
def test_a_histogram_that_fell_gives_no_quantile(before: list[int], after: list[int]) -> None:
    if sum(after) < sum(before):
        assert quantile(histogram(before, 1.0), histogram(after, 2.0), "h", 0.5) is None


def test_a_quantile_interpolates_as_prometheus_does() -> None:
    # Ten in (0.1, 0.5]: the median is their middle, 0.3.
    assert quantile(histogram([0] * 4, 1.0), histogram([0, 10, 0, 0], 2.0), "h", 0.5) == pytest.approx(0.3)
    assert quantile(histogram([0] * 4, 1.0), histogram([0, 0, 0, 4], 2.0), "h", 0.5) == 1.0


def test_other_buckets_are_not_compared() -> None:
    other = parse('h_bucket{le="7"} 1\nh_bucket{le="+Inf"} 9\n', 2.0)
    assert quantile(histogram([1, 1, 1, 1], 1.0), other, "h", 0.5) is None


def test_a_point_has_the_work_between_two_readings_of_a_real_engine() -> None:
    before, after = (parse(run_on(seconds, 1.0, 6, 2, 24, round(seconds)), 100.0 + seconds) for seconds in (10, 15))
    point = make_point(115.0, "ready", before, after)
    assert point.generated_per_s == pytest.approx(180.0)
    assert point.prompt_per_s == pytest.approx(420.0)
    assert point.cache_hits == pytest.approx(290 / 420)
    assert point.too_many_per_s == pytest.approx(1.0)
    assert (point.in_flight, point.waiting, point.cap, point.running) == (6, 2, 24, 6)
    assert point.ttft_p50_s is not None
    assert 0.2 < point.ttft_p50_s < 0.6
    assert point.itl_p50_s is not None
    assert point.itl_p95_s is not None
    assert 0.02 < point.itl_p50_s < point.itl_p95_s < 0.2
    assert point.tier_hits is None  # nothing was looked up in one


def test_a_door_that_never_refused_says_zero_and_a_missing_door_says_nothing() -> None:
    with_door = [parse(run_on(seconds, 1.0, 6, 2, 24, 0), 100.0 + seconds) for seconds in (10, 15)]
    assert make_point(115.0, "ready", *with_door).too_many_per_s == 0.0
    without = make_point(115.0, "ready", parse(RECORDED, 1.0), parse(RECORDED, 2.0))
    assert without.too_many_per_s is None
    assert without.in_flight is None


def test_an_engine_that_is_away_or_new_leaves_a_gap() -> None:
    history = History()
    texts = [(run_on(s, 1.0, 1, 0, 24, 0), 100.0 + s) for s in (0, 5)]
    first, second = (history.add(time, "ready", parse(text, time)) for text, time in texts)
    away = history.add(110.0, "restarting", None)
    # The same process's age, but far more work than before: counters alone would not show that it is another one.
    back = history.add(115.0, "ready", parse(run_on(500, 112.0, 1, 0, 24, 0), 115.0))
    for gap in (first, away, back):
        assert {getattr(gap, name) for name in RATES} == {None}
    assert second.generated_per_s is not None
    assert away.in_flight is None
    assert back.in_flight == 1
    unseen = make_point(
        120.0, "ready", parse(run_on(5, 112.0, 1, 0, 24, 0), 115.0), parse(run_on(9, 118.0, 1, 0, 24, 0), 120.0)
    )
    assert {getattr(unseen, name) for name in RATES} == {None}


def test_the_question_of_the_start_is_nobodys_waiting() -> None:
    history = History()
    readings = [parse(run_on(s, 1.0, 1, 0, 24, 0), 100.0 + s) for s in (0, 5, 10)]
    states = ("warming", "ready", "ready")
    warming, ready, serving = (
        history.add(100.0 + 5 * place, state, reading)
        for place, (state, reading) in enumerate(zip(states, readings, strict=True))
    )
    assert {getattr(point, name) for point in (warming, ready) for name in RATES} == {None}
    assert serving.generated_per_s is not None


def test_history_keeps_an_hour_in_columns() -> None:
    history = History()
    assert history.latest is None
    for index in range(POINTS + 3):
        history.add(float(index), "loading", None)
    data = history.to_json()
    assert data["interval_seconds"] * data["points"] == 3600 == INTERVAL_SECONDS * POINTS
    assert {len(column) for column in data["columns"].values()} == {POINTS}
    assert data["columns"]["time"][0] == 3.0
    assert history.latest is not None
    assert plain(history.latest).keys() == data["columns"].keys()
