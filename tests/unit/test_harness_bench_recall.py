"""`--bench` and the recall battery that ends it, on fake servers that read, or only seem to."""

from __future__ import annotations

import io
import signal
import subprocess
import typing
from dataclasses import replace
from pathlib import Path

import pytest
from bench_support import command, save_tokenizer, side, written
from harness_support import ModelServer
from waiting import until

from harness import recall_part
from harness.bench import bench
from harness.client import Target
from harness.prompts import PromptSource
from harness.raw import read_probes
from harness.recall import MEDIUM, PRESETS, SMALL
from harness.receipt import Receipt, all_in, find
from harness.verify import verify
from slimserve import paths
from slimserve.engine.variables import OWNED
from slimserve.errors import Refused, UsageError
from slimserve.model import RecallPreset
from slimserve.registry_files import load_registry

ROOT = Path(__file__).parents[2]
REGISTRY = ROOT / "tests" / "registry"


def have(tmp_path: Path, *servers: ModelServer) -> tuple[subprocess.CompletedProcess[str], list[Receipt]]:
    """The command against these servers, and its receipts in their order."""
    loaded = written(tmp_path)
    words = [word for server in servers for word in ("--against", server.url, "--model", "fake")]
    argv, environment, folder = command(tmp_path, "--workload", str(tmp_path / f"{loaded.workload.id}.yaml"), *words)
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    by_name = {receipt.target.name: receipt for receipt in all_in(folder)[0]}
    for receipt in by_name.values():
        assert verify(receipt, folder) == []
        assert len(read_probes(folder / receipt.samples.file)) == sum(rate.asked for rate in receipt.recall.values())
    return done, [by_name[server.url] for server in servers]


def test_a_right_server_is_said_to_be_right(tmp_path: Path) -> None:
    with ModelServer(reads="honest") as server:
        done, (receipt,) = have(tmp_path, server)
    assert done.returncode == 0, done.stdout + done.stderr
    assert receipt.outcome == "whole"
    assert receipt.battery is not None
    assert (receipt.battery.preset, receipt.battery.verdict, receipt.battery.findings) == ("small", "pass", ())
    assert {way: rate.asked for way, rate in receipt.recall.items()} == {"cold": 18, "hit": 18, "known-answers": 20}
    assert all(rate.right == rate.asked for rate in receipt.recall.values())
    assert "recall (small battery): pass" in done.stdout
    assert f"recall: the small battery, 127.0.0.1-{server.port}" in done.stderr


@pytest.mark.parametrize(
    ("mode", "says"), [("repeats", "path cold: 0 of 18 right"), ("stale", "hold a marker of another conversation")]
)
def test_a_fast_and_wrong_server_is_not_overlooked(tmp_path: Path, mode: str, says: str) -> None:
    with ModelServer(reads=mode) as server:
        done, (receipt,) = have(tmp_path, server)
    # What was measured stays whole, and nobody gets to see it without this.
    assert receipt.outcome == "whole"
    assert receipt.battery is not None
    assert receipt.battery.verdict == "fail"
    assert any(says in finding for finding in receipt.battery.findings)
    assert done.returncode == 1
    assert "recall (small battery): FAIL, answers are proved wrong" in done.stdout
    assert says in done.stdout
    assert done.stderr.splitlines()[-1].startswith(f"slimserve: recall fail, {server.url}: answers are proved wrong")


def test_what_is_not_proved_is_said_and_breaks_nothing(tmp_path: Path) -> None:
    with ModelServer(reads="honest no-cache") as server:
        done, (receipt,) = have(tmp_path, server)
    assert done.returncode == 0
    assert receipt.outcome == "whole"
    assert receipt.recall_verdict == "inconclusive"
    assert "recall (small battery): INCONCLUSIVE" in done.stdout
    assert "not one prompt token came from a cache" in done.stdout
    assert done.stderr.splitlines()[-1].startswith(f"slimserve: recall inconclusive, {server.url}: neither is proved")


