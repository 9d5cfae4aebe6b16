"""Every profile's command through the pinned engine's own argument parser, compared field by field with the profile."""

from __future__ import annotations

import enum
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slimserve.engine import command, door, torchvision_cpu, variables
from slimserve.plan import WeightsOnDisk, describe, make_plan
from slimserve.registry import load_registry
from slimserve.shapes import plain

PROFILES = Path(__file__).parent.parent.parent / "profiles"
CONTROL = Path("/run/slimserve/engine.sock")
NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml") if path.stem != "sources")


@pytest.fixture(scope="module")
def parser() -> Any:
    torchvision_cpu.install()
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def parse(parser: Any, profile_id: str) -> tuple[Any, command.Command, Namespace]:
    registry = load_registry(PROFILES, variables.OWNED)
    profile = registry.profiles[profile_id]
    subject = registry.subject(profile)
    weights = WeightsOnDisk(Path("/cache/weights"), ready=True, needed_bytes=0)
    plan = make_plan(subject, describe(subject.platform, 1 << 50), weights)
    admission = door.configure(plan, control=CONTROL)
    built = command.build(plan, admission, cache=Path("/cache"), user_environment={})
    arguments = list(built.argv[built.argv.index(command.ENTRY) + 1 :])
    return profile, built, parser.parse_args(arguments)


def reached(value: Any) -> Any:
    """What the engine's objects hold, as plain data."""
    if isinstance(value, enum.Enum):
        return value.name
    return list(value) if isinstance(value, tuple) else value


def expect(got: Any, wanted: Any, key: str) -> None:
    if isinstance(wanted, dict):
        for name, part in wanted.items():
            expect(got[name] if isinstance(got, dict) else getattr(got, name), part, f"{key}.{name}")
        return
    assert reached(got) == wanted, key
    assert isinstance(reached(got), bool) == isinstance(wanted, bool), key


@pytest.mark.parametrize("profile_id", NAMES)
def test_the_parsed_command_is_the_profile(parser: Any, profile_id: str) -> None:
    profile, _, parsed = parse(parser, profile_id)
    stated = [name for name in profile.engine.__dataclass_fields__ if getattr(profile.engine, name) is not None]
    assert len(stated) >= 10
    for name in stated:
        wanted = plain(getattr(profile.engine, name).value, nulls=False)
        if name == "speculative_config" and "model" in wanted:  # a drafter's weights lie beside the model's
            wanted["model"] = f"/cache/weights-{wanted['model']}"
        expect(getattr(parsed, name), wanted, name)
    for name, value, _ in command.FIXED:
        expect(getattr(parsed, name), value, name)
    assert parsed.model == "/cache/weights"
    assert parsed.served_model_name == [profile.id, *profile.aliases]
    assert (parsed.uds, parsed.host, parsed.api_key) == (str(CONTROL), None, None)
    assert parsed.middleware == [command.DOOR]
    assert parsed.disable_access_log_for_endpoints == ",".join(command.ASKED)


@pytest.mark.parametrize("profile_id", NAMES)
def test_nothing_but_the_profile_departs_from_the_defaults(parser: Any, profile_id: str) -> None:
    profile, _, parsed = parse(parser, profile_id)
    ours = {*profile.engine.__dataclass_fields__, *(name for name, _, _ in command.FIXED)}
    ours |= {"model", "served_model_name", "uds", "middleware", "disable_access_log_for_endpoints"}
    default = parser.parse_args([])
    for name, value in vars(parsed).items():
        if name not in ours:
            assert value == getattr(default, name), name


def test_a_false_in_the_profile_is_false_in_the_engine(parser: Any) -> None:
    _, built, parsed = parse(parser, "qwen38fn-fp8-3090x8")
    assert "--no-enable-flashinfer-autotune" in built.argv
    assert parsed.enable_flashinfer_autotune is False
