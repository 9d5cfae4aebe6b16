"""Writes requirements/cpu.lock and requirements/dev.lock: exact versions and sha256 for CPython 3.11 on x86-64 Linux.

    python tools/lock.py               keep every version that still fits; a second run changes nothing
    python tools/lock.py --upgrade     take the newest versions that fit
    python tools/lock.py --check       exit 1 when the files are not what a run would write

What is wanted stands in pyproject.toml (core, `cpu`, `dev`) and requirements/setup.in; what is left out of it in
requirements/left-out.in, except that `dev` gets what it names itself. The resolver is uv, which reads no pip
configuration: where the index is not the public one, say so with UV_DEFAULT_INDEX.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
PYTHON = "3.11"
# The oldest glibc for which every package has a wheel (llguidance asks for 2.31): nothing is built from source.
PLATFORM = "x86_64-manylinux_2_31"
HEADERS = {
    "cpu.lock": "# The CPU lane; torch is in torch-cpu.lock. Install: pip install --no-deps --require-hashes -r FILE",
    "dev.lock": "# What `make test` needs beside cpu.lock. Install: pip install --no-deps --require-hashes -r FILE",
}
WRITTEN_BY = "# Written by tools/lock.py (`make lock`); CPython 3.11, x86-64 Linux, glibc 2.31 or newer."


def normalise(name: str) -> str:
    """A distribution's name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path) -> dict[str, str]:
    """Name -> version of a lock file; empty when there is no file yet."""
    if not path.exists():
        return {}
    pins = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {normalise(name): version for name, version in pins}


def render_pins(pins: dict[str, str]) -> str:
    """One `name==version` a line, sorted by name."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))


def compile_with_uv(arguments: list[str], output: Path) -> None:
    """One run of `uv pip compile` for the locked interpreter and platform.

    Raises:
        SystemExit: when uv finds no set of versions; its own explanation has been printed by then.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-build", "--no-header", "--no-annotate"]
    command += ["--python-version", PYTHON, "--python-platform", PLATFORM, *arguments, "--output-file", str(output)]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        sys.exit(
            "lock: no lock file was changed\n  why: the resolver failed, see above\n  do:  mend that, or --upgrade"
        )


def left_out() -> set[str]:
    """The names of requirements/left-out.in."""
    lines = (REQUIREMENTS / "left-out.in").read_text(encoding="utf-8").splitlines()
    return {normalise(line) for line in lines if line and not line.startswith("#")}


def named_by(extra: str) -> set[str]:
    """The names that an extra of pyproject.toml asks for by itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        normalise(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) for line in project["optional-dependencies"][extra]
    }


def resolve(inputs: list[str], pins: dict[str, str], without: set[str], folder: Path) -> dict[str, str]:
    """Name -> version for everything that `inputs` need `without` some, keeping `pins` where they still fit."""
    output, excludes = folder / "resolved.txt", folder / "excludes.in"
    output.write_text(render_pins(pins), encoding="utf-8")
    excludes.write_text("".join(f"{name}\n" for name in sorted(without)), encoding="utf-8")
    compile_with_uv([*inputs, "--excludes", str(excludes)], output)
    return read_pins(output)


def find_hashes(pins: dict[str, str], folder: Path) -> dict[str, list[str]]:
    """Name -> sha256 of every wheel of that version that fits the locked interpreter and platform."""
    wanted, output = folder / "wanted.in", folder / "pylock.toml"
    wanted.write_text(render_pins(pins), encoding="utf-8")
    compile_with_uv([str(wanted), "--no-deps", "--format", "pylock.toml"], output)
    packages = tomllib.loads(output.read_text(encoding="utf-8"))["packages"]
    return {
        normalise(package["name"]): sorted(wheel["hashes"]["sha256"] for wheel in package["wheels"])
        for package in packages
    }


def render(name: str, pins: dict[str, str], hashes: dict[str, list[str]]) -> str:
    """The text of one lock file."""
    lines = [HEADERS[name], WRITTEN_BY]
    for package, version in sorted(pins.items()):
        lines.append(" \\\n    ".join([f"{package}=={version}", *(f"--hash=sha256:{h}" for h in hashes[package])]))
    return "\n".join(lines) + "\n"


def build_locks(upgrade: bool) -> dict[str, str]:
    """File name -> text, for both lock files.

    Args:
        upgrade: forget the versions that the files hold now.
    """
    old = {} if upgrade else {name: read_pins(REQUIREMENTS / name) for name in HEADERS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        lane = ["pyproject.toml", str(REQUIREMENTS / "setup.in"), "--extra", "cpu"]
        cpu = resolve(lane, old.get("cpu.lock", {}), left_out(), folder)
        both = resolve([*lane, "--extra", "dev"], old.get("dev.lock", {}) | cpu, left_out() - named_by("dev"), folder)
        moved = sorted(name for name, version in cpu.items() if both[name] != version)
        if moved:
            sys.exit(
                f"lock: `dev` asks for other versions than the CPU lane of {', '.join(moved)}\n"
                "  why: one virtual environment holds both\n  do:  loosen `dev` in pyproject.toml"
            )
        hashes = find_hashes(both, folder)
    dev = {name: version for name, version in both.items() if name not in cpu}
    return {"cpu.lock": render("cpu.lock", cpu, hashes), "dev.lock": render("dev.lock", dev, hashes)}


def main() -> int:
    """Parse, lock, write or compare; the exit code."""
    parser = argparse.ArgumentParser(description="Writes requirements/cpu.lock and requirements/dev.lock.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file would change")
    options = parser.parse_args()
    stale = []
    for name, text in build_locks(options.upgrade).items():
        path = REQUIREMENTS / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not options.check:
            path.write_text(text, encoding="utf-8")
    if not stale:
        print("lock: nothing to do")
        return 0
    print(f"lock: {'would change' if options.check else 'wrote'} {', '.join(stale)}")
    return 1 if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
