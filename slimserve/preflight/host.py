"""What is wrong with the host: memory and its limits, huge pages, folders, ports, engines that were lost."""

from __future__ import annotations

from collections.abc import Iterator

from slimserve.machine import GIB, Machine, gib
from slimserve.preflight.concern import Concern

# NCCL and the engine's own message queues put their buffers between workers in /dev/shm; containers start with 64 MiB.
SHM_BYTES = 8 * GIB
# A registration for RDMA or a locked buffer is seldom smaller, and stock systems allow 8 MiB.
MEMLOCK_BYTES = GIB
# Compile caches and one small model; anything less fails while it runs.
DISK_BYTES = 10 * GIB
# Reserved huge pages that nobody has taken are missed when they are more than this share of the memory.
RESERVED_SHARE = 0.05
# A descriptor for each client at the door, and some hundreds for each of the engine's processes.
OPEN_FILES = 4096
# Each of the engine's processes starts threads for every core, and compilers are processes besides.
TASKS = 2048
# Where an endpoint listens unless it is told otherwise; a test holds it to the command line's.
ENDPOINT_PORT = 8000


def memory(machine: Machine) -> Iterator[Concern]:
    """Limits on memory, /dev/shm, and huge pages."""
    host, several = machine.memory, len(machine.gpus) > 1
    limit = host.cgroup_limit_bytes
    if limit is not None and limit < host.total_bytes:
        yield Concern(
            f"the control group allows {gib(limit)} of RAM, and the machine has {gib(host.total_bytes)}",
            f"past it the kernel ends the engine without a word; {gib(host.usable_bytes)} are left now",
            "raise the limit (docker run --memory, systemd MemoryMax=, the pod's memory limit), or plan within it",
        )
    if machine.gpus and host.memlock_bytes is not None and host.memlock_bytes < MEMLOCK_BYTES:
        yield Concern(
            f"only {gib(host.memlock_bytes)} of memory may be locked",
            "buffers that a GPU or a network card reads by itself are locked memory",
            "set memlock to unlimited (/etc/security/limits.conf, systemd LimitMEMLOCK=infinity, "
            "docker run --ulimit memlock=-1)",
        )
    if several and host.shm_total_bytes < SHM_BYTES:
        yield Concern(
            f"/dev/shm has {gib(host.shm_total_bytes)}",
            f"the workers of {len(machine.gpus)} GPUs exchange data there, and it should have {gib(SHM_BYTES)}",
            "docker run --shm-size=16g or --ipc=host; otherwise mount -o remount,size=16G /dev/shm",
        )
    elif several and host.shm_free_bytes < SHM_BYTES // 2:
        yield Concern(
            f"/dev/shm is nearly full: {gib(host.shm_free_bytes)} of {gib(host.shm_total_bytes)} are free",
            f"the workers of {len(machine.gpus)} GPUs exchange data there",
            "remove what programs that ended have left in /dev/shm",
        )
    yield from _huge_pages(machine)


def _huge_pages(machine: Machine) -> Iterator[Concern]:
    pages = machine.memory.huge_pages
    if pages is None:
        return
    if pages.free_bytes > RESERVED_SHARE * machine.memory.total_bytes:
        yield Concern(
            f"{gib(pages.free_bytes)} of {gib(machine.memory.total_bytes)} are reserved as huge pages, and unused",
            "nobody gets this memory who does not ask for huge pages by name, and the engine does not",
            "give it back: sysctl vm.nr_hugepages=0, and take the reservation out of the boot parameters",
        )
    if machine.gpus and pages.transparent == "never":
        yield Concern(
            "transparent huge pages are off",
            "host memory that GPUs read, such as an offloaded table or the second tier, is then locked and mapped in "
            "pages of 4 KiB, some 260,000 for each GiB",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
        )


def disk(machine: Machine) -> Iterator[Concern]:
    """The cache folder."""
    yield from writable(machine)
    yield from loadable(machine)
    cache = machine.disk
    if cache.free_bytes < DISK_BYTES:
        yield Concern(
            f"{gib(cache.free_bytes)} of {gib(cache.total_bytes)} are free where the cache folder {cache.path} lies",
            f"less than {gib(DISK_BYTES)} does not hold a model and the compiled kernels",
            "free some space, or set SLIMSERVE_CACHE to a folder on a larger disk",
        )


def writable(machine: Machine) -> Iterator[Concern]:
    """A cache folder that cannot be written to."""
    if not machine.disk.writable:
        yield Concern(
            f"the cache folder {machine.disk.path} cannot be written to",
            "weights and compiled kernels are kept there",
            "mend its permissions, or set SLIMSERVE_CACHE to a folder of your own",
            blocks="every profile",
        )


def loadable(machine: Machine) -> Iterator[Concern]:
    """A cache folder from which nothing can be run."""
    if machine.disk.executable is False:
        yield Concern(
            f"the file system of the cache folder {machine.disk.path} is mounted noexec",
            "kernels are compiled into libraries there, and loading them fails",
            "mount it without noexec, or set SLIMSERVE_CACHE to a folder elsewhere",
            blocks="profiles on GPUs",
        )


def limits(machine: Machine) -> Iterator[Concern]:
    """Limits of processes."""
    if machine.limits is None:
        return
    files, tasks = machine.limits.open_files, machine.limits.tasks
    if files is not None and files < OPEN_FILES:
        yield Concern(
            f"a process may open {files:,} files at most",
            f"each client, shard and socket takes one; {OPEN_FILES:,} are enough for any profile",
            "raise the hard limit (nofile in /etc/security/limits.conf, systemd LimitNOFILE=, docker --ulimit nofile=)",
        )
    if tasks is not None and tasks < TASKS:
        yield Concern(
            f"{tasks:,} processes and threads are allowed at most",
            f"each of the engine's processes starts threads for every core; {TASKS:,} are enough for any profile",
            "raise it (nproc in /etc/security/limits.conf, systemd TasksMax=, docker --pids-limit, "
            "the pod's PID limit)",
        )


def folders(machine: Machine) -> Iterator[Concern]:
    """Folders beside the cache that a launch writes to."""
    for folder in machine.folders:
        if not folder.writable:
            yield Concern(
                f"{folder.path} cannot be written to",
                f"{folder.purpose} are kept there",
                f"mend its permissions, or set {folder.variable} to a folder of your own",
                blocks="every profile",
            )
        elif not folder.free_bytes:
            yield Concern(
                f"the disk of {folder.path} is full",
                f"{folder.purpose} are kept there",
                f"free some space, or set {folder.variable} to a folder on another disk",
                blocks="every profile",
            )


def in_the_way(machine: Machine) -> Iterator[Concern]:
    """Engines that were lost, and strangers at the endpoint's port."""
    for engine in machine.engines:
        if engine.lost:
            pids = " ".join(map(str, engine.pids))
            yield Concern(
                f"an engine of {engine.profile} lives, and its supervisor does not: processes {pids}",
                "it holds memory, and the port of a server that nobody looks after",
                f"the next start ends it; by hand: kill -9 {pids}",
            )
    ours = {engine.port for engine in machine.engines}
    if ENDPOINT_PORT in machine.listening_ports and ENDPOINT_PORT not in ours:
        yield Concern(
            f"port {ENDPOINT_PORT} is taken by another program",
            "it is where an endpoint listens unless --port says otherwise",
            "start with --port N, or stop the other program (`sudo ss -tlnp` names it)",
        )
