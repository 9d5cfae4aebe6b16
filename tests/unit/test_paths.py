"""Where the registry, the cache and the state lie."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from slimserve import paths
from slimserve.errors import RegistryError, UsageError

FOLDERS = [
    (paths.cache_folder, "SLIMSERVE_CACHE", "XDG_CACHE_HOME", ".cache"),
    (paths.state_folder, "SLIMSERVE_STATE", "XDG_STATE_HOME", ".local/state"),
]


def make_package(root: Path) -> Path:
    package = root / "slimserve"
    package.mkdir()
    return package


def test_the_checkout_finds_its_own_profiles() -> None:
    root = Path(__file__).resolve().parents[2]
    assert paths.profiles_folder() == root / "profiles"


def test_a_wheel_carries_its_profiles_inside(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    (package / "profiles").mkdir()
    (tmp_path / "profiles").mkdir()
    (tmp_path / "pyproject.toml").touch()
    assert paths.profiles_folder(package) == package / "profiles"


def test_a_stranger_named_profiles_in_site_packages_is_not_ours(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    (tmp_path / "profiles").mkdir()
    with pytest.raises(RegistryError, match=r"no profiles folder(.|\n)*do: +install slimserve again"):
        paths.profiles_folder(package)


@pytest.mark.parametrize(("folder", "override", "base", "below"), FOLDERS)
def test_the_override_wins_and_becomes_absolute(
    folder: Callable[[dict[str, str]], Path],
    override: str,
    base: str,
    below: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder({override: "here", base: "/xdg", "HOME": "/home/a"}) == tmp_path / "here"


@pytest.mark.parametrize(("folder", "override", "base", "below"), FOLDERS)
def test_xdg_counts_only_when_absolute(
    folder: Callable[[dict[str, str]], Path], override: str, base: str, below: str
) -> None:
    assert folder({override: "", base: "/xdg", "HOME": "/home/a"}) == Path("/xdg/slimserve")
    assert folder({base: "xdg", "HOME": "/home/a"}) == Path("/home/a", below, "slimserve")
    assert folder({base: "", "HOME": "/home/a"}) == Path("/home/a", below, "slimserve")


@pytest.mark.parametrize(("folder", "override", "base", "below"), FOLDERS)
def test_a_name_that_nothing_can_have_is_refused(
    folder: Callable[[dict[str, str]], Path], override: str, base: str, below: str
) -> None:
    long = "/tmp/" + "a" * 300
    for environment in ({override: long}, {base: long}, {"HOME": long}, {override: "/a" * 5000}):
        with pytest.raises(UsageError, match=f"File name too long(.|\n)*a shorter one in {override}"):
            folder(environment)


@pytest.mark.parametrize(("folder", "override", "base", "below"), FOLDERS)
def test_without_home_the_passwd_entry_counts(
    folder: Callable[[dict[str, str]], Path], override: str, base: str, below: str
) -> None:
    assert folder({}) == Path(pwd.getpwuid(os.getuid()).pw_dir, below, "slimserve")


@pytest.mark.parametrize(("folder", "override", "base", "below"), FOLDERS)
def test_a_user_without_a_home_is_told_the_override(
    folder: Callable[[dict[str, str]], Path], override: str, base: str, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_001)  # as in a container that runs as an arbitrary user
    with pytest.raises(UsageError, match=f"no home folder(.|\n)*set {override}"):
        folder({})
