"""Where things lie: the registry that came with the program, the user's cache and state folders, the keys.

The places of the user follow the XDG base directory rules, with one override each. They are computed, not made:
whether they exist and can be written is for the caller to find out and to say.
"""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from slimserve.errors import Finding, RegistryError, UsageError

PACKAGE = Path(__file__).resolve().parent


def profiles_folder(package: Path = PACKAGE) -> Path:
    """The registry that came with the program: `profiles/` inside the package (a wheel) or beside it (a checkout).

    Args:
        package: the folder of the slimserve package.

    Raises:
        RegistryError: neither is there.
    """
    inside, beside = package / "profiles", package.parent / "profiles"
    if inside.is_dir():
        return inside
    # Beside an installed package lie other people's: only the checkout's own counts.
    if beside.is_dir() and (package.parent / "pyproject.toml").is_file():
        return beside
    raise RegistryError(
        Finding(
            f"no profiles folder in {package} or beside it",
            "everything that can be run is a profile, and they come with the program",
            "install slimserve again, or restore profiles/ in the checkout",
        )
    )


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """What can be fetched or computed again: weights, converted models, compiled kernels.

    Args:
        environ: SLIMSERVE_CACHE names it; else `slimserve` under XDG_CACHE_HOME or ~/.cache.

    Raises:
        UsageError: there is no home folder to derive it from.
    """
    return _user_folder(environ, "SLIMSERVE_CACHE", "XDG_CACHE_HOME", ".cache")


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """What one machine remembers between runs: logs, start records.

    Args:
        environ: SLIMSERVE_STATE names it; else `slimserve` under XDG_STATE_HOME or ~/.local/state.

    Raises:
        UsageError: there is no home folder to derive it from.
    """
    return _user_folder(environ, "SLIMSERVE_STATE", "XDG_STATE_HOME", ".local/state")


def runs_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where each endpoint has a folder of its own.

    Raises:
        UsageError: there is no home folder to derive it from.
    """
    return state_folder(environ) / "runs"


def keys_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The hashes of the keys that clients may use.

    Args:
        environ: SLIMSERVE_KEYS names it; else `slimserve/keys` under XDG_CONFIG_HOME or ~/.config.

    Raises:
        UsageError: there is no home folder to derive it from.
    """
    override = "SLIMSERVE_KEYS"
    return _named(environ, override) or _user_folder(environ, override, "XDG_CONFIG_HOME", ".config") / "keys"


def _named(environ: Mapping[str, str], override: str) -> Path | None:
    named = environ.get(override)
    if not named:
        return None
    try:
        named.encode()
        path = Path(named).absolute()
    except (UnicodeEncodeError, OSError) as error:
        raise UsageError(
            Finding(
                f"{override} = {named!r} cannot be used",
                "the libraries that read weights, and JSON, take UTF-8 paths"
                if isinstance(error, UnicodeEncodeError)
                else f"the current folder: {error.strerror}",
                "give an absolute path in UTF-8",
            )
        ) from None
    return _nameable(path, override)


def _nameable(path: Path, override: str) -> Path:
    """The path, if anything could ever be called that."""
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            what, why = f"{path} cannot be used", f"the system says: {error.strerror}"
            raise UsageError(Finding(what, why, f"give a shorter one in {override}")) from None
    return path


def _user_folder(environ: Mapping[str, str], override: str, base: str, below_home: str) -> Path:
    named = _named(environ, override)
    if named is not None:
        return named
    shared = environ.get(base, "")
    if os.path.isabs(shared):  # the rules ask to ignore a relative one
        return _nameable(Path(shared) / "slimserve", override)
    return _nameable(_home(environ, override) / below_home / "slimserve", override)


def _home(environ: Mapping[str, str], override: str) -> Path:
    home = environ.get("HOME", "")
    if not home:
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            home = ""
    if not os.path.isabs(home):
        raise UsageError(
            Finding(
                "this user has no home folder",
                f"HOME is {home!r} and user {os.getuid()} has no other entry, so there is no place for files",
                f"set {override} to a folder that can be written",
            )
        )
    return Path(home)
