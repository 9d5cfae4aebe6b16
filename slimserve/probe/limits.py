"""Limits of processes, and huge pages: from /proc/self and /sys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from slimserve.machine import HugePages, Limits
from slimserve.probe.cgroup import task_limit
from slimserve.probe.text import field, kib, read_text

# The kernel does not hold a process with one of these to the limit of its user's processes.
_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 1 << 21, 1 << 24

_MODES: tuple[Literal["always", "madvise", "never"], ...] = ("always", "madvise", "never")


def read_limits(root: Path) -> Limits | None:
    """Open files and tasks; None when the kernel does not state them.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    text = read_text(root / "proc/self/limits") or ""
    files, processes = _row(text, "Max open files", 2), _row(text, "Max processes", 1)
    if files is None or processes is None:
        return None
    capabilities = field(read_text(root / "proc/self/status") or "", "CapEff") or "0"
    free = int(capabilities, 16) & (_CAP_SYS_ADMIN | _CAP_SYS_RESOURCE)
    tasks = [limit for limit in (None if free else _number(processes), task_limit(root)) if limit is not None]
    return Limits(open_files=_number(files), tasks=min(tasks, default=None))


def read_huge_pages(root: Path) -> HugePages | None:
    """What is reserved and free, and who gets them unasked; None when the kernel states none of it.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    meminfo = read_text(root / "proc/meminfo") or ""
    total, free, size = (field(meminfo, name) for name in ("HugePages_Total", "HugePages_Free", "Hugepagesize"))
    each = kib(size)
    if each is None or not (total or "").isdigit() or not (free or "").isdigit():
        return None
    modes = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = [mode for mode in _MODES if f"[{mode}]" in modes]
    return HugePages(
        reserved_bytes=int(total or 0) * each,
        free_bytes=int(free or 0) * each,
        transparent=chosen[0] if chosen else "unknown",
    )


def _row(text: str, name: str, column: int) -> str | None:
    """A cell of /proc/PID/limits; column 1 is what holds now, 2 what it can be raised to."""
    found = re.search(rf"^{name}\s+(\S+)\s+(\S+)", text, re.MULTILINE)
    return found[column] if found and all(re.fullmatch("[0-9]+|unlimited", cell) for cell in found.groups()) else None


def _number(text: str) -> int | None:
    return None if text == "unlimited" else int(text)
