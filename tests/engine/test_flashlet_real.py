"""The bundled model on the real engine: it remembers, finds its prefixes, drafts, and needs its indexer for that."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from gate_support import WeightsOnDisk, describe, make_plan
from launch_support import Endpoint as Started
from launch_support import endpoint
from plan_support import REGISTRY
from server_support import ROOT

from harness import counters
from harness.recall.battery import run_battery
from harness.recall.conversation import Shape, statement, system
from harness.recall.markers import Draw, Fact
from harness.recall.scoring import rates_of
from harness.recall.settings import MEDIUM
from harness.recall.text import passage
from slimserve.client_faults import Endpoint
from slimserve.engine.attempt import Launch
from slimserve.engine.supervisor import Supervisor
from slimserve.subject import Subject

PROFILE = REGISTRY.profiles["flashlet-bf16-cpu"]
# All at once: a step then computes rows of many requests together.
SETTINGS = replace(MEDIUM, shapes=(Shape(2048), Shape(1024)), pairs=4, known=6, concurrency=8)
SHUFFLED = """
import runpy
import torch
from quixicore.ops.qsa import reference
reference.scores = lambda queries, keys: torch.rand(len(queries), len(keys))
runpy.run_module("slimserve.engine.entry", run_name=__name__)
"""


def started(home: Path) -> Started:
    subject = Subject(PROFILE, REGISTRY.models[PROFILE.model], REGISTRY.platforms[PROFILE.platform])
    weights = WeightsOnDisk(ROOT / "profiles/weights/flashlet-bf16", ready=True, needed_bytes=0)
    return endpoint(make_plan(subject, describe(subject.platform, 1 << 40), weights), home)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    made = started(tmp_path_factory.mktemp("flashlet"))
    with Supervisor(made.launch, made.said.append):
        yield made.launch


def url(launch: Launch) -> str:
    return f"http://127.0.0.1:{launch.port}/v1"


def metrics(launch: Launch) -> str:
    transport = httpx.HTTPTransport(uds=str(launch.control))
    with httpx.Client(transport=transport) as client:
        return client.get("http://engine/metrics").text


def test_a_marker_of_the_fourth_turn_is_recalled_at_the_eighth(served: Launch) -> None:
    """Each turn is longer than a block, so that each finds what the turns before have left."""
    draw = Draw(20)
    fact = Fact("lighthouse", draw.code(), None)
    turns = [" ".join(passage(draw.random, 110)) for _ in range(7)]
    turns[3] += f" {statement(fact)}"
    turns.append(f"What is the code of the {fact.label}? Answer with the code alone.")
    messages, found = [system(draw.salt())], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        body = {"model": PROFILE.id, "messages": messages, "max_tokens": 24}
        answer = httpx.post(f"{url(served)}/chat/completions", json=body, timeout=120).json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert messages[-1]["content"].strip(" .") == fact.code
    assert found[0] == 0
    assert all(before < after for before, after in itertools.pairwise(found[1:])), found


def test_the_recall_battery_passes_cold_and_on_hits_and_drafts_are_accepted(served: Launch) -> None:
    before = counters.reading(lambda: metrics(served))
    report = run_battery(Endpoint(url(served), PROFILE.id), SETTINGS, seed=4)
    counts = counters.counted(before, counters.reading(lambda: metrics(served)))
    rates = rates_of(report.probes)
    assert rates["cold"].right / rates["cold"].asked >= 0.95, report.table()
    assert rates["hit"].right / rates["hit"].asked >= 0.95, report.table()
    assert counts.acceptance_length is not None
    assert counts.acceptance_length >= 2.0


def test_with_its_selection_shuffled_it_remembers_little(tmp_path: Path) -> None:
    made = started(tmp_path)
    script = tmp_path / "shuffled.py"
    script.write_text(SHUFFLED)
    argv = made.launch.argv
    assert argv[1:4] == ("-P", "-m", "slimserve.engine.entry")
    launch = replace(made.launch, argv=(sys.executable, "-P", str(script), *argv[4:]))
    with Supervisor(launch, made.said.append):
        settings = replace(SETTINGS, shapes=SETTINGS.shapes[:1], pairs=1, known=0)
        report = run_battery(Endpoint(url(launch), PROFILE.id), settings, seed=4)
    rates = rates_of(report.probes)
    asked = [rates["cold"], rates["hit"]]
    assert sum(group.right for group in asked) / sum(group.asked for group in asked) < 0.5, report.table()
