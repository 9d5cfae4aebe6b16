"""A profile with some of its values replaced: for planning, never for serving."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slimserve.errors import Finding, UsageError, raise_if_any
from slimserve.profile import Profile
from slimserve.shapes import ShapeError, build, fields_of, nearest, plain, split

_SECTIONS = ("engine", "admission", "policy", "serve")
_VARIABLES = "environment"


@dataclass(frozen=True, slots=True)
class Change:
    """One value that is asked about.

    Args:
        key: its path in the profile, such as engine.max_num_seqs.
        before: what the profile says; None when it says nothing.
        after: what is asked about.
    """

    key: str
    before: Any
    after: Any


def change(profile: Profile, assignments: Sequence[str]) -> tuple[Profile, tuple[Change, ...]]:
    """`profile` with values replaced.

    Args:
        profile: of the registry.
        assignments: `KEY=VALUE`, the key as in the profile, the value as in JSON or a bare word. A key may go on into
            a value that is a mapping: engine.speculative_config.num_speculative_tokens=3.

    Raises:
        UsageError: a key that does not exist, or a value that its key does not take; all of them.
    """
    data = plain(profile, nulls=False)
    changes: list[Change] = []
    problems: list[Finding] = []
    for text in assignments:
        key, equals, written = text.partition("=")
        section, _, rest = key.partition(".")
        name, *inside = rest.split(".")
        known = {setting.name for setting in _settings(section)} | ({name} if section == _VARIABLES else set())
        if not equals or not name or name not in known:
            keys = [f"{one}.{setting.name}" for one in _SECTIONS for setting in _settings(one)]
            if not equals and key in keys:
                found = Finding(f"--set {key} has no value", "an assignment is KEY=VALUE", f"--set {key}=VALUE")
            else:
                why = "an assignment is KEY=VALUE, and a key is one of the profile's"
                found = Finding(f"--set {text} is not understood", why, nearest(key, keys))
            problems.append(found)
            continue
        if any(key == other.key for other in changes):
            what = f"--set {text} is a second value of {key}"
            problems.append(Finding(what, "one of them would be lost", "give one"))
            continue
        setting = data.setdefault(section, {}).setdefault(name, {"value": {} if inside else None})
        before = _reached(setting["value"], inside)
        after = written if section == _VARIABLES else _read(written)
        _put(setting, ["value", *inside], after)
        setting["why"] = "what if: this value is asked about with --set, and is not the profile's own"
        setting["evidence"] = {"derived": f"--set; the profile says {json.dumps(before)}"}
        changes.append(Change(key, before, after))
    raise_if_any(UsageError, problems)
    try:
        return build(Profile, data), tuple(changes)
    except ShapeError as error:
        raise UsageError(*(Finding(f"--set: {one.what}", one.why, one.do) for one in error.problems)) from None
    except RecursionError:  # deep enough to be read, and too deep to be looked at or shown
        what, why = "--set: a value is nested too deep", "no key of a profile takes one like that"
        raise UsageError(Finding(what, why, "give what the key takes")) from None


def _settings(section: str) -> Iterator[Any]:
    """The keys of a section of a profile."""
    shapes = {field.name: split(field.annotation)[0] for field in fields_of(Profile) if field.name in _SECTIONS}
    yield from fields_of(shapes.get(section))


def _read(text: str) -> Any:
    """A value as it is typed on a command line: JSON, or else a bare word."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # nested deeper than any value of a profile is one more text that is no JSON
        return text


def _reached(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _put(target: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *parents, last = path
    for key in parents:
        inner = target.get(key)
        target[key] = inner if isinstance(inner, dict) else {}
        target = target[key]
    target[last] = value
