"""The host's facts from /proc, /sys and the file system. `root` stands for `/`, so that tests bring their own."""

from __future__ import annotations

import os
import re
from pathlib import Path

from slimserve.errors import Finding, Refused
from slimserve.machine import Cpu, Disk, DriverModule, Folder, Memory
from slimserve.probe.cgroup import cpu_quota, tightest_memory_group
from slimserve.probe.limits import read_huge_pages
from slimserve.probe.text import field, kib, printable, read_text

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_CAP_IPC_LOCK = 1 << 14
_PARAMETERS = re.compile(r"(?:iommu|intel_iommu|amd_iommu|pci|pcie_acs_override|iommu\.\w+)(?:=\S*)?")


def read_cpu(root: Path, architecture: str) -> Cpu:
    """The processors, from /proc/cpuinfo, /proc/self/status, the cgroup's quota and /sys.

    Args:
        root: folder that holds `proc` and `sys`.
        architecture: as `uname -m` prints it.

    Raises:
        Refused: when the kernel does not say on which CPUs this process may run.
    """
    allowed = _ranges(field(read_text(root / "proc/self/status") or "", "Cpus_allowed_list") or "")
    if not allowed:
        raise Refused(_unreadable("the CPUs that this process may use", "/proc/self/status"))
    quota = cpu_quota(root)
    # A part of a CPU is not a core, but a process that may run at all has one.
    cores = len(allowed) if quota is None else min(len(allowed), max(1, int(quota)))
    # One block a CPU, all alike: 256 of them would take longer to write than everything else here.
    first = (read_text(root / "proc/cpuinfo", 1 << 13) or "").partition("\n\n")[0]
    name = printable(field(first, "model name") or "").strip()
    flags = set((field(first, "flags") or "").split())
    nodes = _ranges((read_text(root / "sys/devices/system/node/online") or "").strip())
    return Cpu(
        name=name or None,
        architecture=architecture,
        cores=cores,
        sockets=_sockets(root, nodes),
        numa_nodes=len(nodes) or None,
        flags=tuple(flag for flag in FLAGS if flag in flags) if flags else None,
        own_nodes=_own_nodes(root, nodes, set(allowed)),
    )


def read_memory(root: Path) -> Memory:
    """Host memory with the limits that bind this process.

    Args:
        root: folder that holds `proc`, `sys` and `dev`.

    Raises:
        Refused: when the kernel does not state the memory or the lock limit.
    """
    meminfo = read_text(root / "proc/meminfo") or ""
    total, available = (kib(field(meminfo, name)) for name in ("MemTotal", "MemAvailable"))
    if not total or available is None:
        raise Refused(_unreadable("the host's memory", "/proc/meminfo (MemTotal, MemAvailable)"))
    group = tightest_memory_group(root)
    try:
        shm = os.statvfs(root / "dev/shm")
        shm_total, shm_free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    except FileNotFoundError:
        shm_total = shm_free = 0
    except OSError:
        raise Refused(_unreadable("the size of shared memory", "/dev/shm")) from None
    return Memory(
        total_bytes=total,
        available_bytes=available,
        cgroup_limit_bytes=group.limit_bytes if group else None,
        cgroup_used_bytes=group.used_bytes if group else None,
        memlock_bytes=_memlock(root),
        shm_total_bytes=shm_total,
        shm_free_bytes=shm_free,
        own_nodes=tuple(_ranges(field(read_text(root / "proc/self/status") or "", "Mems_allowed_list") or "")) or None,
        huge_pages=read_huge_pages(root),
    )


def read_disk(cache_folder: Path) -> Disk:
    """The file system of the cache folder, or of the deepest folder above it that exists.

    Raises:
        Refused: when no folder on the way can be looked at.
    """
    folder = cache_folder.absolute()
    existing = _existing(folder)
    try:
        status = os.statvfs(existing)
    except OSError as error:
        raise Refused(
            Finding(
                f"cannot look at the cache folder {printable(str(folder))}: {error.strerror}",
                "its free space and its permissions must be known before anything is stored there",
                "name a cache folder that can be reached; a symbolic link on the way may lead nowhere",
            )
        ) from None
    return Disk(
        path=printable(str(folder)),
        free_bytes=status.f_bavail * status.f_frsize,
        total_bytes=status.f_blocks * status.f_frsize,
        writable=_is_writable(existing, status),
        executable=not status.f_flag & os.ST_NOEXEC,
    )


