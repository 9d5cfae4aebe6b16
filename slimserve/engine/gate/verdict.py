"""The comparison: what was planned against what one process of the engine shows. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from slimserve.engine.gate.checks import CHECKS
from slimserve.engine.gate.expected import role_of
from slimserve.errors import Finding

_MISSING = object()


def compare(process: str, planned: Mapping[str, Any], observed: Mapping[str, Any]) -> list[Finding]:
    """What differs in `process`, one finding for each setting.

    Args:
        process: its name; its role says which settings it must show.
        planned: of the plan, by name (`expected.planned`).
        observed: of the engine's own objects, by name, as JSON data.
    """
    return list(_differences(process, planned, observed))


def _differences(process: str, planned: Mapping[str, Any], observed: Mapping[str, Any]) -> Iterator[Finding]:
    role = role_of(process)
    for check in CHECKS:
        if role not in check.roles or check.name not in planned:
            continue
        want, got = planned[check.name], observed.get(check.name, _MISSING)
        what = f"{check.name}: planned {shown(want)}"
        if got is _MISSING:
            yield Finding(f"{what}, and {process} does not show it", check.why, check.do)
        elif not agrees(want, got):
            yield Finding(f"{what}, resolved {shown(got)} in {process}", check.why, check.do)
    for name in planned.keys() - {check.name for check in CHECKS}:
        why = "the plan and the engine's process were made by two versions of slimserve"
        yield Finding(f"{name}: planned, and {process} does not know it", why, "install one version, and start anew")


def agrees(planned: Any, observed: Any) -> bool:
    """Whether a resolved value is the planned one."""
    if isinstance(planned, dict) and planned.keys() == {"about", "share"}:
        return type(observed) is int and abs(observed - planned["about"]) <= planned["share"] * planned["about"]
    if isinstance(planned, dict) and planned.keys() == {"named"}:
        return isinstance(observed, list) and planned["named"] in observed
    # 1 and True are equal in Python, and not the same setting.
    return bool(planned == observed) and isinstance(planned, bool) == isinstance(observed, bool)


def shown(value: Any) -> str:
    """A value for a reader."""
    if isinstance(value, dict) and value.keys() == {"about", "share"}:
        return f"{value['about']} within {value['share']:.0%}"
    if isinstance(value, dict) and value.keys() == {"named"}:
        return str(value["named"])
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
