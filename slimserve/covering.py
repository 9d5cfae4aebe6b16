"""Whether receipts cover the profile that cites them: pure, and cheap enough for every listing.

Only what is cited is read. A receipt covers a profile while it was taken of that profile, on that platform, with that
engine and those weights, and with the values that the profile states now. Deadlines of the supervisor are left out:
they decide when something is given up, and no number of a run that was not.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimserve import receipt_file
from slimserve.receipt_file import Unreadable
from slimserve.shapes import Loc, Problem, plain
from slimserve.subject import Subject

NOT_COVERED = ("serve.",)


def as_text(value: Any) -> str:
    """A setting's value as receipts keep it: JSON with sorted keys."""
    return json.dumps(plain(value), sort_keys=True)


def check(subject: Subject, folder: Path) -> Iterator[Problem]:
    """What is wrong with the receipts that a profile cites, and what of it they no longer cover.

    A receipt that is not there is the registry's own finding, and passed over here.

    Args:
        subject: the profile with its model and platform.
        folder: the registry's receipts.
    """
    profile = subject.profile
    citing: dict[str, list[str]] = defaultdict(list)
    for key, setting in profile.settings():
        if setting.evidence.receipt is not None and (folder / setting.evidence.receipt).is_file():
            citing[setting.evidence.receipt].append(key)
    facts: dict[str, dict[str, Any]] = {}
    for name, keys in citing.items():
        loc: Loc = (*keys[0].split("."), "evidence", "receipt")
        try:
            facts[name] = _facts(folder / name, profile.id)
        except Unreadable as error:
            do = f"cite a whole receipt of {profile.id}, or another kind of evidence"
            yield Problem(loc, f"{keys[0]} cites the receipt {name}", str(error), do)
    if profile.status == "measured":
        yield from _changed_subject(subject, facts)
    yield from _changed_settings(subject, facts, citing)


def _facts(path: Path, profile_id: str) -> dict[str, Any]:
    """What a receipt says of the profile that it was taken of, with the origin of the weights.

    Raises:
        Unreadable: it cannot be cited.
    """
    data = receipt_file.read(path)
    if data.get("outcome") != "whole":
        raise Unreadable(f"its outcome is {json.dumps(data.get('outcome'))}, and only a whole one proves anything")
    profile, weights = data.get("profile"), data.get("weights")
    if not isinstance(profile, dict) or not isinstance(profile.get("settings"), dict):
        raise Unreadable("it was taken of a server that no profile launched")
    if profile.get("id") != profile_id:
        raise Unreadable(f"it was taken of {profile.get('id')}")
    return {**profile, "weights": weights.get("origin") if isinstance(weights, dict) else None}


def _changed_subject(subject: Subject, facts: dict[str, dict[str, Any]]) -> Iterator[Problem]:
    """Model, weights, platform and engine that are not those of the receipts."""
    from slimserve.engine import ENGINE_VERSION

    profile = subject.profile
    now = {
        "model": profile.model,
        "quant": profile.quant,
        "platform": profile.platform,
        "weights": subject.model.checkpoints[profile.quant].origin,
        "engine": ENGINE_VERSION,
    }
    for name, value in now.items():
        yield from _uncovered(
            profile.id, ("status",), name, value, {one: fact.get(name) for one, fact in facts.items()}
        )


def _changed_settings(
    subject: Subject, facts: dict[str, dict[str, Any]], citing: dict[str, list[str]]
) -> Iterator[Problem]:
    """Settings that are not as they were measured: all of a measured profile, else those that cite the receipt."""
    profile = subject.profile
    now = {key: as_text(setting.value) for key, setting in profile.settings()}
    measured = profile.status == "measured"
    keys = {*now, *(key for fact in facts.values() for key in fact["settings"])} if measured else set(now)
    for key in sorted(keys):
        asked = {name: fact for name, fact in facts.items() if measured or key in citing[name]}
        if key.startswith(NOT_COVERED):
            continue
        loc: Loc = (*key.split("."), "value") if key in now else ("status",)
        then = {name: fact["settings"].get(key) for name, fact in asked.items()}
        yield from _uncovered(profile.id, loc, key, now.get(key), then)


def _uncovered(profile_id: str, loc: Loc, key: str, now: str | None, then: dict[str, str | None]) -> Iterator[Problem]:
    names = sorted(name for name, value in then.items() if value != now)
    if not names:
        return
    before = sorted({"nothing" if then[name] is None else str(then[name]) for name in names})
    receipts = "the receipts " + ", ".join(names) if len(names) > 1 else f"the receipt {names[0]}"
    yield Problem(
        loc,
        f"{key} = {'nothing' if now is None else now} is no longer covered by {receipts}",
        f"{'they were' if len(names) > 1 else 'it was'} taken with {' and '.join(before)}",
        f"restore it; or cite something else, say status: unmeasured, and measure anew: slimserve {profile_id} --bench",
    )
