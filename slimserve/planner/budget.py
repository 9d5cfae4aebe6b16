"""A sum that adds up: what there is, and every part of it with its reason."""

from __future__ import annotations

from typing import Any

from slimserve.records import dataclass


@dataclass(frozen=True)
class Line:
    """One part.

    Args:
        name: of it.
        bytes: that it takes; below zero when that is missing.
        why: where the figure comes from.
    """

    name: str
    bytes: int
    why: str


@dataclass(frozen=True)
class Budget:
    """`total_bytes`, and `lines` that make it up to the byte."""

    title: str
    total_bytes: int
    lines: tuple[Line, ...]

    def bytes_of(self, *names: str) -> int:
        """Bytes of the lines with these names together."""
        return sum(line.bytes for line in self.lines if line.name in names)

    def to_json(self) -> dict[str, Any]:
        """The budget as a JSON object."""
        lines = [{"name": line.name, "bytes": line.bytes, "why": line.why} for line in self.lines]
        return {"title": self.title, "total_bytes": self.total_bytes, "lines": lines}
