"""One run of the command: the registry, the machine and the caller's environment, put together once."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slimserve import paths, registry_cache, weights
from slimserve.engine.variables import OWNED
from slimserve.errors import Finding, Refused, UsageError, raise_if_any
from slimserve.machine import Machine
from slimserve.plan import NO_ADVICE, Advice, Plan, Verdict, WeightsOnDisk, describe, make_plan, matches
from slimserve.profile import Profile
from slimserve.records import dataclass
from slimserve.registry import Registry
from slimserve.shapes import Loc, dotted
from slimserve.subject import Subject
from slimserve.weights import Manifest

if TYPE_CHECKING:
    from slimserve.planner.what_if import Change

LISTING = "slimserve --list"


@dataclass(frozen=True)
class Session:
    """What every command starts from.

    Args:
        registry: the checked registry.
        machine: the machine in front of us, or its stand-in.
        here: whether `machine` is the one that this program runs on.
        cache: folder of weights and engine caches.
        environment: the caller's variables.
        listing: the command that lists what runs on `machine`.
    """

    registry: Registry
    machine: Machine
    here: bool
    cache: Path
    environment: Mapping[str, str]
    listing: str = LISTING

    def resolve(self, name: str) -> Profile:
        """The profile that `name` means on this machine.

        Raises:
            UsageError: nothing has that name.
            Refused: it is an alias of several profiles and none of them is for this machine.
        """
        candidates = self.registry.candidates(name)
        if len(candidates) == 1:
            return candidates[0]
        fitting = [
            profile for profile in candidates if matches(self.registry.platforms[profile.platform], self.machine)
        ]
        if not fitting:
            named = ", ".join(
                f"{profile.id} ({self.registry.platforms[profile.platform].title})" for profile in candidates
            )
            raise Refused(
                Finding(
                    f"{name} names {len(candidates)} profiles, none of them for {self.machine.source}",
                    f"it stands for {named}",
                    f"see {self.listing} for what runs there, or plan one of them with --on PLATFORM",
                )
            )
        # Of several that fit one machine the one that uses most of it is meant.
        return max(fitting, key=lambda profile: self._devices(profile))

    def _devices(self, profile: Profile) -> int:
        gpus = self.registry.platforms[profile.platform].gpus
        return gpus.count if gpus else 0

    def weights(self, subject: Subject) -> WeightsOnDisk:
        """What the cache holds for `subject`, by looking at names and sizes only."""
        profile = subject.profile
        checkpoint = subject.model.checkpoints[profile.quant]
        folder = weights.folder(self.cache, subject.model.id, profile.quant, checkpoint)
        # Most checkpoints of a listing are not there at all: then there is no need to read what they should hold.
        there = self.here and checkpoint.manifest is not None and weights.is_there(folder)
        ready = there and weights.state(folder, self.manifest(subject)).ready
        # A machine that is only described has nothing on its disk yet, whatever this one has.
        looked = folder if self.here else Path(os.devnull)
        return WeightsOnDisk(folder, ready, 0 if ready else weights.peak_bytes(looked, checkpoint), self.here)

    def manifest(self, subject: Subject) -> Manifest:
        """The files that the checkpoint of `subject` consists of.

        Raises:
            RegistryError: the manifest is missing or wrong.
            Refused: there is none.
        """
        return weights.manifest(self.registry.folder, subject.model.checkpoints[subject.profile.quant])

    def plan(self, profile: Profile) -> Plan:
        """The verdict on `profile`.

        Raises:
            Refused: it does not run on this machine.
        """
        subject = self.registry.subject(profile)
        return make_plan(subject, self.machine, self.weights(subject), self._advice(profile))

    def what_if(self, profile: Profile, assignments: Sequence[str]) -> tuple[Plan, tuple[Change, ...]]:
        """The verdict on `profile` with some values replaced, and what was replaced; all of its rules hold still.

        Raises:
            UsageError: a key that does not exist, or a value that it does not take.
            Refused: a policy is broken, the profile contradicts itself, or it does not run on this machine.
        """
        from slimserve.consistency import check_consistency, check_environment
        from slimserve.planner import what_if
        from slimserve.policies import broken

        changed, changes = what_if.change(profile, assignments)
        subject = self.registry.subject(changed)
        problems = [*check_environment(changed, OWNED), *check_consistency(subject), *broken(subject)]
        raise_if_any(Refused, [Finding(one.what, one.why, one.do, "--set") for one in problems])
        plan = make_plan(subject, self.machine, self.weights(subject), self._advice(profile, changes))
        return plan, changes

    def _advice(self, profile: Profile, changes: Sequence[Change] = ()) -> Advice:
        """What a refusal of `profile` can point to: lines of its file, and profiles of the same model that fit."""

        def where(loc: Loc) -> str:
            key = dotted(loc).removesuffix(".value")
            if any(change.key == key for change in changes):
                return "--set"
            from slimserve.yaml_source import read_document

            return read_document(self.registry.folder / f"{profile.id}.yaml").where(loc)

        def others() -> tuple[str, ...]:
            found = []
            for other in self.registry.profiles.values():
                platform = self.registry.platforms[other.platform]
                if other.model == profile.model and other.platform != profile.platform:
                    with contextlib.suppress(Refused):
                        nothing = WeightsOnDisk(Path(os.devnull), ready=True, needed_bytes=0)
                        make_plan(self.registry.subject(other), describe(platform, 0), nothing)
                        found.append(f"{other.id} ({platform.title})")
            return tuple(found)

        return Advice(where, others, self.listing)

    def verdicts(self) -> list[Verdict]:
        """The verdict on every profile."""
        result = []
        unadvised = Advice(NO_ADVICE.where, NO_ADVICE.others, self.listing)
        for profile in self.registry.profiles.values():
            subject = self.registry.subject(profile)
            try:
                plan = make_plan(subject, self.machine, self.weights(subject), unadvised)
                checkpoint = subject.model.checkpoints[profile.quant]
                there = plan.weights.ready
                result.append(Verdict(profile, (), there, checkpoint.is_fetchable, checkpoint.bundled is not None))
            except Refused as refused:
                result.append(Verdict(profile, refused.findings, weights_ready=False))
        return result


def open_registry(environment: Mapping[str, str]) -> Registry:
    """The registry that SLIMSERVE_PROFILES names, or the one that came with the program.

    Raises:
        RegistryError: a file is wrong.
    """
    own = environment.get("SLIMSERVE_PROFILES")
    folder = Path(own) if own else paths.profiles_folder()
    cache = None
    with contextlib.suppress(UsageError):  # without a home folder there is none
        cache = paths.cache_folder(environment)
    return registry_cache.load(folder, OWNED, cache)


def open_session(
    environment: Mapping[str, str], machine_file: Path | None = None, platform: str | None = None
) -> Session:
    """Load the registry and look at the machine.

    Args:
        environment: the caller's variables.
        machine_file: a machine to stand in for this one.
        platform: id of a platform to stand in for this machine.

    Raises:
        RegistryError: a file is wrong.
        UsageError: there is no such platform.
    """
    from slimserve.shapes import nearest

    registry = open_registry(environment)
    cache = paths.cache_folder(environment)
    if machine_file is not None:
        from slimserve.machine import load_machine

        listing = f"{LISTING} --machine {shlex.quote(str(machine_file))}"
        return Session(registry, load_machine(machine_file), False, cache, environment, listing)
    if platform is not None:
        if platform not in registry.platforms:
            raise UsageError(
                Finding(f"there is no platform {platform!r}", "--on takes one", nearest(platform, registry.platforms))
            )
        described = describe(registry.platforms[platform], 1 << 50)
        return Session(registry, described, False, cache, environment, f"{LISTING} --on {platform}")
    from slimserve.probe import read_machine

    return Session(registry, read_machine(cache, environment), True, cache, environment)
