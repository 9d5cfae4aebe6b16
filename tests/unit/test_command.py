"""The command line and the environment that reach the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimserve.engine.command import OWNED, PASSED, build, flags
from slimserve.plan import Plan, WeightsOnDisk, describe, make_plan
from slimserve.registry import load_registry

GOOD = Path(__file__).parent.parent / "registry"
KEY = "sk-a-secret-that-must-not-show"


@pytest.fixture(scope="module")
def plan() -> Plan:
    registry = load_registry(GOOD, OWNED)
    subject = registry.subject(registry.profiles["expert-fp8-rack"])
    weights = WeightsOnDisk(Path("/cache/weights/expert"), ready=True, needed_bytes=0)
    return make_plan(subject, describe(subject.platform, 1 << 40), weights)


def test_false_becomes_a_flag_of_its_own() -> None:
    assert flags("enforce_eager", False) == ("--no-enforce-eager",)
    assert flags("enforce_eager", True) == ("--enforce-eager",)


def test_nested_values_become_json_with_sorted_keys() -> None:
    assert flags("engram_config", {"b": False, "a": [1, 2]}) == ("--engram-config", '{"a":[1,2],"b":false}')


@given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(min_size=1)))
def test_scalars_are_passed_as_they_are(value: object) -> None:
    flag, text = flags("x_y", value)
    assert flag == "--x-y"
    assert text == str(value)


def test_the_environment_of_the_profile_wins_and_says_so(plan: Plan) -> None:
    user = {
        "PATH": "/bin",
        "HOME": "/home/me",
        "VLLM_NO_USAGE_STATS": "0",
        "VLLM_ATTENTION_BACKEND": "X",
        "CUDA_VISIBLE_DEVICES": "5",
        "OMP_NUM_THREADS": "3",
        "PYTHONPATH": "/evil",
        "EDITOR": "vi",
        "AWS_SECRET_ACCESS_KEY": "x",
    }
    built = build(plan, host="127.0.0.1", port=8000, cache=Path("/cache"), user_environment=user)
    assert built.env["VLLM_NO_USAGE_STATS"] == "1"
    assert built.env["PATH"] == "/bin"
    for name in ("VLLM_ATTENTION_BACKEND", "OMP_NUM_THREADS", "PYTHONPATH", "EDITOR", "AWS_SECRET_ACCESS_KEY"):
        assert name not in built.env
    notes = "\n".join(built.notes)
    for name in (
        "VLLM_NO_USAGE_STATS",
        "VLLM_ATTENTION_BACKEND",
        "OMP_NUM_THREADS",
        "PYTHONPATH",
    ):
        assert f"your {name} " in notes
    assert "EDITOR" not in notes


def test_the_key_travels_by_environment_alone(plan: Plan) -> None:
    built = build(plan, host="127.0.0.1", port=8000, cache=Path("/cache"), user_environment={}, api_key=KEY)
    assert built.env["VLLM_API_KEY"] == KEY
    assert not any(KEY in part for part in built.argv)
    assert KEY not in str(built.shown_env())
    assert KEY not in "".join(built.notes)


def test_the_users_own_key_variable_is_not_passed_on(plan: Plan) -> None:
    user = {"SLIMSERVE_API_KEY": KEY, "VLLM_API_KEY": "other"}
    built = build(plan, host="127.0.0.1", port=8000, cache=Path("/cache"), user_environment=user)
    assert KEY not in built.env.values()
    assert "other" not in built.env.values()
    assert "other" not in "".join(built.notes)


def test_loopback_no_origins_no_remote_code_one_server(plan: Plan) -> None:
    argv = build(plan, host="127.0.0.1", port=8000, cache=Path("/cache"), user_environment={}).argv
    joined = " ".join(argv)
    assert "--host 127.0.0.1" in joined
    assert "--allowed-origins []" in joined
    assert "--no-trust-remote-code" in joined
    assert "--api-server-count 1" in joined
    assert "--api-key" not in joined


def test_devices_are_named_by_uuid(plan: Plan) -> None:
    env = build(plan, host="127.0.0.1", port=8000, cache=Path("/cache"), user_environment={}).env
    assert env["CUDA_VISIBLE_DEVICES"] == ",".join(gpu.uuid for gpu in plan.gpus)


def test_caches_are_private_to_version_and_profile(plan: Plan) -> None:
    env = build(plan, host="127.0.0.1", port=8000, cache=Path("/cache"), user_environment={}).env
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME"):
        assert env[name].startswith("/cache/engine/vllm-0.32.0/expert-fp8-rack/")


def test_nothing_is_both_passed_and_owned() -> None:
    assert not PASSED & OWNED
