"""The battery against servers that are right, and against such as are wrong in one way each."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from recall_support import CACHE_TOKENS, ROOT, SHORT, reader, reading

from harness.recall import MEDIUM, SMALL, run_battery
from harness.recall.report import Report
from slimserve.client_faults import Endpoint, NoListener
from slimserve.errors import Failed

SEEDS = range(20)
SMALL_CHURNED = replace(SMALL, churn_tokens=CACHE_TOKENS + 5_000, concurrency=1)
GREEDY = replace(SHORT, greedy=True, pairs=5)

# What each broken server is caught by, at least: it may fail elsewhere too.
CAUGHT_BY = {
    "previous": ("later turns got the answer to the turn before", "later turns: "),
    "sometimes-previous": ("later turns got the answer to the turn before",),
    "blurred": ("fail: depth 0.5: ",),
    "repeats": ("path cold: 0 of", "path hit: 0 of", "path resumed: 0 of", "known answers: 0 of", "tools: 0 of"),
    "table": ("path cold: 0 of", "path hit: 0 of", "path resumed: 0 of", "tools: 0 of"),
    "memory": ("path cold: ", "path hit: "),
    "latest": ("path cold: ", "path hit: ", "path resumed: "),
    "stale": ("hold a marker of another conversation",),
    "drops": ("comparisons differ", "cold and hit, first token"),
    "wrong-arguments": ("tools: 0 of",),
    "calls-as-prose": ("tools: 0 of",),
    "thought": ("path cold: 0 of", "path hit: 0 of", "path resumed: 0 of", "known answers: 0 of"),
    "torn": ("path resumed: ", "comparisons differ", "hit and resumed, first token"),
    "evicts-wrong": ("path resumed: ", "comparisons differ", "hit and resumed, first token"),
}
# Of these, what a battery misses that asks for no tools and evicts nothing.
NO_TOOLS_NO_CHURN = ("wrong-arguments", "calls-as-prose", "torn", "evicts-wrong")


def whats(report: Report) -> str:
    return "\n".join(f"{verdict}: {what}" for verdict, what in report.findings)


@pytest.mark.parametrize("mode", ["honest", "slips", "tier"])
def test_a_right_server_passes_every_time(mode: str) -> None:
    with reading(mode) as endpoint:
        for seed in SEEDS:
            report = run_battery(endpoint, replace(SHORT, restores=mode == "tier"), seed=seed)
            assert report.verdict == "pass", f"seed {seed}\n{report.table()}"


@pytest.mark.parametrize("mode", CAUGHT_BY)
def test_a_broken_server_is_caught_every_time(mode: str) -> None:
    with reading(mode) as endpoint:
        for seed in SEEDS:
            report = run_battery(endpoint, replace(SHORT, restores=mode == "torn"), seed=seed)
            assert report.verdict == "fail", f"seed {seed}\n{report.table()}"
            for words in CAUGHT_BY[mode]:
                assert words in whats(report), f"seed {seed}: nothing says {words!r}\n{report.table()}"


@pytest.mark.parametrize("mode", ["blurred", "repeats", "table", "memory", "stale", "thought", "torn", "evicts-wrong"])
def test_the_small_battery_catches_what_it_can_every_time(mode: str) -> None:
    with reading(mode) as endpoint:
        for seed in SEEDS:
            report = run_battery(endpoint, replace(SMALL_CHURNED, restores=mode == "torn"), seed=seed)
            assert report.verdict == "fail", f"seed {seed}\n{report.table()}"


def test_the_small_battery_passes_a_right_server_every_time() -> None:
    with reading() as endpoint:
        for seed in SEEDS:
            report = run_battery(endpoint, SMALL_CHURNED, seed=seed)
            assert report.verdict == "pass", f"seed {seed}\n{report.table()}"


def test_the_medium_battery_passes_a_right_server_every_time() -> None:
    with reading() as endpoint:
        for seed in SEEDS:
            report = run_battery(endpoint, replace(MEDIUM, concurrency=1), seed=seed)
            assert report.verdict == "pass", f"seed {seed}\n{report.table()}"
    assert report.to_json()["rates"]["cold"]["asked"] == 12
    assert len(report.probes) == 76


@pytest.mark.parametrize("mode", [mode for mode in CAUGHT_BY if mode not in NO_TOOLS_NO_CHURN])
def test_the_medium_battery_catches_what_is_wrong_every_time(mode: str) -> None:
    with reading(mode) as endpoint:
        for seed in SEEDS:
            report = run_battery(endpoint, replace(MEDIUM, concurrency=1), seed=seed)
            assert report.verdict == "fail", f"seed {seed}\n{report.table()}"


def test_greedy_texts_are_compared_token_for_token() -> None:
    with reader() as endpoint:
        report = run_battery(endpoint, GREEDY, seed=1)
    assert report.verdict == "pass", report.table()
    assert report.greedy_holds
    assert report.to_json()["compared"] == {"first token: same": 40, "text: same": 20}
    assert {probe.sampling for probe in report.probes} == {"own", "greedy"}


def test_greedy_that_is_not_in_force_is_no_proof() -> None:
    with reader("honest", "ignores-greedy") as endpoint:
        report = run_battery(endpoint, GREEDY, seed=1)
    assert report.greedy_holds is False
    assert report.verdict != "pass"
    assert "greedy was asked for and is not in force" in whats(report)


def test_without_logprobs_nothing_is_compared_and_it_is_said() -> None:
    with reader("honest", "no-logprobs") as endpoint:
        report = run_battery(endpoint, SHORT, seed=1)
    assert report.verdict == "pass", report.table()
    assert set(report.to_json()["compared"]) == {"first token: not compared"}
    assert any("logprobs are not supported" in note for note in report.notes)


def test_a_server_without_a_cache_is_not_tested_on_hits() -> None:
    with reader("honest", "no-cache") as endpoint:
        report = run_battery(endpoint, SHORT, seed=1)
    assert report.verdict == "inconclusive"
    assert "no prefix hit was tested" in whats(report)


def test_a_churn_that_evicts_nothing_is_no_eviction() -> None:
    with reader("honest", "keeps-everything") as endpoint:
        report = run_battery(endpoint, SHORT, seed=1)
    assert report.verdict == "inconclusive"
    assert "the churn did not evict" in whats(report)


def test_a_tier_that_restores_nothing_is_not_tested() -> None:
    with reader() as endpoint:
        report = run_battery(endpoint, replace(SHORT, restores=True), seed=1)
    assert report.verdict == "inconclusive"
    assert "nothing was restored" in whats(report)


def test_usage_that_says_nothing_leaves_the_paths_unproved_and_the_rates_right() -> None:
    with reader("honest", "no-usage") as endpoint:
        report = run_battery(endpoint, replace(SHORT, shapes=(SHORT.shapes[0],)), seed=1)
    assert report.verdict == "pass", report.table()
    assert report.to_json()["paths"]["hit"]["cached_tokens"] is None
    assert any("usage tells no prompt tokens" in note for note in report.notes)


def test_without_a_churn_nothing_is_said_about_evictions() -> None:
    with reader() as endpoint:
        report = run_battery(endpoint, replace(SHORT, churn_tokens=0), seed=1)
    assert report.verdict == "pass", report.table()
    assert "resumed" not in report.to_json()["rates"]
    assert any("nothing was asked after an eviction" in note for note in report.notes)


def test_markers_are_drawn_anew_for_each_battery_and_again_for_a_seed() -> None:
    light = replace(SHORT, pairs=1, known=1, tool_conversations=0, churn_tokens=0)
    with reader() as endpoint:
        first, second = (run_battery(endpoint, light) for _ in range(2))
        again = run_battery(endpoint, light, seed=first.seed)
    markers = [{p.expected for p in report.probes if p.kind == "code"} for report in (first, second, again)]
    assert not markers[0] & markers[1]
    assert markers[0] == markers[2]


def test_nobody_there_and_a_server_that_answers_nothing() -> None:
    with reader() as endpoint:
        gone = endpoint
    with pytest.raises(NoListener):
        run_battery(gone, SHORT)
    with reader() as endpoint, pytest.raises(Failed, match="404"):
        run_battery(Endpoint(endpoint.base_url.replace("/v1", "/nowhere"), "reader"), SHORT)


def command(endpoint: Endpoint, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "harness.recall", endpoint.base_url, endpoint.model, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_the_command_gives_data_and_a_table(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-of-the-tests\n")
    with reader() as endpoint:
        done = command(endpoint, "--contexts", "300,500", "--json", "--seed", "3", "--key-file", str(key))
        table = command(endpoint, "--contexts", "300", "--no-tools")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert (data["schema"], data["verdict"], data["seed"]) == ("recall/1", "pass", 3)
    assert [shape["context_tokens"] for shape in data["settings"]["shapes"]] == [300, 500]
    assert data["rates"]["cold"] == {"right": 30, "asked": 30, "low": 0.8865, "high": 1.0}
    assert "sk-of-the-tests" not in done.stdout
    assert table.returncode == 0
    assert "note: no tool was used" in table.stdout


def test_the_command_fails_for_a_broken_server() -> None:
    with reader("stale") as endpoint:
        done = command(endpoint, "--contexts", "300")
    assert done.returncode == 1
    assert "hold a marker of another conversation" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("--floor", "1"), ("--contexts", "8k"), ("--pairs", "0"), ("--key-file", "/nowhere")]
)
def test_the_command_refuses_what_it_cannot_use(arguments: tuple[str, str]) -> None:
    done = command(Endpoint("http://127.0.0.1:9/v1", "reader"), *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
