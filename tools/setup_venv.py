"""Makes .venv from the lock files, or finds at once that it is made. Run by tools/setup; standard library only.

    setup_venv.py cpu      the engine, the libraries and slimserve itself (editable)
    setup_venv.py dev      that and what `make test` needs

What is installed is remembered in .venv/slimserve-setup.json, one key a layer. That file says "unfinished" while a
layer is being installed: a .venv found in that state is thrown away, since pip takes a half-written package for a
whole one. One process at a time works on a checkout (flock); pip inherits the lock, so that a pip which outlived its
set-up still holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from setup_steps import SetupError, Step, StepFailed, install_torch, say

ROOT = Path(__file__).resolve().parent.parent
PYTHON_VERSION = "{}.{}".format(*sys.version_info)
NEEDED_BYTES = 3 * 2**30  # the installed lane is 1.9 GB; the rest is wheels on their way in
OLDEST_GLIBC = (2, 31)  # tools/lock.py locks for this one
LAYERS = ("engine", "dev", "project")


@dataclass(frozen=True)
class Checkout:
    """One working copy and the places in it that set-up writes.

    Args:
        root: the folder that holds pyproject.toml.
    """

    root: Path

    @property
    def venv(self) -> Path:
        """The virtual environment."""
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.venv / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """Remembers what .venv holds."""
        return self.venv / "slimserve-setup.json"

    @property
    def scratch(self) -> Path:
        """Lock, logs and what is on its way to deletion."""
        return self.root / ".stamps"

    def lock_file(self, name: str) -> Path:
        """A file of requirements/."""
        return self.root / "requirements" / name


def hash_inputs(paths: Sequence[Path], *words: str) -> str:
    """sha256 over some words and the content of some files."""
    digest = hashlib.sha256("\0".join(words).encode())
    for path in paths:
        digest.update(b"\0" + path.read_bytes())
    return digest.hexdigest()


def wanted_keys(checkout: Checkout, lane: str) -> dict[str, str]:
    """Layer -> key, for the layers of a lane. A venv cannot be moved, so its path is part of the first key."""
    engine = [checkout.lock_file("torch-cpu.lock"), checkout.lock_file("cpu.lock")]
    keys = {
        "engine": hash_inputs(engine, str(checkout.venv), PYTHON_VERSION),
        "project": hash_inputs([checkout.root / "pyproject.toml"]),
    }
    if lane == "dev":
        keys["dev"] = hash_inputs([checkout.lock_file("dev.lock")])
    return keys


def read_stamp(checkout: Checkout) -> dict[str, str]:
    """Layer -> key of what .venv holds whole; empty when it is absent, unfinished, unreadable or has lost a piece."""
    try:
        held = json.loads(checkout.stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(held, dict) or held.get("unfinished", True):
        return {}
    site = checkout.venv / "lib" / f"python{PYTHON_VERSION}" / "site-packages"
    if not (os.access(checkout.python, os.X_OK) and (site / "torch").is_dir() and (site / "vllm").is_dir()):
        return {}
    keys = {layer: held[layer] for layer in LAYERS if isinstance(held.get(layer), str)}
    if not os.access(checkout.venv / "bin" / "slimserve", os.X_OK):
        keys.pop("project", None)
    return keys


def write_stamp(checkout: Checkout, keys: dict[str, str], *, unfinished: bool) -> None:
    """Replace the stamp in one step: a reader sees the old one or the new one."""
    fresh = checkout.stamp.with_suffix(".new")
    fresh.write_text(json.dumps({"unfinished": unfinished, **keys}, indent=1) + "\n", encoding="utf-8")
    fresh.replace(checkout.stamp)


def check_machine(checkout: Checkout) -> None:
    """Refuse what the locks are not for, before anything is written.

    Raises:
        SetupError: another system, no venv module, or too little disk.
    """
    system, libc, version = f"{sys.platform} {platform.machine()}", *platform.libc_ver()
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if system != "linux x86_64" or libc != "glibc" or number < OLDEST_GLIBC:
        raise SetupError(
            f"this is {system} with {libc or 'another C library'} {version}".rstrip(),
            "the CPU lane is locked for x86-64 Linux with glibc 2.31 or newer; its wheels exist for no other",
            "use such a machine (Debian 11, Ubuntu 20.04 or newer)",
            code=3,
        )
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(
            f"{sys.executable} has no module {' and no module '.join(missing)}",
            "a virtual environment is made with them; Debian and its kin ship them in a package of their own",
            "apt-get install python3-venv, then the same again",
            code=3,
        )
    free_bytes = shutil.disk_usage(checkout.root).free
    if free_bytes < NEEDED_BYTES:
        raise SetupError(
            f"{free_bytes / 2**30:.1f} GiB free where {checkout.root} lies",
            f"set-up needs {NEEDED_BYTES / 2**30:.0f} GiB there",
            "make room, or clone on a larger disk",
            code=3,
        )


@contextlib.contextmanager
def hold_lock(checkout: Checkout) -> Iterator[int]:
    """The checkout's set-up lock, as a file descriptor that children may inherit. Waits for another holder."""
    checkout.scratch.mkdir(exist_ok=True)
    with open(checkout.scratch / "setup.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is at work in this checkout; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def discard_venv(checkout: Checkout) -> None:
    """Take .venv away: one that set-up made is deleted, any other is kept under .stamps/."""
    for old in checkout.scratch.glob("discarded-*"):
        shutil.rmtree(old, ignore_errors=True)
    if not os.path.lexists(checkout.venv):
        return
    empty = checkout.venv.is_dir() and not any(checkout.venv.iterdir())
    mine = empty or (any(checkout.venv.glob("slimserve-setup.*")) and not checkout.venv.is_symlink())
    kept = checkout.scratch / f"{'discarded' if mine else 'kept'}-{time.time_ns()}"
    checkout.venv.rename(kept)
    if mine:
        shutil.rmtree(kept, ignore_errors=True)
    else:
        say(f".venv was not made by set-up: moved to {kept.relative_to(checkout.root)}")


@contextlib.contextmanager
def add_layer(checkout: Checkout, held: dict[str, str], layer: str, key: str) -> Iterator[None]:
    """Put one more layer onto a whole .venv: unfinished inside, remembered in `held` and in the stamp after."""
    write_stamp(checkout, held, unfinished=True)
    try:
        yield
    except StepFailed as failure:
        # Offline, say: what was whole before stays usable. Once pip has begun to write, nobody knows.
        if not failure.began_to_install:
            write_stamp(checkout, held, unfinished=False)
        raise
    held[layer] = key
    write_stamp(checkout, held, unfinished=False)


def install(checkout: Checkout, lane: str, lock: int) -> None:
    """Bring .venv from whatever it is to what the lane wants. The caller holds the lock.

    Raises:
        SetupError: a step failed; the same call again goes on or starts afresh.
    """
    wanted, held = wanted_keys(checkout, lane), read_stamp(checkout)
    step = Step(checkout.root, checkout.scratch / "setup.log", lock)
    step.log.write_text("", encoding="utf-8")
    pip: list[str | Path] = [checkout.python, "-m", "pip", "install", "--no-deps", "--require-hashes"]
    pip += ["--only-binary", ":all:", "--progress-bar", "off"]
    # A layer whose lock changed may leave packages behind that the new lock lacks: only a new .venv is the same twice.
    if held.get("engine") != wanted["engine"] or ("dev" in held and held["dev"] != wanted.get("dev", held["dev"])):
        check_machine(checkout)
        if os.path.lexists(checkout.venv):
            say("making .venv anew: it is unfinished, or for other lock files or another place")
        discard_venv(checkout)
        checkout.venv.mkdir()
        held = {}
        write_stamp(checkout, held, unfinished=True)
        step.run("virtual environment", [sys.executable, "-m", "venv", checkout.venv])
        install_torch(step, pip, checkout.lock_file("torch-cpu.lock"))
        step.run("engine and libraries (about 230 MB, a minute or two)", [*pip, "-r", checkout.lock_file("cpu.lock")])
        held["engine"] = wanted["engine"]
        write_stamp(checkout, held, unfinished=False)
    if "dev" in wanted and "dev" not in held:
        with add_layer(checkout, held, "dev", wanted["dev"]):
            step.run("test tools", [*pip, "-r", checkout.lock_file("dev.lock")])
    if held.get("project") != wanted["project"]:
        held.pop("project", None)
        editable = ["--no-deps", "--no-index", "--no-build-isolation", "--editable", str(checkout.root)]
        with add_layer(checkout, held, "project", wanted["project"]):
            step.run("slimserve (editable)", [checkout.python, "-m", "pip", "install", *editable])


def stop(signum: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM unwinds like Ctrl-C, so that the running step is ended too."""
    raise KeyboardInterrupt


def is_ready(checkout: Checkout, lane: str) -> bool:
    """Whether .venv holds everything that the lane wants."""
    wanted = wanted_keys(checkout, lane)
    held = read_stamp(checkout)
    return all(held.get(layer) == key for layer, key in wanted.items())


def main(arguments: Sequence[str], checkout: Checkout = Checkout(ROOT)) -> int:
    """Set up one lane.

    Args:
        arguments: the lane, `cpu` or `dev`.

    Returns:
        0 ready, 1 a step broke, 2 usage, 3 not on this machine, 130 interrupted.
    """
    if list(arguments) not in (["cpu"], ["dev"]):
        print("setup: name one lane\n  why: there are two\n  do:  tools/setup cpu, or tools/setup dev", file=sys.stderr)
        return 2
    lane = arguments[0]
    signal.signal(signal.SIGTERM, stop)
    try:
        if is_ready(checkout, lane):
            return 0
        with hold_lock(checkout) as lock:
            # Asked again under the lock: whoever held it may have done the work.
            if not is_ready(checkout, lane):
                install(checkout, lane, lock)
                say("ready")
    except SetupError as error:
        say(str(error))
        return error.code
    except OSError as error:
        say(
            f"{error}\n  why: set-up writes .venv and .stamps in {checkout.root}\n  do:  mend that, then the same again"
        )
        return 1
    except KeyboardInterrupt:
        say("interrupted\n  why: a signal came\n  do:  the same again; what is half made is made anew")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