def test_each_of_two_servers_is_asked(tmp_path: Path) -> None:
    with ModelServer(reads="honest") as right, ModelServer(reads="repeats") as wrong:
        done, receipts = have(tmp_path, right, wrong)
    assert done.returncode == 1
    assert [receipt.battery and receipt.battery.verdict for receipt in receipts] == ["pass", "fail"]
    assert receipts[0].battery is not None
    assert receipts[1].battery is not None
    assert receipts[0].battery.seed != receipts[1].battery.seed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_battery_keeps_what_was_measured(tmp_path: Path, number: signal.Signals) -> None:
    loaded = written(tmp_path)
    with ModelServer(reads="honest", delay=0.1) as server:
        words = ("--workload", str(tmp_path / f"{loaded.workload.id}.yaml"), "--against", server.url, "--model", "fake")
        argv, environment, folder = command(tmp_path, *words)
        running = subprocess.Popen(argv, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        until(lambda: "messages" in server.state["last"], 60)
        running.send_signal(number)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 1, err
    assert b"Traceback" not in err
    ((receipt,), _) = all_in(folder)
    assert receipt.outcome == "whole"
    assert receipt.battery is not None
    assert (receipt.battery.verdict, receipt.battery.findings) == ("aborted", ("it was interrupted",))
    assert receipt.recall == {}
    assert b"recall (small battery): ABORTED" in out
    assert verify(receipt, folder) == []


def test_a_run_that_proves_nothing_is_not_asked(tmp_path: Path) -> None:
    loaded = written(tmp_path)
    source = PromptSource(save_tokenizer(tmp_path / "tokenizer.json"), 1, works=loaded.workload.works)
    with ModelServer(reads="honest", usage={"prompt_tokens": 5}) as server:
        recall = recall_part.Recall(recall_part.Preset("small", SMALL), io.StringIO())
        (path,) = bench(loaded, [side(server.url)], source, "4" * 64, 1, tmp_path, io.StringIO(), recall)
        assert "messages" not in server.state["last"]
    receipt = find(tmp_path, path.stem)
    assert (receipt.outcome, receipt.battery) == ("void", None)


def test_a_server_is_asked_once_for_all_workloads(tmp_path: Path) -> None:
    loaded = written(tmp_path)
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json")
    recall = recall_part.Recall(recall_part.Preset("small", SMALL), io.StringIO())
    with ModelServer(reads="honest") as server:
        receipts = []
        for seed in (1, 2):
            source = PromptSource(tokenizer, seed, works=loaded.workload.works)
            (path,) = bench(loaded, [side(server.url)], source, "4" * 64, seed, tmp_path, io.StringIO(), recall)
            receipts.append(find(tmp_path, path.stem))
        assert "messages" not in server.state["last"]
    first, second = receipts
    assert first.recall_verdict == "pass"
    assert (second.battery, second.recall) == (first.battery, first.recall)
    assert verify(second, tmp_path) == []


def test_the_acceptance_length_of_the_battery_is_its_own(tmp_path: Path) -> None:
    with ModelServer(reads="honest", accepts=1.5) as server:
        done, (receipt,) = have(tmp_path, server)
    assert receipt.battery is not None
    # The first question is the plain one of the calibration.
    assert receipt.battery.server.drafts == 1 + sum(rate.asked for rate in receipt.recall.values())
    assert receipt.battery.server.acceptance_length == 2.5
    assert "acceptance length: 2.50" in done.stdout


def test_a_server_that_is_gone_leaves_it_open() -> None:
    with ModelServer() as server:
        gone = Target(server.url, "fake")
    battery, probes = recall_part.ask(recall_part.Preset("small", SMALL), gone, "fake", lambda: None, io.StringIO())
    assert (battery.verdict, probes) == ("inconclusive", ())
    assert battery.findings[0].startswith("it broke off: nothing answers at")


def test_a_profile_gets_the_battery_that_suits_it() -> None:
    registry = load_registry(paths.profiles_folder())
    chosen = {name: recall_part.choose(None, registry.subject(profile)) for name, profile in registry.profiles.items()}
    small, standard = chosen["smollm2-135m-bf16-cpu"], chosen["qwen38fn-fp8-h200x1"]
    assert small == recall_part.Preset("small", SMALL)
    assert standard == recall_part.Preset("standard", PRESETS["standard"])
    # Of its dummy weights no answer is right.
    assert chosen["qwen38fn-slice12-fp8-h200x1"] is None
    # Its model says so.
    assert chosen["flashlet-bf16-cpu"] == recall_part.Preset("medium", MEDIUM)
    assert {preset.name for preset in chosen.values() if preset} == {"small", "medium", "standard"}
    assert recall_part.choose("none", registry.subject(registry.default)) is None


def test_what_a_model_states_is_a_battery() -> None:
    assert typing.get_args(RecallPreset) == tuple(PRESETS)


def test_a_context_too_short_for_what_the_model_states_gets_the_small_battery() -> None:
    registry = load_registry(REGISTRY, OWNED)
    tiny = registry.subject(registry.profiles["tiny-bf16-box"])
    tiny = replace(tiny, model=replace(tiny.model, recall="medium"))
    assert tiny.profile.engine.max_model_len.value < MEDIUM.longest_tokens
    assert recall_part.choose(None, tiny) == recall_part.Preset("small", SMALL)


def test_a_battery_that_cannot_be_asked_is_refused() -> None:
    registry = load_registry(paths.profiles_folder())
    sliced = registry.subject(registry.profiles["qwen38fn-slice12-fp8-h200x1"])
    with pytest.raises(Refused, match="its weights are dummies"):
        recall_part.choose("standard", sliced)
    fakes = load_registry(REGISTRY, OWNED)
    tiny = fakes.subject(fakes.profiles["tiny-bf16-box"])
    with pytest.raises(Refused, match="contexts of up to") as caught:
        recall_part.choose("standard", tiny)
    (finding,) = caught.value.findings
    assert (finding.why, finding.do) == (
        "tiny-bf16-box takes 2,048 (engine.max_model_len)",
        "use --recall small or none",
    )
    chosen = recall_part.choose("standard", tiny, launched=False)
    assert chosen is not None
    assert chosen.settings.tool_conversations == 0
    with pytest.raises(UsageError, match="--recall 'smal' is no battery") as wrong:
        recall_part.choose("smal", tiny)
    assert "did you mean small?" in wrong.value.findings[0].why
