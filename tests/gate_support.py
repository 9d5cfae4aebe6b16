"""Plans whose engines run on any CPU, for the tests of the gate: a hybrid without weights, and the default profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from geometry_models import FLAGSHIP, HYBRID
from plan_support import REGISTRY, setting, with_engine

from quixicore import dispatch
from quixicore.engine import GROUPS
from slimserve.model import Model
from slimserve.plan import Plan, WeightsOnDisk, describe, make_plan
from slimserve.profile import Engram, Profile, Speculation
from slimserve.subject import Subject

PROFILE = REGISTRY.profiles["smollm2-135m-bf16-cpu"]
# What each process of an engine of the hybrid's plan showed, written by tests/engine/test_gate_real.py.
RESOLVED = Path(__file__).with_name("gate_resolved.json")
# The engine's CPU kernels compute with states of no fewer than 128 keys.
MODEL = replace(HYBRID, geometry=replace(HYBRID.geometry, linear_key_head_dim=128, linear_value_head_dim=128))


def hybrid_plan(folder: Path, **changed: Any) -> Plan:
    """The plan of the CPU profile for a small hybrid that lies in `folder`, with other values of `engine`."""
    sizes = {"max_model_len": 4096, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 150_000_000}
    profile = with_engine(PROFILE, **{"mamba_cache_mode": "align", "load_format": "dummy", **sizes, **changed})
    return plan_of(replace(profile, model=MODEL.id), MODEL, folder)


def flagship_plan(folder: Path, *, drafts: int = 0, **changed: Any) -> Plan:
    """The plan of the CPU profile for a small Flash-Next that lies in `folder`, with our references in its seats."""
    sizes = {"max_model_len": 2048, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 160_000_000}
    own = {"mamba_cache_mode": "align", "load_format": "dummy", "engram_config": Engram(cpu_offload=False)}
    speculation = Speculation(method="mtp", num_speculative_tokens=drafts) if drafts else None
    profile = with_engine(PROFILE, **sizes, **own, speculative_config=speculation, **changed)
    seats = {group: setting(dispatch.REFERENCE) for group in GROUPS}
    second_runner = {"VLLM_USE_V2_MODEL_RUNNER": setting("1")}
    profile = replace(profile, model=FLAGSHIP.id, seats=seats, environment={**profile.environment, **second_runner})
    return plan_of(profile, FLAGSHIP, folder)


def dense_plan(folder: Path) -> Plan:
    """The plan of the default profile with a cache that is quickly there."""
    profile = with_engine(PROFILE, max_model_len=2048, kv_cache_memory_bytes=400_000_000)
    return plan_of(profile, REGISTRY.models[PROFILE.model], folder)


def plan_of(profile: Profile, model: Model, folder: Path) -> Plan:
    """The plan of `profile` for requests of 1,024 tokens."""
    admission = replace(profile.admission, slot_context_tokens=setting(1024))
    subject = Subject(replace(profile, admission=admission), model, REGISTRY.platforms[profile.platform])
    weights = WeightsOnDisk(folder, ready=True, needed_bytes=0)
    return make_plan(subject, describe(subject.platform, 1 << 40), weights)
