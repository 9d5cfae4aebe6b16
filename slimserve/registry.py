"""The registry: what the files under profiles/ say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from slimserve.errors import Finding, UsageError
from slimserve.model import Model
from slimserve.platform import Platform
from slimserve.profile import Id, Profile, Text
from slimserve.records import dataclass
from slimserve.shapes import Matching, nearest
from slimserve.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Source:
    """A public text that evidence cites."""

    title: Text
    publisher: Text
    date: Annotated[str, Matching(r"20[0-9]{2}(-(0[1-9]|1[0-2])(-[0-3][0-9])?)?", "a date such as 2026-08")]
    url: Text | None = None


@dataclass(frozen=True, kw_only=True)
class Sources:
    """profiles/sources.yaml"""

    sources: dict[Id, Source]


@dataclass(frozen=True)
class Registry:
    """All profiles, models, platforms and sources, by id; every cross reference holds."""

    folder: Path
    profiles: dict[str, Profile]
    models: dict[str, Model]
    platforms: dict[str, Platform]
    sources: dict[str, Source]

    def subject(self, profile: Profile) -> Subject:
        """`profile` with the model and platform that it names."""
        return Subject(profile, self.models[profile.model], self.platforms[profile.platform])

    def candidates(self, name: str) -> tuple[Profile, ...]:
        """Every profile that `name` may mean: one for an id, one or more for an alias.

        Raises:
            UsageError: nothing has that name; the nearest names are given.
        """
        if name in self.profiles:
            return (self.profiles[name],)
        found = tuple(profile for profile in self.profiles.values() if name in profile.aliases)
        if found:
            return found
        names = {*self.profiles, *(alias for profile in self.profiles.values() for alias in profile.aliases)}
        raise UsageError(
            Finding(f"there is no profile {name!r}", "only profiles of the registry can be run", nearest(name, names))
        )

    @property
    def default(self) -> Profile:
        """The embedded default."""
        return next(profile for profile in self.profiles.values() if profile.default)
