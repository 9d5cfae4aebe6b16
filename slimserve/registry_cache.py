"""The checked registry as it was last read: reading YAML and judging it is half of what `--list` would take.

    <cache>/registry/<hash>

The hash is over what was judged: name, size, inode and times of everything below the registry's folder, and of every
module of this program, whose rules it was judged by. Whatever differs is another hash, and the files are read. A
registry with a problem is never kept, so its problems are told each time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import pickle
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimserve.paths import PACKAGE

if TYPE_CHECKING:
    from slimserve.registry import Registry

_KEPT = 4  # registries, of several checkouts or users' own
# A file that changed a moment ago can change again and keep its time: the clock of a file system is coarse.
_SETTLED_SECONDS = 2.0
_CLASSES = ("slimserve.model", "slimserve.platform", "slimserve.profile", "slimserve.registry")
# To look at more of them takes longer than to read a registry; a folder that holds so many is hardly one.
_MOST_FILES = 10_000


class _Reader(pickle.Unpickler):
    """Makes dataclasses of the registry and paths, and can name nothing else: what it reads is data, and no program."""

    def find_class(self, module: str, name: str) -> Any:
        """The class; UnpicklingError for whatever no registry holds."""
        if (module, name) == ("pathlib", "PosixPath"):
            return Path
        # A dotted name would lead through a class to what its module has imported.
        if module in _CLASSES and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and dataclasses.is_dataclass(found) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a registry")


def load(folder: Path, reserved: frozenset[str], cache: Path | None) -> Registry:
    """The registry under `folder`, read only when it or the program changed since it was last.

    Args:
        folder: the registry's folder.
        reserved: environment variables that no profile may set.
        cache: the user's cache folder; one that is missing, or cannot be written or trusted, costs time alone.

    Raises:
        RegistryError: with the problems of all files.
    """
    from slimserve.registry import Registry

    settled, state = time.time() - _SETTLED_SECONDS, None
    if cache is not None:
        with contextlib.suppress(OSError):  # what is wrong with the folder is told by who reads it
            state = _state(folder, reserved, settled)
    if cache is not None and state is not None:
        with contextlib.suppress(Exception):  # not there, cut short, or no registry: the files are there all the same
            found = _Reader(io.BytesIO(_read(cache / "registry", state))).load()
            if isinstance(found, Registry):
                return found
    from slimserve.registry_files import load_registry

    registry = load_registry(folder, reserved)
    if cache is not None and state is not None:
        with contextlib.suppress(OSError, pickle.PicklingError):
            if _state(folder, reserved, settled) == state:
                _keep(cache / "registry", state, pickle.dumps(registry, pickle.HIGHEST_PROTOCOL))
    return registry


def _state(folder: Path, reserved: frozenset[str], settled: float) -> str | None:
    """The hash of what there is to judge and to judge by; None: some of it changed after `settled`, or is too much.

    Raises:
        OSError: it cannot be looked at.
    """
    hashed = hashlib.sha256(f"{sys.version}\0{folder}\0{sorted(reserved)}".encode(errors="surrogateescape"))
    for top, suffix in ((folder, ""), (PACKAGE, ".py")):
        for number, (path, status) in enumerate(_below(str(top), suffix)):
            if number == _MOST_FILES or max(status.st_mtime, status.st_ctime) > settled:
                return None
            told = (path, status.st_mode, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
            hashed.update(repr(told).encode(errors="surrogateescape"))
    return hashed.hexdigest()


def _below(folder: str, suffix: str) -> Iterator[tuple[str, os.stat_result]]:
    """Files whose names end so; of any name, folders too."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir():
            if entry.name != "__pycache__":
                if not suffix:
                    yield entry.path, entry.stat()
                yield from _below(entry.path, suffix)
        elif entry.name.endswith(suffix):
            yield entry.path, entry.stat()


def _read(folder: Path, name: str) -> bytes:
    """What is kept under that name, if nobody but this user can have written it.

    Raises:
        OSError: it is not there, or somebody else could.
    """
    _check(os.lstat(folder), stat.S_ISDIR)
    with open(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        _check(os.fstat(file.fileno()), stat.S_ISREG)
        return file.read()


def _check(status: os.stat_result, is_kind: Any) -> None:
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError("somebody else could have written it")


def _keep(folder: Path, name: str, data: bytes) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(os.lstat(folder), stat.S_ISDIR)
    partial = folder / f"{name}.{os.getpid()}"
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        os.replace(partial, folder / name)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    for old in sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime)[:-_KEPT]:
        old.unlink(missing_ok=True)
