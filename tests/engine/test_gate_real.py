"""The gate in the real engine on the CPU: as planned it serves, and whatever it changes by itself ends the start."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from gate_support import MODEL, RESOLVED, dense_plan, hybrid_plan
from launch_support import checkpoint_folder, endpoint

from slimserve.engine.gate import expected
from slimserve.engine.gate.words import canonical
from slimserve.plan import Plan


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The plan of a small hybrid."""
    return hybrid_plan(checkpoint_folder(tmp_path_factory.mktemp("hybrid") / "model", MODEL))


@pytest.fixture
def dense(smollm2_folder: Path) -> Plan:
    """The plan of the default profile."""
    return dense_plan(smollm2_folder)


@pytest.fixture
def home(tmp_path: Path, engine_cache: Path) -> Path:
    """A folder for an engine that need not start from nothing."""
    (tmp_path / "cache").symlink_to(engine_cache)
    return tmp_path


def linked(plan: Plan, home: Path) -> Path:
    """A folder with the weights of `plan`, in which a file can be another."""
    folder = home / "model"
    folder.mkdir()
    for file in plan.weights.folder.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)
    return folder


def settings_of(refusals: list[str]) -> set[str]:
    return {what.split(":", 1)[0] for what in refusals}


def test_a_hybrid_as_planned_serves_and_its_configuration_is_written_down(hybrid: Plan, tmp_path: Path) -> None:
    """Every start resolves the same, to the byte; both start from nothing."""
    digests = []
    for run in ("first", "second"):
        home = tmp_path / run
        home.mkdir()
        started = endpoint(hybrid, home)
        started.serve()
        resolved = started.resolved
        digests.append(resolved["sha256"])
    assert digests[0] == digests[1]
    assert any(digests[0][:12] in line for line in started.said)
    assert str(tmp_path) not in canonical(resolved)
    settings = resolved["resolved"]["settings"]
    assert settings.keys() == set(expected.processes(hybrid))
    seen = {process: {**values, **resolved["measured"][process]} for process, values in settings.items()}
    if os.environ.get("WRITE_RESOLVED"):  # for whoever pins another engine
        RESOLVED.write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n")
    assert seen == json.loads(RESOLVED.read_text()), "the unit tests compare with what another engine resolves"


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "data_parallel_size"])
def test_each_rank_and_each_replica_gives_its_word(hybrid: Plan, home: Path, parallel: str) -> None:
    both = hybrid_plan(hybrid.weights.folder, **{parallel: 2})
    assert len(expected.processes(both)) == (4 if parallel == "tensor_parallel_size" else 5)
    started = endpoint(both, home)
    started.serve()
    assert started.resolved["resolved"]["settings"].keys() == set(expected.processes(both))


def test_what_the_engine_is_told_otherwise_is_a_line_each(dense: Plan, home: Path) -> None:
    more = ["--no-enable-prefix-caching", "--max-model-len", "1024", "--block-size", "64", "--max-num-seqs", "4"]
    refused = endpoint(dense, home, *more, VLLM_CPU_KVCACHE_SPACE="1").refusals()
    assert settings_of(refused) == {
        "enable_prefix_caching",
        "max_model_len",
        "max_num_seqs",
        "kv_cache_memory_bytes",
        "cache_groups",
        "cache_blocks",
        "block_bytes",
    }
    assert "max_model_len: planned 2048, resolved 1024 in rank-0-0" in refused


def test_what_makes_a_hybrid_fall_back_is_a_line_each(hybrid: Plan, home: Path) -> None:
    """Breakable graphs by the environment, states in another type, denser checkpoints (engine's silent changes)."""
    more = ["--mamba-ssm-cache-dtype", "bfloat16", "--prefix-cache-retention-interval", "None"]
    changed = endpoint(hybrid, home, *more, VLLM_USE_BREAKABLE_CUDAGRAPH="1")
    assert settings_of(changed.refusals()) == {
        "breakable_graphs",
        "mamba_ssm_cache_dtype",
        "prefix_cache_retention_interval",
        "cache_groups",
        "cache_blocks",
        "block_bytes",
    }


def test_one_weight_of_all_that_is_no_number_is_named(dense: Plan, home: Path) -> None:
    """In a tensor that the engine packs for its kernels while it loads, so that nobody could see it later."""
    tensor = "model.layers.17.mlp.down_proj.weight"
    folder = linked(dense, home)
    data = bytearray((folder / "model.safetensors").read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    first, last = json.loads(data[8:begin])[tensor]["data_offsets"]
    middle = begin + (first + last) // 4 * 2
    data[middle : middle + 2] = b"\xc0\x7f"  # NaN in bfloat16
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(data)
    (refused,) = endpoint(replace(dense, weights=replace(dense.weights, folder=folder)), home).refusals()
    (folder / "model.safetensors").unlink()  # 269 MB
    found = f'["{tensor}: 1 of {(last - first) // 2} values"]'
    assert refused == f"not_finite_weights: planned [], resolved {found} in rank-0-0"


def test_what_the_api_server_makes_of_a_model_is_a_line_each(dense: Plan, home: Path) -> None:
    """A generation config that takes the sampling over; a tool parser and template arguments of somebody's."""
    folder = linked(dense, home)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 5}))
    other = replace(dense, weights=replace(dense.weights, folder=folder))
    more = ["--tool-call-parser", "pythonic", "--enable-auto-tool-choice"]
    refused = endpoint(other, home, *more, "--default-chat-template-kwargs", '{"enable_thinking": false}').refusals()
    assert settings_of(refused) == {
        "sampling_defaults",
        "tool_call_parser",
        "enable_auto_tool_choice",
        "default_chat_template_kwargs",
    }
    (sampling,) = (line for line in refused if line.startswith("sampling_defaults"))
    assert '"top_k": 5' in sampling


@pytest.mark.parametrize("plugins", ["", "another"])
def test_without_the_gate_in_its_processes_it_does_not_come_up(dense: Plan, home: Path, plugins: str) -> None:
    (refused,) = endpoint(dense, home, VLLM_PLUGINS=plugins).refusals()
    assert refused == "the gate has not run in api, core-0, rank-0-0"
