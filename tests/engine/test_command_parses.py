"""Every profile's command through the pinned engine's own argument parser, compared field by field with the profile."""

from __future__ import annotations

import enum
from typing import Any

import pytest
from parsed_support import CONTROL, NAMES, parse, parser

from slimserve.engine import command
from slimserve.shapes import plain


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
def test_the_parsed_command_is_the_profile(profile_id: str) -> None:
    profile, _, parsed = parse(profile_id)
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
def test_nothing_but_the_profile_departs_from_the_defaults(profile_id: str) -> None:
    profile, _, parsed = parse(profile_id)
    ours = {*profile.engine.__dataclass_fields__, *(name for name, _, _ in command.FIXED)}
    ours |= {"model", "served_model_name", "uds", "middleware", "disable_access_log_for_endpoints"}
    default = parser().parse_args([])
    for name, value in vars(parsed).items():
        if name not in ours:
            assert value == getattr(default, name), name


def test_a_false_in_the_profile_is_false_in_the_engine() -> None:  # A1
    _, built, parsed = parse("qwen38fn-fp8-3090x8")
    assert "--no-enable-flashinfer-autotune" in built.argv
    assert parsed.enable_flashinfer_autotune is False
