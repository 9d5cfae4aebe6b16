"""The command line and the environment that reach the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimserve.admission.config import Config
from slimserve.engine import door
from slimserve.engine.command import PASSED, Command, build, flags
from slimserve.engine.variables import ADMISSION_VARIABLE, OWNED
from slimserve.exposure import Keys
from slimserve.plan import Plan, WeightsOnDisk, describe, make_plan
from slimserve.registry_files import load_registry

GOOD = Path(__file__).parent.parent / "registry"
CONTROL = Path("/run/engine.sock")
HASH = "5e" * 32


@pytest.fixture(scope="module")
def plan() -> Plan:
    registry = load_registry(GOOD, OWNED)
    subject = registry.subject(registry.profiles["expert-fp8-rack"])
    weights = WeightsOnDisk(Path("/cache/weights/expert"), ready=True, needed_bytes=0)
    return make_plan(subject, describe(subject.platform, 1 << 40), weights)


def made(plan: Plan, user: dict[str, str] | None = None, **settings: Any) -> Command:
    admission = door.configure(plan, control=CONTROL, **settings)
    return build(plan, admission, cache=Path("/cache"), user_environment=user or {})


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
    built = made(plan, user)
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


def test_hashes_of_keys_are_in_no_argv_and_not_shown(plan: Plan) -> None:
    built = made(plan, keys=Keys(None, True, {"environment": HASH}))
    assert built.admission.key_hashes == {"environment": HASH}
    for seen in (built.argv, built.shown_env(), built.env, built.notes, built.rows):
        assert HASH not in str(seen)


def test_the_users_own_keys_are_not_passed_on(plan: Plan) -> None:
    built = made(plan, {"SLIMSERVE_API_KEY": "sk-one", "VLLM_API_KEY": "sk-other"})
    seen = [*built.env.values(), *built.notes]
    assert not any(key in text for key in ("sk-one", "sk-other") for text in seen)


def test_no_port_no_origins_no_remote_code_one_server(plan: Plan) -> None:
    argv = made(plan, origins=("https://example.org",)).argv
    joined = " ".join(argv)
    assert f"--uds {CONTROL}" in joined
    assert not {"--host", "--port", "--api-key"} & set(argv)
    assert "--allowed-origins []" in joined  # the door answers for origins
    assert "--no-trust-remote-code" in joined
    assert "--api-server-count 1" in joined
    assert "--middleware slimserve.admission.middleware.Admission" in joined


def test_the_door_is_what_the_profile_says(plan: Plan) -> None:
    profile, model = plan.subject.profile, plan.subject.model
    file = Path("/etc/keys")
    got = made(plan, keys=Keys(file, False, {}), origins=("https://example.org",)).admission
    assert got.max_in_flight == profile.admission.max_in_flight.value
    assert got.max_model_len == profile.engine.max_model_len.value
    assert (got.control, got.keys_file, got.origins) == (str(CONTROL), str(file), ("https://example.org",))
    assert (got.thinking is not None) == ("thinking" in model.traits)
    assert got.listen_fd is None
    assert not got.keys_file_awaited
    assert made(plan, keys=Keys(file, True, {})).admission.keys_file_awaited
    assert Config(**vars(got)) == got


def test_what_the_engine_and_its_door_are_told_has_reasons(plan: Plan) -> None:
    built = made(plan)
    reasons = {row.key: row.evidence for row in built.rows}
    assert reasons["uds"] == "policy: loopback"
    assert reasons["middleware"] == "policy: in-flight-cap"
    assert ADMISSION_VARIABLE in built.shown_env()


def test_devices_are_named_by_uuid(plan: Plan) -> None:
    env = made(plan).env
    assert env["CUDA_VISIBLE_DEVICES"] == ",".join(gpu.uuid for gpu in plan.gpus)


def test_caches_are_private_to_version_and_profile(plan: Plan) -> None:
    env = made(plan).env
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME"):
        assert env[name].startswith("/cache/engine/vllm-0.32.0/expert-fp8-rack/")


def test_nothing_is_both_passed_and_owned() -> None:
    assert not PASSED & OWNED