def read_folder(purpose: str, variable: str, folder: Path) -> Folder:
    """A folder that a launch writes to; one that cannot be looked at cannot be written to.

    Args:
        purpose: what is kept there.
        variable: of the environment, which names another.
        folder: it need not exist yet.
    """
    folder = folder.absolute()
    existing = _existing(folder)
    try:
        status = os.statvfs(existing)
    except OSError:
        writable, free = False, 0
    else:
        writable, free = _is_writable(existing, status), status.f_bavail * status.f_frsize
    return Folder(purpose=purpose, path=printable(str(folder)), variable=variable, writable=writable, free_bytes=free)


def _existing(folder: Path) -> Path:
    """The folder, or the deepest one above it that exists."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def _is_writable(existing: Path, status: os.statvfs_result) -> bool:
    # A file in the place of the folder is as bad as a folder without permission, and so is what root may write to and
    # holds no files, such as /proc: it has no blocks at all.
    usable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK) and not status.f_flag & os.ST_RDONLY
    return usable and status.f_blocks > 0


def read_listening_ports(root: Path) -> tuple[int, ...]:
    """TCP ports, versions 4 and 6, on which something listens in this network namespace, in order."""
    ports: set[int] = set()
    for name in ("tcp", "tcp6"):
        for line in (read_text(root / "proc/net" / name) or "").splitlines()[1:]:
            fields = line.split(None, 4)
            if len(fields) > 3 and fields[3] == "0A":  # 0A: LISTEN
                port = int(fields[1].rpartition(":")[2], 16)
                if port:
                    ports.add(port)
    return tuple(sorted(ports))


def read_kernel_parameters(root: Path) -> str | None:
    """The boot parameters that touch traffic between GPUs; the others are nobody's business."""
    words = (read_text(root / "proc/cmdline") or "").split()
    return " ".join(printable(word) for word in words if _PARAMETERS.fullmatch(word)) or None


def _memlock(root: Path) -> int | None:
    """Bytes that this process may lock. The kernel does not hold a process with CAP_IPC_LOCK to the limit."""
    capabilities = field(read_text(root / "proc/self/status") or "", "CapEff") or "0"
    if int(capabilities, 16) & _CAP_IPC_LOCK:
        return None
    found = re.search(r"^Max locked memory\s+(\S+)", read_text(root / "proc/self/limits") or "", re.MULTILINE)
    if not found:
        raise Refused(_unreadable("the limit on locked memory", "/proc/self/limits"))
    return None if found[1] == "unlimited" else int(found[1])


def read_driver_module(root: Path) -> DriverModule:
    """Which of the two kernel modules of the GPU driver is loaded, by the version that it states of itself."""
    text = read_text(root / "proc/driver/nvidia/version", 1 << 12) or ""
    line = next((line for line in text.splitlines() if line.startswith("NVRM version:")), "")
    if "Open Kernel Module" in line:
        return "open"
    return "proprietary" if "Kernel Module" in line else "unknown"


def _own_nodes(root: Path, nodes: list[int], allowed: set[int]) -> tuple[int, ...] | None:
    """NUMA nodes that have one of the allowed CPUs."""
    of_nodes = {
        node: _ranges((read_text(root / f"sys/devices/system/node/node{node}/cpulist") or "").strip()) for node in nodes
    }
    return tuple(node for node, cpus in of_nodes.items() if allowed.intersection(cpus)) or None


def _sockets(root: Path, nodes: list[int]) -> int | None:
    """Processor packages. A NUMA node lies in one package, so one CPU of each node tells."""
    packages: set[str] = set()
    for node in nodes:
        cpus = _ranges((read_text(root / f"sys/devices/system/node/node{node}/cpulist") or "").strip())
        if not cpus:  # a node of memory alone
            continue
        package = read_text(root / f"sys/devices/system/cpu/cpu{cpus[0]}/topology/physical_package_id")
        if package is None:
            return None
        packages.add(package.strip())
    return len(packages) or None


def _ranges(text: str) -> list[int]:
    """The numbers of a kernel list such as `0-3,8`; empty when the text is none."""
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if not found:
            return []
        numbers.extend(range(int(found[1]), int(found[2] or found[1]) + 1))
    return numbers


def _unreadable(what: str, where: str) -> Finding:
    system = os.uname().sysname
    return Finding(
        f"cannot read {what}: {where}",
        f"nothing is assumed in its place; slimserve runs on Linux with /proc mounted, and this system is {system}",
        "run it on Linux with /proc readable, or describe the machine in a file and pass --machine FILE",
    )
