"""The plan of a CPU against the pinned engine, started: blocks and bytes of the cache are equal, not close."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from geometry_models import HYBRID, REGISTRY, config_json

from slimserve.planner.capacity import capacity
from slimserve.planner.rank import Rank, rank_of
from slimserve.profile import Evidence, Profile, Setting
from slimserve.subject import Subject

DRIVER = Path(__file__).with_name("planner_driver.py")
PROFILE = REGISTRY.profiles["smollm2-135m-bf16-cpu"]
# More than whole blocks of either model: what is left over must not become a block.
CACHE_BYTES = 50_000_000
CASES = ("dense", "hybrid")


def setting(value: Any) -> Setting[Any]:
    return Setting(value=value, why="for a test", evidence=Evidence(derived="a test"))


def hybrid_profile() -> Profile:
    """The CPU profile, for the small hybrid."""
    changed = {"max_model_len": 4096, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": CACHE_BYTES}
    engine = replace(PROFILE.engine, **{key: setting(value) for key, value in changed.items()})
    engine = replace(engine, mamba_cache_mode=setting("align"))
    return replace(PROFILE, model=HYBRID.id, engine=engine)


def planned(case: str) -> Rank:
    """The plan's rank."""
    subject = REGISTRY.subject(PROFILE)
    if case == "hybrid":
        subject = Subject(hybrid_profile(), HYBRID, subject.platform)
    return rank_of(subject, ())


def question(case: str, smollm2_folder: Path) -> dict[str, Any]:
    profile = planned(case).subject.profile
    engine = profile.engine
    assert engine.kv_cache_memory_bytes is not None
    settings: dict[str, Any] = {
        "dtype": engine.dtype.value,
        "max_model_len": engine.max_model_len.value,
        "max_num_seqs": engine.max_num_seqs.value,
        "max_num_batched_tokens": engine.max_num_batched_tokens.value,
        "enable_prefix_caching": engine.enable_prefix_caching.value,
        "kv_cache_memory_bytes": engine.kv_cache_memory_bytes.value,
    }
    if engine.mamba_cache_mode is not None:
        settings["mamba_cache_mode"] = engine.mamba_cache_mode.value
    dense = case == "dense"
    return {
        "folder": str(smollm2_folder) if dense else None,
        "config": None if dense else config_json(HYBRID),
        "settings": settings,
    }


@pytest.fixture(scope="module")
def answers(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the engine says of each case: one process starts one engine after the other."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "cases.json").write_text(json.dumps([question(case, smollm2_folder) for case in CASES]))
    command = [sys.executable, "-P", str(DRIVER), str(folder / "cases.json"), str(folder / "answers.json")]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return dict(zip(CASES, json.loads((folder / "answers.json").read_text()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_blocks_and_bytes_are_the_engines(case: str, answers: dict[str, dict[str, Any]]) -> None:
    real, rank = answers[case], planned(case)
    held = capacity(rank, rank.sizes)
    assert held.pool_blocks == real["blocks"]
    assert held.pool_blocks * held.slab_bytes == real["allocated"]
    assert rank.cache_bytes(rank.sizes) - real["allocated"] < held.slab_bytes
    groups = [{"layers": group.layers, "block_tokens": group.block_tokens} for group in rank.caches.groups]
    assert groups == real["groups"]
