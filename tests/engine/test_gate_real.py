"""The gate in the real engine on the CPU: as planned it serves, and whatever it changes by itself ends the start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from geometry_models import HYBRID, REGISTRY, config_json
from server_support import ROOT, free_port
from test_plan_real import PROFILE, hybrid_profile, setting

from slimserve.engine import command, door
from slimserve.engine.attempt import Launch
from slimserve.engine.gate import expected
from slimserve.engine.gate.words import RESOLVED_NAME, canonical
from slimserve.engine.supervisor import Supervisor
from slimserve.errors import Refused
from slimserve.model import Model
from slimserve.plan import Plan, WeightsOnDisk, describe, make_plan
from slimserve.policies import Subject
from slimserve.profile import Profile

SECONDS = 250.0
# The engine's CPU kernels compute with states of no fewer than 128 keys.
WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
MODEL = replace(HYBRID, geometry=replace(HYBRID.geometry, **WIDE))
Change = Callable[[Launch], Launch]


@dataclass
class Endpoint:
    """A supervisor of a launch that may differ from its plan, and what it said."""

    launch: Launch
    said: list[str]

    def serve(self) -> None:
        """Start it, see it ready, and stop it."""
        with Supervisor(self.launch, self.said.append):
            pass

    def refusals(self) -> list[str]:
        """What the start was refused for."""
        with pytest.raises(Refused) as refused:
            self.serve()
        assert not any(line.startswith("ready") for line in self.said)
        return [finding.what for finding in refused.value.findings]

    @property
    def resolved(self) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.launch.run_folder / RESOLVED_NAME).read_text())
        return found


def hybrid_folder(folder: Path) -> Path:
    """A small hybrid without weights: what the engine needs to make them up, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps(config_json(MODEL)))
    return folder


def plan_of(profile: Profile, model: Model, folder: Path) -> Plan:
    """The plan of `profile` for requests of 1,024 tokens."""
    admission = replace(profile.admission, slot_context_tokens=setting(1024))
    subject = Subject(replace(profile, admission=admission), model, REGISTRY.platforms[profile.platform])
    weights = WeightsOnDisk(folder, ready=True, needed_bytes=0)
    return make_plan(subject, describe(subject.platform, 1 << 40), weights)


def endpoint(plan: Plan, home: Path, *more: str, **variables: str) -> Endpoint:
    """What `plan` starts, with further arguments and variables that it knows nothing of."""
    control = home / "runs/run/engine.sock"
    admission = door.configure(plan, control=control)
    user = {"PATH": os.environ["PATH"], "HOME": str(home)}
    built = command.build(plan, admission, cache=home / "cache", user_environment=user)
    serve = plan.subject.profile.serve
    launch = Launch(
        argv=(*built.argv, *more),
        env={**built.env, "PYTHONPATH": str(ROOT), **variables},
        admission=admission,
        control=control,
        host="127.0.0.1",
        port=free_port(),
        model_name=plan.subject.profile.id,
        run_folder=home / "runs/run",
        load_seconds=SECONDS,
        warmup_seconds=60.0,
        drain_seconds=serve.drain_seconds.value,
        stall_seconds=serve.stall_seconds.value,
        stop_seconds=serve.stop_seconds.value,
        profile_id=plan.subject.profile.id,
        processes=built.processes,
    )
    return Endpoint(launch, [])


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The plan of a small hybrid."""
    folder = hybrid_folder(tmp_path_factory.mktemp("hybrid") / "model")
    profile = hybrid_profile()
    engine = replace(profile.engine, kv_cache_memory_bytes=setting(150_000_000))
    return plan_of(replace(profile, engine=engine), MODEL, folder)


@pytest.fixture
def dense(smollm2_folder: Path) -> Plan:
    """The plan of the default profile with a cache that is quickly there."""
    changed = {"max_model_len": 2048, "kv_cache_memory_bytes": 400_000_000}
    engine = replace(PROFILE.engine, **{key: setting(value) for key, value in changed.items()})
    return plan_of(replace(PROFILE, engine=engine), REGISTRY.models[PROFILE.model], smollm2_folder)


def settings_of(refusals: list[str]) -> set[str]:
    return {what.split(":", 1)[0] for what in refusals}


def test_a_hybrid_as_planned_serves_and_its_configuration_is_written_down(hybrid: Plan, tmp_path: Path) -> None:
    """Every start resolves the same, to the byte; both start from nothing."""
    digests = []
    for run in ("first", "second"):
        home = tmp_path / run
        home.mkdir()
        started = endpoint(hybrid, home, "--load-format", "dummy")
        started.serve()
        resolved = started.resolved
        digests.append(resolved["sha256"])
        if keep := os.environ.get("SLIMSERVE_KEEP_RESOLVED"):
            Path(keep).write_text(json.dumps(resolved, indent=1, sort_keys=True) + "\n")
    assert digests[0] == digests[1]
    assert any(str(digests[0])[:12] in line for line in started.said)
    shown = resolved["resolved"]
    assert isinstance(shown, dict)
    assert shown["settings"].keys() == set(expected.processes(hybrid))
    text = canonical(resolved)
    assert str(tmp_path) not in text
    # The states' own block size, where the engine's `block_size` is what was asked for before it was raised.
    groups = shown["settings"]["rank-0-0"]["cache_groups"]
    assert ["state", hybrid.room.capacity.block_tokens] in groups


def test_what_the_engine_is_told_otherwise_is_a_line_each(dense: Plan, tmp_path: Path) -> None:
    more = ["--no-enable-prefix-caching", "--max-model-len", "1024", "--block-size", "64", "--max-num-seqs", "4"]
    refused = endpoint(dense, tmp_path, *more, VLLM_CPU_KVCACHE_SPACE="1").refusals()
    assert settings_of(refused) == {
        "enable_prefix_caching",
        "max_model_len",
        "max_num_seqs",
        "cache_groups",
        "cache_blocks",
        "block_bytes",
    }
    assert "max_model_len: planned 2048, resolved 1024 in rank-0-0" in refused


def test_an_environment_that_makes_a_hybrid_fall_back_is_seen(hybrid: Plan, tmp_path: Path) -> None:
    changed = endpoint(hybrid, tmp_path, "--load-format", "dummy", VLLM_USE_BREAKABLE_CUDAGRAPH="1")
    assert settings_of(changed.refusals()) == {"breakable_graphs"}


def test_a_generation_config_that_changes_the_sampling_is_seen(dense: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in dense.weights.folder.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 5}))
    other = replace(dense, weights=replace(dense.weights, folder=folder))
    (refused,) = endpoint(other, tmp_path).refusals()
    assert refused.startswith("sampling_defaults: planned")
    assert '"top_k": 5' in refused


@pytest.mark.parametrize("plugins", ["", "another"])
def test_without_the_gate_in_its_processes_it_does_not_come_up(dense: Plan, tmp_path: Path, plugins: str) -> None:
    (refused,) = endpoint(dense, tmp_path, VLLM_PLUGINS=plugins).refusals()
    assert refused == "the gate has not run in api, core-0, rank-0-0"
