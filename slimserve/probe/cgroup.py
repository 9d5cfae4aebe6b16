"""The limits of the control groups that this process is in, versions 1 and 2.

A limit of any group from the process's own up to the root binds, so every level is read. Sources: the kernel's
admin-guide `cgroup-v2` (memory.max, memory.current, memory.stat, cpu.max, pids.max) and `cgroup-v1/memory`
(limit_in_bytes, usage_in_bytes, memory.stat total_*).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from slimserve.probe.text import read_text
from slimserve.records import dataclass

# Version 1 says "no limit" with the largest multiple of a page that fits a signed 64-bit number.
_NO_LIMIT_V1 = 1 << 62


@dataclass(frozen=True)
class MemoryGroup:
    """One group's memory: its limit, and what it holds without file cache that it can drop, in bytes."""

    limit_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class _Hierarchy:
    """Where one hierarchy is mounted and which group of it this process is in."""

    version: int
    mount: Path
    leaf: Path

    def levels(self) -> Iterator[Path]:
        """The process's group, then each group above it."""
        folder = self.leaf
        while True:
            yield folder
            if folder == self.mount:
                return
            folder = folder.parent


def tightest_memory_group(root: Path) -> MemoryGroup | None:
    """The group that leaves the least room, which is the one that ends this process first.

    Args:
        root: folder that holds `proc` and `sys`.

    Returns:
        The group; None when no group sets a limit.
    """
    groups = [
        group for tree in _hierarchies(root, "memory") for level in tree.levels() if (group := _memory(tree, level))
    ]
    return min(groups, key=lambda group: (group.limit_bytes - group.used_bytes, group.limit_bytes), default=None)


def cpu_quota(root: Path) -> float | None:
    """CPUs' worth of time that the groups allow, the least of all levels; None when none sets a quota.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    quotas = [quota for tree in _hierarchies(root, "cpu") for level in tree.levels() if (quota := _quota(tree, level))]
    return min(quotas, default=None)


def task_limit(root: Path) -> int | None:
    """Processes and threads that the groups allow, the least of all levels; None when none sets a limit.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    trees = _hierarchies(root, "pids")
    limits = [_number(read_text(level / "pids.max")) for tree in trees for level in tree.levels()]
    return min((limit for limit in limits if limit is not None), default=None)


def _memory(tree: _Hierarchy, folder: Path) -> MemoryGroup | None:
    names = (
        ("memory.max", "memory.current") if tree.version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    limit, used = (_number(read_text(folder / name)) for name in names)
    if limit is None or used is None or limit >= _NO_LIMIT_V1:
        return None
    # File cache counts as used until the kernel wants it back. Weights that were read once stay in it, and a group
    # that is full of them is not full.
    prefix = "" if tree.version == 2 else "total_"
    stat = dict(line.split(" ", 1) for line in (read_text(folder / "memory.stat") or "").splitlines() if " " in line)
    cache = sum(_number(stat.get(f"{prefix}{kind}_file")) or 0 for kind in ("active", "inactive"))
    return MemoryGroup(limit, max(0, used - cache))


def _quota(tree: _Hierarchy, folder: Path) -> float | None:
    if tree.version == 2:
        quota, period = (*(read_text(folder / "cpu.max") or "").split(), "", "")[:2]
    else:
        quota, period = (read_text(folder / name) or "" for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    quota_us, period_us = _number(quota), _number(period)
    return quota_us / period_us if quota_us and period_us else None


def _hierarchies(root: Path, controller: str) -> Iterator[_Hierarchy]:
    """The hierarchies that can limit `controller`; a machine in transition has one of each version."""
    paths: dict[int, str] = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        head, _, tail = line.partition(" - ")
        fields, kinds = head.split(), tail.split()
        if len(fields) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if kinds[0] == "cgroup2" else 1
        if version not in paths or (version == 1 and controller not in kinds[-1].split(",")):
            continue
        mount = root / fields[4].lstrip("/")
        yield _Hierarchy(version, mount, _leaf(mount, fields[3], paths[version]))


def _leaf(mount: Path, mounted: str, path: str) -> Path:
    """The process's group below the mount. A container sees its own group, or one above, mounted as the root."""
    below = PurePosixPath(path)
    if below.is_relative_to(mounted):
        below = below.relative_to(mounted)
    relative = str(below).lstrip("/")
    leaf = mount / relative
    # A path that leads out of the namespace ("/../..") or that is not mounted here: what is mounted still binds.
    return leaf if ".." not in below.parts and leaf.is_dir() else mount


def _number(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() else None
