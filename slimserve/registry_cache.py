"""The checked registry as it was last read: reading YAML and judging it is half of what `--list` would take.

    <cache>/registry/<hash>

The hash is over what was judged: name, size, inode and times of every file of the registry, and of every module of this
program, whose rules it was judged by. Whatever differs is another hash, and the files are read. A registry with a
problem is never kept, so its problems are told each time; nothing but the classes of a registry is ever read back.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
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


class _Reader(pickle.Unpickler):
    """Makes the registry's own objects and nothing else: a file is no program."""

    def find_class(self, module: str, name: str) -> Any:
        """The class; UnpicklingError for any that no registry holds."""
        if module in _CLASSES or (module, name) in (("pathlib", "PosixPath"), ("datetime", "date")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a registry")


def load(folder: Path, reserved: frozenset[str], cache: Path) -> Registry:
    """The registry under `folder`, read only when it or the program changed since it was last.

    Args:
        folder: the registry's folder.
        reserved: environment variables that no profile may set.
        cache: the user's cache folder; one that cannot be written or trusted costs time, and nothing else.

    Raises:
        RegistryError: with the problems of all files.
    """
    from slimserve.registry import Registry

    name, kept, newest = "", Path(), time.time()
    with contextlib.suppress(OSError):  # what is wrong with the folder is told by who reads it
        name, newest = _state(folder, reserved)
        kept = cache / "registry" / name
    with contextlib.suppress(Exception):  # not there, cut short, or somebody else's: all the same, the files are there
        if (status := kept.stat()).st_uid == os.getuid() and not status.st_mode & 0o022:
            found = _Reader(io.BytesIO(kept.read_bytes())).load()
            if isinstance(found, Registry):
                return found
    from slimserve.registry_files import load_registry

    registry = load_registry(folder, reserved)
    with contextlib.suppress(OSError):
        if newest < time.time() - _SETTLED_SECONDS and _state(folder, reserved)[0] == name:
            _keep(kept, pickle.dumps(registry, pickle.HIGHEST_PROTOCOL))
    return registry


def _state(folder: Path, reserved: frozenset[str]) -> tuple[str, float]:
    """The hash of what there is to judge and to judge by, and when the newest of it changed."""
    newest = 0.0
    hashed = hashlib.sha256(f"{sys.version}\0{folder}\0{sorted(reserved)}".encode())
    for top, suffix in ((folder, ""), (PACKAGE, ".py")):
        for path, status in _files(str(top), suffix):
            newest = max(newest, status.st_mtime, status.st_ctime)
            told = (path, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
            hashed.update(repr(told).encode())
    return hashed.hexdigest(), newest


def _files(folder: str, suffix: str, deeper: bool = True) -> Iterator[tuple[str, os.stat_result]]:
    """Files of `folder` and of the folders in it: neither a registry nor its rules lie deeper."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir():
            if deeper and entry.name != "__pycache__":
                yield from _files(entry.path, suffix, deeper=False)
        elif entry.name.endswith(suffix):
            yield entry.path, entry.stat()


def _keep(path: Path, data: bytes) -> None:
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    for old in sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime)[:-_KEPT]:
        old.unlink(missing_ok=True)
