"""Weights: where they lie, what is there, how they get there, and whether they are right.

`folder`, `manifest`, `is_there`, `state`, `bytes_missing` and `peak_bytes` look at names and sizes and are fit for
every listing.
`fetch` and `verify` move and read all bytes; `check` and `check_config` stand before each launch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slimserve.errors import Finding, Refused
from slimserve.model import Checkpoint, Geometry
from slimserve.weights.manifest_file import Manifest, ManifestFile, read_manifest
from slimserve.weights.store import State, bytes_missing, folder, is_there, peak_bytes, state

if TYPE_CHECKING:
    from slimserve.weights.meter import Tick

__all__ = [
    "Manifest",
    "ManifestFile",
    "State",
    "bytes_missing",
    "check",
    "check_config",
    "fetch",
    "folder",
    "is_there",
    "manifest",
    "peak_bytes",
    "state",
    "verify",
]


def manifest(profiles: Path, checkpoint: Checkpoint) -> Manifest:
    """The files of a checkpoint.

    Args:
        profiles: the registry's folder.
        checkpoint: it.

    Raises:
        RegistryError: the manifest is missing or wrong.
        Refused: the checkpoint has none.
    """
    if checkpoint.manifest is None:
        what = f"the files of {checkpoint.origin} are not listed"
        do = "list them in a manifest, at a pinned revision, and fetch then; until then it can only be planned with"
        raise Refused(Finding(what, checkpoint.unlisted or "", do))
    return read_manifest(profiles / "weights" / f"{checkpoint.manifest}.manifest")


def fetch(
    checkpoint: Checkpoint,
    target: Path,
    manifest: Manifest,
    progress: Tick,
    environ: Mapping[str, str] = os.environ,
    profiles: Path | None = None,
) -> None:
    """Make `target` complete and verified; see `transfer.fetch`.

    Raises:
        Refused: the disk is too small, another process is fetching the same, or what is there cannot be read.
        Failed: the network, the source or the disk failed, or a hash is wrong. What was there and right is kept, or
            can be made again from what is kept.
    """
    from slimserve.weights import transfer

    if checkpoint.generated is not None:
        if state(target, manifest).ready:
            return
        what = f"{target} is not there, or not as it has to be"
        why = "it is written on this machine and comes from nowhere: a configuration without weights"
        raise Refused(Finding(what, why, f"{checkpoint.generated} {target}"))
    transfer.fetch(checkpoint, target, manifest, progress, environ, profiles=profiles)


def check(target: Path, manifest: Manifest, *, weightless: bool = False) -> list[Finding]:
    """Missing, truncated and foreign files, without reading the data; see `verification.check`."""
    from slimserve.weights import verification

    return verification.check(target, manifest, weightless=weightless)


def check_config(target: Path, geometry: Geometry) -> list[Finding]:
    """Shapes of `config.json` that differ from the model file's; see `verification.check_config`."""
    from slimserve.weights import verification

    return verification.check_config(target, geometry)


def verify(target: Path, manifest: Manifest, progress: Tick) -> list[Finding]:
    """Files with another hash; what is right is stamped and not hashed again; see `verification.verify`.

    Raises:
        Refused: a file is there and cannot be read.
        OSError: the stamp cannot be written.
    """
    from slimserve.weights import verification

    return verification.verify(target, manifest, progress)
