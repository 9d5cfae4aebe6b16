"""A run from workload to receipt, on a fake server that is a real process."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_support import command, save_tokenizer, side, written
from harness_support import ModelServer
from waiting import until

from harness import bench_command
from harness.bench import Side, bench, form_for
from harness.prompts import PromptSource
from harness.raw import read_samples
from harness.receipt import Point, Receipt, find
from harness.workload import Loaded
from slimserve.engine.variables import OWNED
from slimserve.errors import Failed, Finding, Refused, UsageError
from slimserve.registry_files import load_registry

ROOT = Path(__file__).parents[2]
REGISTRY = ROOT / "tests" / "registry"
AGENT = """\
agent:
  shared_tokens: 40
  turns: 3
  adds: [10, 20]
  answers: [4, 8]
  gaps_s: [0, 0.01]
loads:
  - {concurrency: 2, conversations: 3}
"""


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    return written(tmp_path)


def have(loaded: Loaded, tokenizer_path: Path, folder: Path, *sides: Side, seed: int = 1) -> list[Receipt]:
    source = PromptSource(tokenizer_path, seed, works=loaded.workload.works)
    paths = bench(loaded, sides, source, "4" * 64, seed, folder, io.StringIO())
    return [find(folder, str(path)) for path in paths]


def point(receipt: Receipt, name: str) -> Point:
    found = receipt.point(name)
    assert found is not None
    return found


def test_a_run_becomes_a_whole_receipt(tmp_path: Path, loaded: Loaded, tokenizer_path: Path) -> None:
    with ModelServer(interval=0.001) as server:
        (receipt,) = have(loaded, tokenizer_path, tmp_path, side(server.url))
        assert server.state["most"] <= 4
    assert (receipt.outcome, receipt.reasons) == ("whole", ())
    assert receipt.workload.sha256 == loaded.sha256
    closed, opened = point(receipt, "c2"), point(receipt, "r2.5")
    assert (closed.sent, closed.ok, closed.warm_up, closed.rounds, closed.most_in_flight) == (8, 8, 4, 2, 2)
    assert (opened.sent, opened.ok, opened.warm_up, opened.rounds) == (6, 6, 8, 2)
    assert (closed.prompt_tokens, closed.output_tokens) == (8 * 20, 8 * 3)
    # What the server counted meanwhile, the warm-up apart.
    assert (closed.server.cache_queries, closed.server.cache_hits) == (8 * 20, 0)
    assert closed.server.queue_seconds is None
    assert closed.setup.cache == "cold"
    _, raws = read_samples(tmp_path / receipt.samples.file)
    assert len(raws) == 14 + 12
    assert len({raw.sample.job for raw in raws}) == len(raws)


def test_the_same_seed_sends_the_same_prompts(tmp_path: Path, loaded: Loaded, tokenizer_path: Path) -> None:
    with ModelServer() as server:
        first, again, other = (
            have(loaded, tokenizer_path, tmp_path, side(server.url), seed=seed)[0] for seed in (1, 1, 2)
        )
    assert first.prompts.sha256 == again.prompts.sha256 != other.prompts.sha256
    assert (first.workload.seed, other.workload.seed) == (1, 2)


def test_what_the_cache_answered_is_no_cold_run(tmp_path: Path, loaded: Loaded, tokenizer_path: Path) -> None:  # H3
    with ModelServer(cached=16) as server:
        (receipt,) = have(loaded, tokenizer_path, tmp_path, side(server.url))
    assert {one.setup.cache for one in receipt.points} == {"warm"}
    assert point(receipt, "c2").server.cache_hits == 8 * 16
    assert point(receipt, "c2").cached_tokens == 8 * 16


def test_sessions_are_warm_by_design_and_keep_their_order(tmp_path: Path, tokenizer_path: Path) -> None:
    text = (tmp_path / "tiny.yaml").name
    loaded = written(tmp_path, written(tmp_path) and (tmp_path / text).read_text().split("single:")[0] + AGENT)
    with ModelServer() as server:
        (receipt,) = have(loaded, tokenizer_path, tmp_path, side(server.url))
    assert (receipt.outcome, point(receipt, "c2").setup.cache, point(receipt, "c2").ok) == ("whole", "warm", 18)


@pytest.mark.parametrize(
    ("switches", "outcome", "says"),
    [
        ({"usage": {"prompt_tokens": 5}}, "void", "usage counts 25 prompt tokens of 20 sent"),
        ({"usage": {"completion_tokens": -1}}, "void", "tokens"),
        ({"usage": None}, "void", "the answer has no usage"),
        ({"empty": True}, "void", "status 200 and no text"),
        ({"break": {"how": "half", "after": 1}}, "failed", "4 of 4 requests failed"),
        ({"status": 500}, "failed", "status 500"),
    ],
)
def test_a_server_that_lies_or_breaks_ends_the_run_and_its_data_is_kept(
    tmp_path: Path, loaded: Loaded, tokenizer_path: Path, switches: dict[str, Any], outcome: str, says: str
) -> None:
    with ModelServer(**switches) as server:
        (receipt,) = have(loaded, tokenizer_path, tmp_path, side(server.url))
    assert receipt.outcome == outcome
    text = "\n".join(receipt.reasons)
    assert "it ended early, with c2 in round 1" in text
    assert says in text
    _, raws = read_samples(tmp_path / receipt.samples.file)
    assert len(raws) == 2 + 4


@pytest.mark.parametrize(
    "metrics",
    [
        '<!doctype html><html><body>hello "world" {</body></html>',
        "vllm:prefix_cache_hits_total 1e300\nvllm:prefix_cache_queries_total 1e16",
        "vllm:prefix_cache_hits_total -1\nvllm:prefix_cache_queries_total NaN",
        "".join(map(chr, range(256))),
        "x_bucket 1",
    ],
)
def test_metrics_that_are_none_are_not_known(
    tmp_path: Path, loaded: Loaded, tokenizer_path: Path, metrics: str
) -> None:
    texts = itertools.cycle(["vllm:prefix_cache_hits_total 0\nvllm:prefix_cache_queries_total 0\n", metrics])
    with ModelServer() as server:
        asked = replace(side(server.url), metrics=lambda: next(texts))
        (receipt,) = have(loaded, tokenizer_path, tmp_path, asked)
    assert receipt.outcome == "whole"
    assert {(one.server.cache_hits, one.server.cache_queries) for one in receipt.points} == {(None, None)}


def test_a_server_that_is_not_there_is_said(tmp_path: Path, loaded: Loaded, tokenizer_path: Path) -> None:
    with ModelServer() as server:
        gone = side(server.url)
    (receipt,) = have(loaded, tokenizer_path, tmp_path, gone)
    assert receipt.outcome == "failed"
    assert any("nothing was measured" in reason for reason in receipt.reasons)


def test_an_engine_that_died_fails_the_run_with_its_words(tmp_path: Path, loaded: Loaded, tokenizer_path: Path) -> None:
    def dead() -> None:
        raise Failed(Finding("the engine was killed by SIGKILL", "somebody did", "see the log"))

    with ModelServer() as server:
        one = side(server.url)
        dying = Side(one.name, one.target, one.facts, one.metrics, dead, one.slots)
        (receipt,) = have(loaded, tokenizer_path, tmp_path, dying)
    assert (receipt.outcome, receipt.reasons[0]) == ("failed", "the engine was killed by SIGKILL")
    assert point(receipt, "c2").ok == 4


def test_two_servers_are_asked_the_same_in_turn(tmp_path: Path, loaded: Loaded, tokenizer_path: Path) -> None:
    with ModelServer() as one, ModelServer() as other:
        receipts = have(loaded, tokenizer_path, tmp_path, side(one.url, "one"), side(other.url, "other"))
        assert one.state["requests"] == other.state["requests"] == 26
        times = [
            sorted(moment for each in server.get("/fake/times").values() for moment in each) for server in (one, other)
        ]
    first, second = receipts
    assert first.together == second.together == first.id
    assert first.prompts == second.prompts
    # Each has begun before the other has ended, and neither asks while the other does: the order turns with the round.
    order = [name for _, name in sorted([(moment, "one") for moment in times[0]] + [(m, "other") for m in times[1]])]
    turns = [name for place, name in enumerate(order) if place == 0 or order[place - 1] != name]
    assert turns == ["one", "other", "one", "other", "one", "other", "one"]


def test_a_counter_that_was_begun_anew_is_not_known(tmp_path: Path, loaded: Loaded, tokenizer_path: Path) -> None:
    falling = iter(range(100, 0, -1))
    with ModelServer() as server:
        one = side(server.url)

        def metrics() -> str:
            return f"vllm:prefix_cache_queries_total {next(falling)}\nvllm:prefix_cache_hits_total 3\n"

        (receipt,) = have(
            loaded, tokenizer_path, tmp_path, Side(one.name, one.target, one.facts, metrics, one.check, one.slots)
        )
    assert (point(receipt, "c2").server.cache_queries, point(receipt, "c2").server.cache_hits) == (None, 0)


def test_drafts_are_counted_of_what_is_measured(tmp_path: Path, loaded: Loaded, tokenizer_path: Path) -> None:
    with ModelServer(accepts=1.25) as drafting, ModelServer() as other:
        receipts = have(loaded, tokenizer_path, tmp_path, side(drafting.url, "one"), side(other.url, "other"))
    drafted, undrafted = (point(receipt, "c2").server for receipt in receipts)
    # Both rounds, and not the warm-up.
    assert (drafted.drafts, drafted.accepted_tokens, drafted.acceptance_length) == (8 * 3, 8 * 3 * 1.25, 2.25)
    assert (undrafted.drafts, undrafted.accepted_tokens, undrafted.acceptance_length) == (None, None, None)
    lines, without = (bench_command.table(receipt).splitlines() for receipt in receipts)
    assert (lines[1].split()[-1], lines[2].split()[-1]) == ("accepted", "2.25")
    assert without[1].split()[-1] == "cached"


@pytest.mark.parametrize(("switches", "form"), [({}, "ids"), ({"status": 400}, "text"), ({"status": 500}, "ids")])
def test_text_is_sent_to_a_server_that_takes_no_ids(tokenizer_path: Path, switches: dict[str, Any], form: str) -> None:
    with ModelServer(**switches) as server:
        assert form_for(side(server.url).target, PromptSource(tokenizer_path, "x", works=("devil",))) == form


def test_nothing_is_asked_where_no_receipt_could_be_kept(tmp_path: Path, loaded: Loaded, tokenizer_path: Path) -> None:
    (tmp_path / "file").touch()
    with ModelServer() as server:
        with pytest.raises(Refused, match="no receipt can be written"):
            have(loaded, tokenizer_path, tmp_path / "file", side(server.url))
        assert server.state["requests"] == 0


def test_the_command_measures_another_server(tmp_path: Path, loaded: Loaded) -> None:
    with ModelServer() as server:
        against = ("--against", server.url, "--model", "fake")
        words = ("--workload", str(tmp_path / "tiny.yaml"), "--recall", "none", *against)
        argv, environment, receipts = command(tmp_path, *words)
        done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert "messages" not in server.state["last"]
    assert done.returncode == 0, done.stderr
    assert "recall: not asked" in done.stdout
    (path,) = receipts.glob("2*.json")
    assert {one.name for one in receipts.iterdir()} == {path.name, f"{path.stem}.samples.gz"}
    receipt = find(receipts, path.stem)
    assert (receipt.outcome, receipt.target.kind, receipt.target.model) == ("whole", "server", "fake")
    assert receipt.target.name == server.url
    assert done.stdout.splitlines()[-1] == f"receipt: {path}"
    assert "c2" in done.stdout
    assert "r2.5" in done.stdout
    assert "tiny: c2, round 1 of 2" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_had(tmp_path: Path, loaded: Loaded, number: signal.Signals) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(path.read_text().replace("output_tokens: 3}", "output_tokens: 600}"))
    with ModelServer(interval=0.05) as server:
        against = ("--against", server.url, "--model", "fake")
        argv, environment, receipts = command(tmp_path, "--workload", str(path), *against)
        running = subprocess.Popen(argv, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert running.stderr is not None
        assert b"c2, round 1" in running.stderr.readline()
        until(lambda: server.state["requests"] >= 5)  # one for the form, two to warm up, and two that count
        running.send_signal(number)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 1, err
    (path,) = receipts.glob("2*.json")
    receipt = find(receipts, path.stem)
    assert receipt.outcome == "aborted"
    assert receipt.reasons[0] == "it was interrupted after 2 of 14 requests"
    assert (point(receipt, "c2").sent, point(receipt, "c2").failed) == (2, 2)
    assert f"receipt: {path}" in out.decode()
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("against", "models", "says"),
    [
        (("http://127.0.0.1:1/v1",), (), "1 --against and 0 --model are given"),
        ((), ("fake",), "0 --against and 1 --model are given"),
        (("127.0.0.1:1",), ("fake",), "--against '127.0.0.1:1' is no address of a server"),
        (("http://127.0.0.1:1/v1", ""), ("fake", "fake"), "--against '' is no address of a server"),
        (("http://u:secret@127.0.0.1/v1?key=secret",), ("fake",), "--against whose URL is not repeated here is no"),
        (("http://u:secret/more@127.0.0.1/v1",), ("fake",), "--against whose URL is not repeated here is no"),
        (("u:secret@127.0.0.1/v1",), ("fake",), "--against whose URL is not repeated here is no"),
        (("http://127.0.0.1:1/\udcff",), ("fake",), "--against 'http://127.0.0.1:1/\\udcff' is no address of a server"),
        (("http://127.0.0.1:1/v1",), ("",), "--model '' is no name of a model"),
        (("http://127.0.0.1:1/v1",), (" ",), "--model ' ' is no name of a model"),
        (("http://127.0.0.1:1/v1",), ("\udcff",), "--model '\\udcff' is no name of a model"),
        (("http://127.0.0.1:1/v1",), ("a\x1b[2J",), "--model 'a\\x1b[2J' is no name of a model"),
    ],
)
def test_servers_that_cannot_be_meant(against: tuple[str, ...], models: tuple[str, ...], says: str) -> None:
    session: Any = None
    with pytest.raises(UsageError) as caught:
        bench_command.against(session, bench_command.Asked(None, against, models, 1, ()))
    assert says in caught.value.findings[0].what
    assert "secret" not in str(caught.value)


def test_a_password_in_an_address_is_told_where_the_key_goes() -> None:
    session: Any = None
    with pytest.raises(UsageError) as caught:
        bench_command.against(session, bench_command.Asked(None, ("http://u:secret@box/v1",), ("fake",), 1, ()))
    (finding,) = caught.value.findings
    assert finding.why.startswith("it carries a user and a password")
    assert "a key goes into SLIMSERVE_AGAINST_KEY" in finding.do


@pytest.mark.parametrize("key", ["secret\n", "secr\u20act", "\udcff"])
def test_a_key_that_no_header_takes_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("SLIMSERVE_AGAINST_KEY", key)
    session: Any = None
    with pytest.raises(UsageError, match="SLIMSERVE_AGAINST_KEY is no key") as caught:
        bench_command.against(session, bench_command.Asked(None, ("http://box/v1",), ("fake",), 1, ()))
    assert key not in str(caught.value)


@pytest.mark.parametrize("model", [b"", b"\xff"])
def test_nothing_is_asked_for_a_model_that_no_receipt_can_name(tmp_path: Path, loaded: Loaded, model: bytes) -> None:
    with ModelServer() as server:
        argv, environment, receipts = command(tmp_path, "--workload", str(tmp_path / "tiny.yaml"))
        words = [*map(os.fsencode, argv), b"--against", server.url.encode(), b"--model", model]
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert server.state["requests"] == 0
    assert done.returncode == 2, done.stderr
    assert "is no name of a model" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(receipts.glob("2*"))


def test_a_workload_longer_than_the_context_is_refused_with_those_that_fit() -> None:
    registry = load_registry(REGISTRY, OWNED)
    subject = registry.subject(registry.profiles["tiny-bf16-box"])
    with pytest.raises(Refused) as caught:
        bench_command.fit([bench_command.workload.load("agent")], subject)
    (finding,) = caught.value.findings
    assert finding.what == "agent asks for contexts of 90,000 tokens"
    assert "chat-small" in finding.do
    assert "agent," not in finding.do
    bench_command.fit([bench_command.workload.load("chat-small")], subject)


def test_the_table_has_every_load(tmp_path: Path, loaded: Loaded, tokenizer_path: Path) -> None:
    with ModelServer() as server:
        (receipt,) = have(loaded, tokenizer_path, tmp_path, side(server.url))
    lines = bench_command.table(receipt).splitlines()
    assert lines[0].split()[1:] == ["tiny", "whole"]
    assert [line.split()[0] for line in lines[2:4]] == ["c2", "r2.5"]
    assert lines[2].split()[1] == "8/8"
    assert json.loads((tmp_path / f"{receipt.id}.json").read_text())["id"] == receipt.id
