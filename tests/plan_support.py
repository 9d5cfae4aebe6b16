"""Profiles with other values, and the ranks and plans that come of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from slimserve.engine import variables
from slimserve.machine import Machine
from slimserve.plan import WeightsOnDisk, describe
from slimserve.planner.fitting import KEYS
from slimserve.planner.rank import Rank, Sizes, rank_of
from slimserve.profile import Evidence, Profile, Setting
from slimserve.registry_files import load_registry
from slimserve.subject import Subject

GIB = 1 << 30
REGISTRY = load_registry(Path(__file__).parents[1] / "profiles", variables.OWNED)
WEIGHTS = WeightsOnDisk(Path("/cache/weights"), ready=True, needed_bytes=0)
GPU_PROFILES = sorted(name for name, one in REGISTRY.profiles.items() if REGISTRY.platforms[one.platform].gpus)


def setting(value: Any) -> Setting[Any]:
    """A setting of a test."""
    return Setting(value=value, why="for a test", evidence=Evidence(derived="a test"))


def with_engine(profile: Profile, **values: Any) -> Profile:
    """`profile` with other values of `engine`; None takes a setting out."""
    settings: dict[str, Any] = {key: None if value is None else setting(value) for key, value in values.items()}
    return replace(profile, engine=replace(profile.engine, **settings))


def sized(sizes: Sizes, key: str, value: float) -> Sizes:
    """`sizes` with another value of a key of the profile."""
    fields = {key: name for name, key in KEYS.items()}
    changed: dict[str, Any] = {fields[key]: value}
    return replace(sizes, **changed)


def subject_of(name: str, **values: Any) -> Subject:
    """A profile of the registry, with other values of `engine`."""
    return REGISTRY.subject(with_engine(REGISTRY.profiles[name], **values))


def machine_of(subject: Subject) -> Machine:
    """The machine that its platform describes."""
    return describe(subject.platform, 1 << 50)


def rank(name: str, **values: Any) -> Rank:
    """One rank of a profile on the machine that its platform describes."""
    subject = subject_of(name, **values)
    return rank_of(subject, machine_of(subject).gpus)
