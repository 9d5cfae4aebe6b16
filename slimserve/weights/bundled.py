"""A checkpoint that comes with slimserve: a small one, whose files lie in the registry and are copied from there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from slimserve.errors import Failed, Finding
from slimserve.weights.manifest_file import Manifest, ManifestFile

_WHY = "it comes with slimserve, and is to be had from nowhere else"


def place(profiles: Path, name: str) -> Path:
    """The folder of the files.

    Args:
        profiles: the registry's folder.
        name: what the model file calls it.
    """
    return profiles / "weights" / name


def restore(folder: Path) -> str:
    """What to do when the files are not as they came."""
    return f"restore {folder}, or install slimserve again"


def faults(folder: Path, manifest: Manifest) -> list[Finding]:
    """What is missing, of another size or kind, or leads elsewhere; by stat alone.

    Args:
        folder: what `place` returned.
        manifest: its files.
    """
    home = Path(os.path.realpath(folder.parent), folder.name)
    found = [_fault(folder, home, None)]
    if found == [None]:
        found = [_fault(folder / file.name, home / file.name, file.bytes) for file in manifest]
    return [Finding(what, _WHY, restore(folder)) for what in found if what is not None]


def _fault(path: Path, real: Path, size: int | None) -> str | None:
    """What is wrong with a file of this size; None for a folder."""
    if os.path.realpath(path) != str(real):
        return f"{path} leads elsewhere"
    try:
        status = path.stat()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if size is None:
        return None if stat.S_ISDIR(status.st_mode) else f"{path} is not a folder"
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a file"
    return None if status.st_size == size else f"{path} is {status.st_size} bytes long, its manifest says {size}"


def copy(folder: Path, file: ManifestFile, part: Path) -> None:
    """Bring `file` to `part`, from its first byte on: it is small.

    Args:
        folder: what `place` returned.
        file: its name counts.
        part: where the bytes go.

    Raises:
        Failed: it cannot be read.
        OSError: the disk is full or not writable.
    """
    source = folder / file.name
    try:
        data = source.read_bytes()
    except OSError as error:
        raise Failed(Finding(f"{source} cannot be read: {error.strerror}", _WHY, restore(folder))) from None
    with part.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
