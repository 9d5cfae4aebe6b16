"""What is planned, checked and launched."""

from __future__ import annotations

from slimserve.model import Model
from slimserve.platform import Platform
from slimserve.profile import Profile
from slimserve.records import dataclass


@dataclass(frozen=True)
class Subject:
    """One profile with what it names."""

    profile: Profile
    model: Model
    platform: Platform
