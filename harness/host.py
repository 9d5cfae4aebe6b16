"""Where and on what a measurement was taken: the least that a committed number needs beside it."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slimserve.probe.host import read_cpu


def host() -> dict[str, Any]:
    """Date, commit (with -dirty), processor, cores and Python of this run."""
    root = Path(__file__).resolve().parent.parent
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    cpu = read_cpu(Path("/"), platform.machine())
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": commit or "unknown",
        "cpu": cpu.name,
        "cores": cpu.cores,
        "python": platform.python_version(),
    }
