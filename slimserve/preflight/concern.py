"""A finding with what it stands in the way of."""

from __future__ import annotations

from typing import Literal

from slimserve.errors import Finding
from slimserve.platform import Platform
from slimserve.records import dataclass

Blocks = Literal[
    "nothing", "every profile", "profiles on GPUs", "profiles on several GPUs", "profiles that need peer access"
]


@dataclass(frozen=True)
class Concern(Finding):
    """Something about a machine that keeps engines from running there, or from running well.

    Args:
        blocks: which launches are refused for it; "nothing": it is a warning.
    """

    blocks: Blocks = "nothing"

    def __str__(self) -> str:
        text = Finding.__str__(self)
        return text if self.blocks == "nothing" else f"{text}\n  blocks: {self.blocks}"

    def stops(self, platform: Platform) -> bool:
        """Whether a profile of `platform` must not be launched."""
        count = platform.gpus.count if platform.gpus else 0
        need = platform.needs.peer_access
        return {
            "nothing": False,
            "every profile": True,
            "profiles on GPUs": count > 0,
            "profiles on several GPUs": count > 1,
            "profiles that need peer access": count > 1 and need is not None and need.value == "required",
        }[self.blocks]
