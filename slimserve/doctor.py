"""What is wrong with a machine for serving, and how to mend it; and the machine in words.

Only what was seen is judged: a fact that is unknown gives no finding, except that GPUs could not be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from slimserve.errors import Finding
from slimserve.machine import FINDINGS_KEY, GIB, Gpu, Machine, gib
from slimserve.shapes import plain

# NCCL and the engine's own message queues put their buffers between workers in /dev/shm; containers start with 64 MiB.
SHM_BYTES = 8 * GIB
# A registration for RDMA or a locked buffer is seldom smaller, and stock systems allow 8 MiB.
MEMLOCK_BYTES = GIB
# Compile caches and one small model; anything less fails while it runs.
DISK_BYTES = 10 * GIB
# An idle card holds several hundred MiB for itself; what is beyond belongs to somebody.
UNSEEN_BYTES = 2 * GIB


def findings(machine: Machine) -> tuple[Finding, ...]:
    """What is wrong here, the GPUs first.

    Args:
        machine: the facts.

    Returns:
        One finding for each thing that is wrong; empty when nothing is.
    """
    return (*_reading(machine), *_gpus(machine), *_links(machine), *_memory(machine), *_disk(machine))


def _reading(machine: Machine) -> Iterator[Finding]:
    problem = machine.gpu_problem
    if problem:
        yield Finding(problem.what, problem.why, problem.do)
    if machine.hidden_gpus and not machine.gpus:
        yield Finding(
            f"all {machine.hidden_gpus} GPUs are hidden by CUDA_VISIBLE_DEVICES",
            "a program that is started here sees none of them",
            "unset CUDA_VISIBLE_DEVICES, or list the GPUs to use",
        )


def _gpus(machine: Machine) -> Iterator[Finding]:
    gpus = machine.gpus
    cut = [gpu for gpu in gpus if gpu.mig == "on"]
    if cut:
        yield Finding(
            f"MIG is on: GPU {_numbers(cut)}",
            "a program sees a slice of such a card and never the whole of it",
            "switch it off (nvidia-smi -i N -mig 0, as root, nothing running), or choose one slice by its UUID "
            "in CUDA_VISIBLE_DEVICES",
        )
    for gpu in gpus:
        held = gpu.memory_bytes - gpu.free_bytes
        if gpu.processes:
            names = ", ".join(
                f"{process.name or 'a process'} ({process.pid}"
                + (f", {gib(process.used_bytes)})" if process.used_bytes is not None else ")")
                for process in gpu.processes
            )
            yield Finding(
                f"GPU {gpu.index} is in use: {gib(held)} of {gib(gpu.memory_bytes)} are taken, by {names}",
                "a plan counts on what is free when the engine starts",
                "end these processes if they are not needed, or choose other GPUs by CUDA_VISIBLE_DEVICES",
            )
        elif held > UNSEEN_BYTES and gpu.mig != "instance":
            yield Finding(
                f"GPU {gpu.index} is in use: {gib(held)} of {gib(gpu.memory_bytes)} are taken, and no process is seen",
                "they belong to another container or user, or to a process that did not end cleanly",
                "run nvidia-smi as root outside any container; if it shows none either, reset the GPU "
                f"(nvidia-smi --gpu-reset -i {gpu.index})",
            )
    kinds = _kinds(gpus)
    if len(kinds) > 1:
        shown = "; ".join(f"GPU {_numbers(group)}: {kind}" for kind, group in kinds.items())
        yield Finding(
            f"the GPUs are not all alike: {shown}",
            "work that is split over them runs at the pace and in the memory of the least",
            "choose GPUs of one kind by CUDA_VISIBLE_DEVICES, with CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def _links(machine: Machine) -> Iterator[Finding]:
    pairs = list(combinations(machine.gpus, 2))
    off = [(a, b) for a, b in pairs if "none" in (a.link(b), b.link(a))]
    if off:
        which = "between any two GPUs" if len(off) == len(pairs) else "between GPU " + _pairs(off)
        boot = f"; the kernel was started with {machine.kernel_parameters}" if machine.kernel_parameters else ""
        yield Finding(
            f"no peer-to-peer access {which}{boot}",
            "what these GPUs send each other goes through host memory: right, and slower",
            "look at IOMMU and ACS in the firmware and at iommu= among the boot parameters; GeForce cards also need "
            "a driver that allows it",
        )
    # Over NVLink the window does not matter. Without it, a peer reaches only what the window covers.
    narrow = [
        gpu
        for gpu in machine.gpus
        if len(machine.gpus) > 1
        and gpu.bar1_bytes is not None
        and gpu.bar1_bytes < gpu.memory_bytes
        and not any(gpu.link(other) == "nvlink" for other in machine.gpus)
    ]
    if narrow:
        least = min(narrow, key=lambda gpu: gpu.bar1_bytes or 0)
        yield Finding(
            f"the BAR1 window of GPU {_numbers(narrow)} is smaller than its memory: "
            f"{gib(least.bar1_bytes or 0)} of {gib(least.memory_bytes)}",
            "without NVLink, GPUs reach each other's memory through this window",
            'switch on "Above 4G decoding" and "Resizable BAR" in the firmware',
        )


def _memory(machine: Machine) -> Iterator[Finding]:
    memory = machine.memory
    limit = memory.cgroup_limit_bytes
    if limit is not None and limit < memory.total_bytes:
        yield Finding(
            f"the control group allows {gib(limit)} of RAM, and the machine has {gib(memory.total_bytes)}",
            f"past it the kernel ends the engine without a word; {gib(memory.usable_bytes)} are left now",
            "raise the limit (docker run --memory, systemd MemoryMax=, the pod's memory limit), or plan within it",
        )
    if machine.gpus and memory.memlock_bytes is not None and memory.memlock_bytes < MEMLOCK_BYTES:
        yield Finding(
            f"only {gib(memory.memlock_bytes)} of memory may be locked",
            "buffers that a GPU or a network card reads by itself are locked memory",
            "set memlock to unlimited (/etc/security/limits.conf, systemd LimitMEMLOCK=infinity, "
            "docker run --ulimit memlock=-1)",
        )
    if len(machine.gpus) > 1 and memory.shm_total_bytes < SHM_BYTES:
        yield Finding(
            f"/dev/shm has {gib(memory.shm_total_bytes)}",
            f"the workers of {len(machine.gpus)} GPUs exchange data there, and it should have {gib(SHM_BYTES)}",
            "docker run --shm-size=16g or --ipc=host; otherwise mount -o remount,size=16G /dev/shm",
        )
    elif len(machine.gpus) > 1 and memory.shm_free_bytes < SHM_BYTES // 2:
        yield Finding(
            f"/dev/shm is nearly full: {gib(memory.shm_free_bytes)} of {gib(memory.shm_total_bytes)} are free",
            f"the workers of {len(machine.gpus)} GPUs exchange data there",
            "remove what programs that ended have left in /dev/shm",
        )


def _disk(machine: Machine) -> Iterator[Finding]:
    disk = machine.disk
    if not disk.writable:
        yield Finding(
            f"the cache folder {disk.path} cannot be written to",
            "weights and compiled kernels are kept there",
            "mend its permissions, or set SLIMSERVE_CACHE to a folder of your own",
        )
    if disk.free_bytes < DISK_BYTES:
        yield Finding(
            f"{gib(disk.free_bytes)} of {gib(disk.total_bytes)} are free where the cache folder {disk.path} lies",
            f"less than {gib(DISK_BYTES)} does not hold a model and the compiled kernels",
            "free some space, or set SLIMSERVE_CACHE to a folder on a larger disk",
        )


def to_json(machine: Machine, findings: Sequence[Finding]) -> dict[str, Any]:
    """The machine and what is wrong with it as plain data, which `load_machine` takes as a file."""
    return {**plain(machine), FINDINGS_KEY: [finding.to_json() for finding in findings]}


def render(machine: Machine, findings: Sequence[Finding]) -> str:
    """The machine and what is wrong with it, as plain text.

    Args:
        machine: the facts.
        findings: what `findings` returned for it.

    Returns:
        Lines without colour, each ended by a line break; sizes in GiB. What is unknown is said to be, or left out.
    """
    sections = [
        ("machine", _machine_lines(machine)),
        ("memory", _memory_lines(machine)),
        ("GPUs", _gpu_lines(machine)),
        ("findings", _finding_lines(findings)),
    ]
    return "\n".join(f"{title}\n" + "".join(f"  {line}".rstrip() + "\n" for line in lines) for title, lines in sections)


def _machine_lines(machine: Machine) -> list[str]:
    cpu, disk = machine.cpu, machine.disk
    rows = [
        ("source", machine.source),
        ("system", f"{machine.system} on {cpu.architecture}"),
        ("processor", f"{cpu.name or 'name unknown'}, {_count(cpu.cores, 'core')} to use"),
    ]
    if cpu.sockets and cpu.numa_nodes:
        rows.append(("layout", f"{_count(cpu.sockets, 'socket')}, {_count(cpu.numa_nodes, 'NUMA node')}"))
    rows.append(("vector units", " ".join(cpu.flags) or "none of those that matter"))
    if machine.kernel_parameters:
        rows.append(("booted with", machine.kernel_parameters))
    rows.append(("cache folder", disk.path if disk.writable else f"{disk.path} (not writable)"))
    rows.append(("disk", f"{gib(disk.free_bytes)} free of {gib(disk.total_bytes)}"))
    if machine.listening_ports:
        rows.append(("ports taken", " ".join(map(str, machine.listening_ports))))
    return _aligned(rows)


def _memory_lines(machine: Machine) -> list[str]:
    memory = machine.memory
    rows = [("RAM", f"{gib(memory.available_bytes)} available of {gib(memory.total_bytes)}")]
    if memory.cgroup_limit_bytes is not None and memory.cgroup_used_bytes is not None:
        rows.append(
            ("control group", f"{gib(memory.cgroup_used_bytes)} used of {gib(memory.cgroup_limit_bytes)} allowed")
        )
    rows.append(("usable", gib(memory.usable_bytes)))
    rows.append(("lockable", "unlimited" if memory.memlock_bytes is None else gib(memory.memlock_bytes)))
    rows.append(("/dev/shm", f"{gib(memory.shm_free_bytes)} free of {gib(memory.shm_total_bytes)}"))
    return _aligned(rows)


def _gpu_lines(machine: Machine) -> list[str]:
    lines = [f"driver {machine.driver}"] if machine.driver else []
    if machine.hidden_gpus:
        lines.append(f"{machine.hidden_gpus} hidden by CUDA_VISIBLE_DEVICES")
    if not machine.gpus:
        lines.append("none could be read" if machine.gpu_problem else "none to use" if machine.hidden_gpus else "none")
    lines += _table([_gpu_row(gpu) for gpu in machine.gpus])
    if len(machine.gpus) > 1:
        lines += ["", "from \\ to", *_matrix(machine.gpus)]
    return lines


def _gpu_row(gpu: Gpu) -> list[str]:
    generation, width = gpu.pcie_generation or "?", gpu.pcie_width or "?"
    known = gpu.pcie_generation or gpu.pcie_width
    return [
        str(gpu.index),
        gpu.name,
        f"capability {gpu.capability}",
        f"{gib(gpu.free_bytes)} free of {gib(gpu.memory_bytes)}",
        {"off": "", "on": "MIG on", "instance": "MIG instance", "unknown": "MIG unknown"}[gpu.mig],
        f"PCIe {generation} x{width}" if known else "",
        f"BAR1 {gib(gpu.bar1_bytes)}" if gpu.bar1_bytes is not None else "",
        f"NUMA {gpu.numa_node}" if gpu.numa_node is not None else "",
        gpu.uuid,
    ]


def _matrix(gpus: Sequence[Gpu]) -> list[str]:
    head = ["", *(str(gpu.index) for gpu in gpus)]
    return _table([head, *([str(a.index), *("-" if a is b else a.link(b) for b in gpus)] for a in gpus)])


def _finding_lines(findings: Sequence[Finding]) -> list[str]:
    return [line for finding in findings for line in str(finding).splitlines()] or ["nothing is wrong"]


def _kinds(gpus: Sequence[Gpu]) -> dict[str, list[Gpu]]:
    kinds: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        kinds.setdefault(f"{gpu.name}, {gib(gpu.memory_bytes)}, capability {gpu.capability}", []).append(gpu)
    return kinds


def _numbers(gpus: Sequence[Gpu]) -> str:
    return ", ".join(str(gpu.index) for gpu in gpus)


def _pairs(pairs: Sequence[tuple[Gpu, Gpu]]) -> str:
    shown = ", ".join(f"{a.index} and {b.index}" for a, b in pairs[:4])
    return shown + (f" and {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with their columns aligned; a column that is empty throughout is left out."""
    kept = [column for column in zip(*rows, strict=True) if any(column)]
    widths = [max(map(len, column)) for column in kept]
    lines = zip(*kept, strict=True)
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
