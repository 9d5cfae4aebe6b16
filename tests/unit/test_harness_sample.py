"""Samples: what is derived from arrivals and counts, and what a record of one holds."""

from __future__ import annotations

import json
import os

import pytest
from harness_support import job
from hypothesis import given
from hypothesis import strategies as st

from harness.client_bench import CLIENTS, measure
from harness.sample import Conversation, Sample, in_flight


def sample(**more: object) -> Sample:
    plain = {"job": "a", "phase": "measure", "outcome": "ok", "asked_s": 0.0, "sent_s": 0.5, "ended_s": 9.0}
    return Sample(**{**plain, **more})  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5)), min_size=1, max_size=40), st.integers(1, 4))
def test_latencies_are_one_for_each_token_but_the_first_and_sum_to_the_time_between(
    chunks: list[tuple[float, int]], first: int
) -> None:
    """Also of chunks that carried text and no new token: their time is the next token's."""
    arrivals, counts = [1.0], [first]
    for gap_s, tokens in chunks:
        arrivals.append(arrivals[-1] + gap_s)
        counts.append(counts[-1] + tokens)
    one = sample(arrivals_s=tuple(arrivals), counts=tuple(counts), completion_tokens=counts[-1], pieces=len(counts))
    assert len(one.itl_s) == counts[-1] - 1
    last_of_a_token = max(at for at, count in enumerate(counts) if at == 0 or count > counts[at - 1])
    assert sum(one.itl_s) == pytest.approx(arrivals[last_of_a_token] - 1.0)


def test_a_chunk_of_several_tokens_is_several_latencies() -> None:
    one = sample(arrivals_s=(1.0, 2.0, 2.5), counts=(2, 6, 7), completion_tokens=7, pieces=3)
    assert one.itl_s == (0.0, 0.25, 0.25, 0.25, 0.25, 0.5)
    assert one.tpot_s == 0.25
    assert (one.ttft_s, one.e2e_s, one.refused_s, one.first_s, one.last_s) == (0.5, 2.0, 0.5, 1.0, 2.5)


@pytest.mark.parametrize(
    ("tokens", "finish", "known"),
    [(3, "length", 2), (4, "stop", 2), (4, "length", 0), (5, "stop", 0), (2, "length", 0), (None, "length", 0)],
)
def test_without_counts_chunks_are_tokens_only_where_nothing_else_is_possible(
    tokens: int | None, finish: str, known: int
) -> None:
    one = sample(arrivals_s=(1.0, 2.0, 3.0), pieces=3, completion_tokens=tokens, finish_reason=finish)
    assert one.itl_s == (1.0,) * known


def test_nothing_that_came_has_no_times() -> None:
    one = sample(outcome="failed", reason="gone", completion_tokens=0)
    assert (one.ttft_s, one.e2e_s, one.tpot_s, one.first_s, one.last_s, one.itl_s) == (None,) * 5 + ((),)
    assert sample(arrivals_s=(1.0,), completion_tokens=1, pieces=1).tpot_s is None


@pytest.mark.parametrize("counts", [None, (1, 3)])
def test_a_record_is_the_whole_sample(counts: tuple[int, ...] | None) -> None:
    one = sample(arrivals_s=(1.0, 2.0), counts=counts, status=200, finish_reason="stop", cached_tokens=7, retries=1)
    record = json.loads(json.dumps(one.as_record()))
    assert Sample.from_record(record) == one
    with pytest.raises(ValueError, match="tokenz"):
        Sample.from_record({**record, "tokenz": 1})
    with pytest.raises(ValueError, match="counts"):
        Sample.from_record({key: value for key, value in record.items() if key != "counts"})


def test_in_flight_is_the_most_and_the_mean_while_there_was_any() -> None:
    """Two together for one second of three; then nothing for a while; then one that begins as another ends."""
    spans = [(0.0, 2.0), (1.0, 3.0), (10.0, 11.0), (11.0, 12.0)]
    samples = [sample(sent_s=begun_s, ended_s=ended_s) for begun_s, ended_s in spans]
    assert in_flight(samples) == (2, pytest.approx(6 / 5))
    assert in_flight([]) == (0, 0.0)


def test_gaps_are_as_many_as_jobs() -> None:
    with pytest.raises(ValueError, match="1 gaps for 2 jobs"):
        Conversation((job("a"), job("b")), (0.0,))


@pytest.mark.parametrize("client", CLIENTS)
def test_the_clients_benchmark_notes_every_chunk_that_was_sent(client: str) -> None:
    found = measure(client, True, streams=8, rate=400.0, chunks=20, cores=os.sched_getaffinity(0))
    assert found["client"] == client
    assert found["note_late_ms"]["p50"] > 0
    assert 0 < found["client_core_share"] < 1
