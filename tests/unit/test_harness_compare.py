"""Two receipts: the same thing twice is no difference, a tenth slower is seen, noise is nobody's loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from receipts_support import FACTS, HOST, Pace, answer, job, make

from harness.compare import NOISY, compare, render
from harness.receipt import Receipt, Setup
from harness.recording import Recording
from slimserve.errors import Refused, UsageError

TRIES = 20


def verdict(folder: Path, a: Receipt, b: Receipt) -> str:
    return compare(a, b, folder, folder).verdict


def test_a_run_with_itself_and_with_its_repetition_is_no_difference_and_a_tenth_slower_is_seen(tmp_path: Path) -> None:
    found = []
    for seed in range(TRIES):
        a = make(tmp_path, f"a{seed}", seed=3000 * seed)
        again = make(tmp_path, f"again{seed}", seed=3000 * seed + 1000)
        slower = make(tmp_path, f"slower{seed}", seed=3000 * seed + 2000, pace=Pace().slower(0.1))
        found.append([verdict(tmp_path, a, other) for other in (a, again, slower)] + [verdict(tmp_path, slower, a)])
    assert found == [["none", "none", "a", "b"]] * TRIES


def test_the_winner_is_said_with_its_interval(tmp_path: Path) -> None:
    a, b = make(tmp_path, "slow", pace=Pace().slower(0.5)), make(tmp_path, "fast", seed=9)
    result = compare(a, b, tmp_path, tmp_path)
    assert result.verdict == "b"
    throughput = result.compared[0]
    assert throughput.ratio is not None
    assert throughput.ratio.low < 1.5 < throughput.ratio.high
    text = render(result)
    assert "B is better by" in text
    assert text.endswith("verdict: fast (B) wins, and loses nothing")


def test_a_side_that_wins_here_and_loses_there_does_not_win(tmp_path: Path) -> None:
    a, b = make(tmp_path, "a"), make(tmp_path, "b", seed=9, pace=Pace(ttft_s=0.04, token_s=0.012))
    result = compare(a, b, tmp_path, tmp_path)
    assert {one.metric: one.verdict for one in result.compared} == {"throughput": "a", "ttft": "b", "inter-token": "a"}
    assert result.verdict == "mixed"
    assert "each side wins something" in render(result)


def test_a_noisy_run_is_inconclusive_and_not_a_loss(tmp_path: Path) -> None:
    noisy = Pace(round_mood=0.15)
    a, b = make(tmp_path, "a", pace=noisy), make(tmp_path, "b", seed=40, pace=noisy.slower(0.1))
    assert max(a.points[0].noise.values()) > NOISY
    assert verdict(tmp_path, a, b) == "inconclusive"


def test_a_mood_that_hit_both_sides_of_one_run_cancels_out(tmp_path: Path) -> None:
    def fill(seconds: float):  # type: ignore[no-untyped-def]
        def into(recording: Recording) -> None:
            recording.add_point(Setup(name="c1", concurrency=1))
            for number in range(30):
                mood = (1.0, 1.3, 0.8, 1.1, 1.6)[number // 6]
                own = mood * (1 + 0.01 * (number % 3))
                recording.add("c1", number // 6, job(number), answer(number, number * 9.0, 0.1 * own, seconds * own))

        return into

    bound = replace(FACTS, together="20261130t000000-x-1")
    for facts, expected in ((FACTS, "inconclusive"), (bound, "a")):
        name = expected[:1]
        a = make(tmp_path, f"{name}a", fill=fill(0.01), facts=facts)
        b = make(tmp_path, f"{name}b", fill=fill(0.011), facts=facts)
        found = {one.metric: one.verdict for one in compare(a, b, tmp_path, tmp_path).compared}
        assert found["inter-token"] == expected


def test_what_a_client_cannot_resolve_is_no_difference(tmp_path: Path) -> None:
    a, b = make(tmp_path, "a", pace=Pace(ttft_s=0.001)), make(tmp_path, "b", seed=9, pace=Pace(ttft_s=0.0012))
    found = {one.metric: one for one in compare(a, b, tmp_path, tmp_path).compared}
    assert found["ttft"].verdict == "none"
    assert found["ttft"].why == "they differ by less than a client resolves"


def test_too_few_requests_say_nothing(tmp_path: Path) -> None:
    def fill(recording: Recording) -> None:
        recording.add_point(Setup(name="c1", concurrency=1))
        for number in range(3):
            recording.add("c1", number, job(number), answer(number, number, 0.1, 0.01 * (1 + number)))

    a, b = make(tmp_path, "a", fill=fill), make(tmp_path, "b", seed=1)
    b = make(
        tmp_path, "c", fill=lambda recording: (fill(recording), recording.add("c1", 0, job(9), answer(9, 9, 1, 1)))[0]
    )
    result = compare(a, b, tmp_path, tmp_path)
    assert result.verdict == "inconclusive"
    assert "too few to draw from" in result.compared[0].why


def test_receipts_that_must_not_be_compared_are_refused_with_every_reason(tmp_path: Path) -> None:
    other = replace(
        FACTS,
        host=replace(HOST, id="9" * 64, cpu="Another"),
        workload=replace(FACTS.workload, name="agent"),
    )
    a, b = make(tmp_path, "a"), make(tmp_path, "b", facts=other, outcome="aborted", reasons=["it was interrupted"])
    with pytest.raises(Refused) as refused:
        compare(a, b, tmp_path, tmp_path)
    what = [finding.what for finding in refused.value.findings]
    assert what == [
        "b is aborted",
        "a and b were taken on different machines",
        "a ran chat-small, and b ran agent",
    ]
    changed = make(tmp_path, "c", facts=replace(FACTS, workload=replace(FACTS.workload, sha256="8" * 64)))
    with pytest.raises(Refused, match="its file changed in between"):
        compare(a, changed, tmp_path, tmp_path)


def test_loads_that_one_side_lacks_are_named(tmp_path: Path) -> None:
    a, b, c = (make(tmp_path, name, concurrencies=some) for name, some in (("a", (4, 8)), ("b", (8, 16)), ("c", (1,))))
    result = compare(a, b, tmp_path, tmp_path)
    assert {one.point for one in result.compared} == {"c8"}
    assert [note for note in result.notes if "alone" in note] == [
        "c4 was measured by a alone, or otherwise",
        "c16 was measured by b alone",
    ]
    with pytest.raises(Refused, match="no load in common"):
        compare(a, c, tmp_path, tmp_path)


def test_a_server_whose_slots_nobody_knows_is_compared_all_the_same_and_another_load_is_not(tmp_path: Path) -> None:
    def fill(setup: Setup):  # type: ignore[no-untyped-def]
        def into(recording: Recording) -> None:
            recording.add_point(setup)
            for number in range(12):
                recording.add("c1", number // 4, job(number), answer(number, number * 1.0, 0.1, 0.01))

        return into

    known = make(tmp_path, "known", fill=fill(Setup(name="c1", concurrency=1, slots=8)))
    unknown = make(tmp_path, "unknown", fill=fill(Setup(name="c1", concurrency=1)))
    warm = make(tmp_path, "warm", fill=fill(Setup(name="c1", concurrency=1, cache="warm")))
    assert verdict(tmp_path, known, unknown) == "none"
    with pytest.raises(Refused, match="no load in common"):
        compare(known, warm, tmp_path, tmp_path)


def test_what_else_differs_is_noted(tmp_path: Path) -> None:
    newer = replace(
        FACTS,
        commit="ba9876543210-dirty",
        versions={**FACTS.versions, "torch": "2.13.0"},
        host=replace(HOST, kernel="Linux 6.2"),
    )
    a, b = make(tmp_path, "a"), make(tmp_path, "b", seed=9, facts=newer)
    assert set(compare(a, b, tmp_path, tmp_path).notes) == {
        "commit: 0123456789ab, then ba9876543210-dirty",
        "kernel: Linux 6.1, then Linux 6.2",
        "torch: none, then 2.13.0",
    }


def test_samples_that_are_gone_are_an_error_and_no_verdict(tmp_path: Path) -> None:
    a, b = make(tmp_path, "a"), make(tmp_path, "b", seed=9)
    (tmp_path / b.samples.file).unlink()
    with pytest.raises(UsageError, match="the raw samples of b cannot be used"):
        compare(a, b, tmp_path, tmp_path)
