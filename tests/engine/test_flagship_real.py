"""Flash-Next's architecture on the real engine and a processor: through the gate, with our references in its seats."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from gate_support import flagship_plan
from geometry_models import FLAGSHIP
from launch_support import checkpoint_folder, endpoint

from quixicore import dispatch
from quixicore.engine import GROUPS
from slimserve.engine.supervisor import Supervisor

TOKENS = [3 + number % 500 for number in range(0, 7 * 400, 7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_folder(tmp_path_factory.mktemp("flagship") / "model", FLAGSHIP)


@pytest.mark.parametrize("drafts", [0, 2])
def test_as_planned_it_serves_and_finds_its_prefixes(drafts: int, folder: Path, tmp_path: Path) -> None:
    started = endpoint(flagship_plan(folder, drafts=drafts), tmp_path)
    with Supervisor(started.launch, started.said.append):
        found = []
        for _ in range(2):
            answer = httpx.post(
                f"http://127.0.0.1:{started.launch.port}/v1/completions",
                json={
                    "model": started.launch.model_name,
                    "prompt": TOKENS,
                    "max_tokens": 12,
                    "min_tokens": 12,
                    "seed": 7,
                    "return_token_ids": True,
                },
                timeout=120,
            ).json()
            usage = answer["usage"]
            assert usage["completion_tokens"] == 12
            found.append((usage["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["token_ids"]))
    (nothing, first), (much, second) = found
    assert (nothing, first) == (0, second)
    assert much >= 128
    settings = started.resolved["resolved"]["settings"]["rank-0-0"]
    assert settings["seats"] == dict.fromkeys(GROUPS, dispatch.REFERENCE)
    assert settings["model_runner"] == "v2"


def test_an_engine_whose_seats_are_others_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """What was planned for all seats, and is told to sit in some of them."""
    told = json.dumps({group: dispatch.REFERENCE for group in GROUPS if group != "gdn"})
    refused = endpoint(flagship_plan(folder), tmp_path, SLIMSERVE_SEATS=told).refusals()
    assert [what for what in refused if what.startswith("seats:")], refused
