"""The registry's own content: what no schema can see."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimserve import weights
from slimserve.consistency import check_consistency
from slimserve.errors import Refused
from slimserve.model import Checkpoint
from slimserve.plan import WeightsOnDisk, describe, make_plan
from slimserve.planner import what_if
from slimserve.policies import broken
from slimserve.profile import NotCarried, Profile, Setting
from slimserve.registry_files import load_registry

FOLDER = Path(__file__).parents[2] / "profiles"
REGISTRY = load_registry(FOLDER)
CHECKPOINTS = {
    f"{model.id}/{name}": checkpoint
    for model in REGISTRY.models.values()
    for name, checkpoint in (
        *model.checkpoints.items(),
        *((name, drafter.checkpoint) for name, drafter in model.drafters.items()),
    )
}


def platform_settings() -> Iterator[tuple[str, Setting[Any]]]:
    for platform in REGISTRY.platforms.values():
        for key, setting in platform.settings():
            yield f"{platform.id}.{key}", setting


LISTED = {name: checkpoint for name, checkpoint in CHECKPOINTS.items() if checkpoint.manifest is not None}
UNLISTED = {name: checkpoint for name, checkpoint in CHECKPOINTS.items() if checkpoint.manifest is None}


@pytest.mark.parametrize("checkpoint", LISTED.values(), ids=LISTED)
def test_a_checkpoint_is_as_large_as_the_files_of_its_manifest(checkpoint: Checkpoint) -> None:
    assert checkpoint.bytes == sum(file.bytes for file in weights.manifest(FOLDER, checkpoint))
    assert checkpoint.generated is not None or checkpoint.host_bytes < checkpoint.bytes


@pytest.mark.parametrize("checkpoint", UNLISTED.values(), ids=UNLISTED)
def test_a_checkpoint_whose_files_nobody_listed_is_not_fetched(checkpoint: Checkpoint) -> None:
    with pytest.raises(Refused) as caught:
        weights.manifest(FOLDER, checkpoint)
    (finding,) = caught.value.findings
    assert checkpoint.origin in finding.what
    assert finding.why == checkpoint.unlisted


def test_every_source_is_cited_and_every_citation_is_listed() -> None:
    settings = [setting for profile in REGISTRY.profiles.values() for _, setting in profile.settings()]
    settings += [setting for _, setting in platform_settings()]
    evidence = [setting.evidence for setting in settings]
    evidence += [option.evidence for profile in REGISTRY.profiles.values() for option in profile.options.values()]
    cited = {one.published for one in evidence} - {None}
    assert cited == set(REGISTRY.sources)


def test_no_two_needs_of_any_platform_share_a_reason() -> None:
    whys = [setting.why for _, setting in platform_settings()]
    assert len(set(whys)) == len(whys)


def test_no_two_settings_of_any_profile_share_a_reason() -> None:
    seen: dict[str, str] = {}
    for profile in REGISTRY.profiles.values():
        reasons = {key: setting.why for key, setting in profile.settings()}
        reasons |= {f"options.{name}": option.why for name, option in profile.options.items()}
        for key, why in reasons.items():
            text = " ".join(why.lower().split())
            assert text not in seen, f"{profile.id}: {key} has the reason of {seen[text]}"
            seen[text] = f"{profile.id}: {key}"


@pytest.mark.parametrize("profile", REGISTRY.profiles.values(), ids=REGISTRY.profiles)
def test_what_a_profile_could_do_is_off_and_keeps_the_rules(profile: Profile) -> None:
    for name, option in profile.options.items():
        changed, changes = what_if.change(profile, option.set)
        assert all(change.before != change.after for change in changes), name
        subject = REGISTRY.subject(changed)
        assert [*check_consistency(subject), *broken(subject)] == []
        plan = make_plan(subject, describe(subject.platform, 0), WeightsOnDisk(Path("weights"), True, 0))
        assert plan.room.capacity.slots >= changed.engine.max_num_seqs.value


@pytest.mark.parametrize("profile", REGISTRY.profiles.values(), ids=REGISTRY.profiles)
def test_a_profile_runs_on_the_machine_that_its_platform_describes(profile: Profile) -> None:
    subject = REGISTRY.subject(profile)
    plan = make_plan(subject, describe(subject.platform, 0), WeightsOnDisk(Path("weights"), True, 0))
    assert len(plan.gpus) == (subject.platform.gpus.count if subject.platform.gpus else 0)


@pytest.mark.parametrize(
    "profile", [p for p in REGISTRY.profiles.values() if p.engine.override_generation_config], ids=lambda p: p.id
)
def test_a_stated_sampling_is_that_of_the_model(profile: Profile) -> None:
    stated = profile.engine.override_generation_config
    assert stated is not None
    authors = REGISTRY.models[profile.model].sampling
    assert replace(stated.value, repetition_penalty=authors.repetition_penalty) == authors  # a penalty may be added


@pytest.mark.parametrize("profile", REGISTRY.profiles.values(), ids=REGISTRY.profiles)
def test_a_profile_says_what_it_does_not_carry(profile: Profile) -> None:
    texts = [item.what for item in profile.not_carried]
    assert texts
    if profile.model == "qwen38-flash-next":
        words = ("Images", "TurboQuant", "AMD", "Apple", "second KV tier")
        assert all(any(word in text for text in texts) for word in words)


# What a profile can carry: the key that states it, and a word that whoever denies it would use.
CARRIED = {
    "admission.max_in_flight": r"\bcap\b",
    "engine.tool_call_parser": r"\btool calling\b",
    "engine.reasoning_parser": r"\bthinking\b",
}


def denied(profile: Profile) -> list[str]:
    """What a profile says that it does not carry, and carries."""
    stated = {key for key, _ in profile.settings()}
    texts = [item.what for item in profile.not_carried]
    return [
        text
        for key, word in CARRIED.items()
        for text in texts
        if key in stated and re.search(word, text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("profile", REGISTRY.profiles.values(), ids=REGISTRY.profiles)
def test_a_profile_does_not_deny_what_it_carries(profile: Profile) -> None:
    assert denied(profile) == []


def test_a_denial_of_the_cap_would_be_seen() -> None:
    profile = REGISTRY.default
    what = "A cap on requests in flight"
    wrong = replace(profile, not_carried=(*profile.not_carried, NotCarried(what=what, why="for once")))
    assert denied(wrong) == [what]
