"""Keys as an operator handles them: add, remove, list."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from slimserve import paths
from slimserve.admission.keys import API_KEY_VARIABLE, ENVIRONMENT, digest, is_there, load
from slimserve.errors import Finding, Refused, UsageError
from slimserve.exposure import keys_file
from slimserve.shapes import nearest
from slimserve.telling import say

PREFIX = "sk-slim-"
SHOWN_DIGITS = 8


def new_key() -> str:
    """A fresh key: 256 random bits behind a prefix that secret scanners can look for."""
    return PREFIX + secrets.token_urlsafe(32)


def add(environment: Mapping[str, str], name: str) -> int:
    """Make a key, keep its hash, and print it: this once, it can be had from nowhere again.

    Args:
        environment: the caller's variables.
        name: of the key, such as who gets it.

    Raises:
        UsageError: the name is taken.
        Refused: the file cannot be used or written.
        OSError: the key cannot be printed; then it is not kept either.
    """
    if name == ENVIRONMENT:
        raise UsageError(
            Finding(f"no key may be named {name}", f"that is what {API_KEY_VARIABLE}'s is called", "choose another")
        )
    path = paths.keys_file(environment)
    with _locked(path, make=True) as file:
        if name in (load(file) if is_there(file) else {}):
            do = f"choose another name, or run slimserve --remove-key {name} first"
            raise UsageError(Finding(f"there is a key named {name}", "a name means one key", do))
        text = file.read_text("utf-8") if file.exists() else ""
        text += "\n" if text and not text.endswith("\n") else ""
        key = new_key()
        with _replacing(file, f"{text}{name} sha256:{digest(key)}  # added {time.strftime('%Y-%m-%d')}\n"):
            print(key, flush=True)  # before it counts: a key that nobody saw would let nobody in, and keep its name
    say(f"{name} is added to {file}; the key is shown this once")
    return 0


def remove(environment: Mapping[str, str], name: str) -> int:
    """Take a key away; endpoints that run refuse it within a second or so.

    Raises:
        UsageError: there is none of that name.
        Refused: the file cannot be used or written.
    """
    path = paths.keys_file(environment)
    if not is_there(path):
        raise UsageError(Finding(f"there is no key named {name}", f"{path} does not exist", "see slimserve --add-key"))
    with _locked(path) as file:
        keys = load(file)
        if name not in keys:
            do = nearest(name, keys) if keys else "there are none"
            raise UsageError(Finding(f"there is no key named {name}", f"{file} has none", do))
        lines = file.read_text("utf-8").split("\n")
        with _replacing(file, "\n".join(line for line in lines if line.split()[:1] != [name])):
            pass
    say(f"{name} is removed from {file}")
    if len(keys) == 1:
        say(
            f"no key is left: nobody is admitted by {file} until one is added; to ask for no key, remove the file and"
            " start the endpoints again"
        )
    return 0


def listed(environment: Mapping[str, str]) -> dict[str, str]:
    """The keys of the file: name -> the first digits of the hash, enough to tell two apart.

    Raises:
        Refused: the file cannot be used.
    """
    file, counts = keys_file(environment)
    keys = load(file) if file is not None and counts else {}
    return {name: hashed[:SHOWN_DIGITS] for name, hashed in keys.items()}


def without(environment: Mapping[str, str]) -> str:
    """What is so where there is no key."""
    file, counts = keys_file(environment)
    if file is not None and counts:
        return f"no keys: nobody is admitted by {file}. --add-key NAME makes one; without the file none is asked for"
    return "no keys yet: --add-key NAME makes one"


@contextlib.contextmanager
def _locked(path: Path, *, make: bool = False) -> Iterator[Path]:
    """Hold the keys file against others who change it; gives its place behind all links.

    The lock is a file of its own: the keys file is replaced by each change, so a lock on it would hold nobody up.
    """
    try:
        if make:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = path.resolve(strict=path.is_symlink())
        if file.is_dir():  # beside the root no lock could lie
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        lock = os.open(file.with_name(file.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, RuntimeError) as error:
        raise _unwritable(path, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(lock)


@contextlib.contextmanager
def _replacing(file: Path, text: str) -> Iterator[None]:
    """Put `text` in the place of what is there, whole or not at all: once the body is through, which may still fail."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        try:
            with open(fresh, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as out:
                if file.exists():
                    os.fchown(out.fileno(), file.stat().st_uid, file.stat().st_gid)
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            raise _unwritable(file, error) from None
        yield
        try:
            os.replace(fresh, file)
        except OSError as error:
            raise _unwritable(file, error) from None
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def _unwritable(file: Path, error: Exception) -> Refused:
    why = f"the system says: {getattr(error, 'strerror', None) or error}"
    do = "mend its folder's permissions, or name another file in SLIMSERVE_KEYS"
    return Refused(Finding(f"the keys file {file} cannot be written", why, do))
