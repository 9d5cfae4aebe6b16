"""A machine and what is wrong with it, in words and as JSON: what `slimserve --doctor` prints.

What is wrong is judged in `slimserve.preflight`, for everybody who asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slimserve.errors import Finding
from slimserve.machine import EXCHANGE_KEY, FINDINGS_KEY, Folder, Gpu, Machine, counted, gib
from slimserve.preflight import concerns
from slimserve.preflight.traffic import module_words
from slimserve.shapes import plain

if TYPE_CHECKING:
    from slimserve.preflight.exchange import Outcome


@dataclass(frozen=True, slots=True)
class Report:
    """What there is to say about a machine.

    Args:
        machine: the facts.
        findings: what is wrong with it.
        outcome: of the test on its GPUs; None: there was none.
    """

    machine: Machine
    findings: tuple[Finding, ...]
    outcome: Outcome | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, which `load_machine` takes as a file."""
        return to_json(self.machine, self.findings, self.outcome)

    def render(self) -> str:
        """The report as plain text."""
        return render(self.machine, self.findings, self.outcome)


def examine(machine: Machine, here: bool, environment: Mapping[str, str]) -> Report:
    """Judge a machine; and when it is the one in front of us, look for lost engines, and try its GPUs.

    Args:
        machine: the facts.
        here: whether this program runs on it.
        environment: the caller's variables.
    """
    if not here:
        return Report(machine, concerns(machine))
    from slimserve import paths
    from slimserve.preflight import exchange
    from slimserve.probe.engines import read_engines

    machine = replace(machine, engines=read_engines(paths.runs_folder(environment)))
    gpus = exchange.roomy(machine.gpus)
    if not gpus:
        return Report(machine, concerns(machine))
    outcome = exchange.run([exchange.name(gpu) for gpu in gpus], "cuda", exchange.environment(gpus, environment))
    return Report(machine, (*concerns(machine), *outcome.concerns()), outcome)


def to_json(machine: Machine, findings: Sequence[Finding], outcome: Outcome | None = None) -> dict[str, Any]:
    """The machine and what is wrong with it as plain data, which `load_machine` takes as a file."""
    tried = {} if outcome is None else {EXCHANGE_KEY: outcome.to_json()}
    return {**plain(machine), **tried, FINDINGS_KEY: [finding.to_json() for finding in findings]}


def render(machine: Machine, findings: Sequence[Finding], outcome: Outcome | None = None) -> str:
    """The machine and what is wrong with it, as plain text.

    Args:
        machine: the facts.
        findings: what is wrong with it.
        outcome: of the test on its GPUs.

    Returns:
        Lines without colour, each ended by a line break; sizes in GiB. What is unknown is said to be, or left out.
    """
    sections = [
        ("machine", _machine_lines(machine)),
        ("memory", _memory_lines(machine)),
        ("GPUs", _gpu_lines(machine)),
        *([] if outcome is None else [("values exchanged", [str(outcome)])]),
        ("findings", _finding_lines(findings)),
    ]
    return "\n".join(f"{title}\n" + "".join(f"  {line}".rstrip() + "\n" for line in lines) for title, lines in sections)


def _machine_lines(machine: Machine) -> list[str]:
    cpu, disk = machine.cpu, machine.disk
    rows = [
        ("source", machine.source),
        ("system", f"{machine.system} on {cpu.architecture}"),
        ("processor", f"{cpu.name or 'name unknown'}, {counted(cpu.cores, 'core')} to use"),
    ]
    if cpu.sockets and cpu.numa_nodes:
        rows.append(("layout", f"{counted(cpu.sockets, 'socket')}, {counted(cpu.numa_nodes, 'NUMA node')}"))
    rows.append(
        ("vector units", "unknown" if cpu.flags is None else " ".join(cpu.flags) or "none of those that matter")
    )
    if machine.kernel_parameters:
        rows.append(("booted with", machine.kernel_parameters))
    wrong = [word for word, bad in (("not writable", not disk.writable), ("noexec", disk.executable is False)) if bad]
    rows.append(("cache folder", f"{disk.path} ({', '.join(wrong)})" if wrong else disk.path))
    rows.append(("disk", f"{gib(disk.free_bytes)} free of {gib(disk.total_bytes)}"))
    rows += [(folder.variable, _folder(folder)) for folder in machine.folders]
    if machine.limits is not None:
        files, tasks = machine.limits.open_files, machine.limits.tasks
        rows.append(("limits", f"{_limit(files, 'open file')}, {_limit(tasks, 'task')}"))
    rows += [(setting.name, f"{setting.value} (in {setting.source})") for setting in machine.nccl]
    for engine in machine.engines:
        rows.append(("own engine", f"{engine.profile}, port {engine.port}{', lost' if engine.lost else ''}"))
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
    if (pages := memory.huge_pages) is not None:
        reserved = f"{gib(pages.free_bytes)} free of {gib(pages.reserved_bytes)} reserved"
        rows.append(("huge pages", f"{reserved}; transparent ones: {pages.transparent}"))
    return _aligned(rows)


def _gpu_lines(machine: Machine) -> list[str]:
    words = module_words(machine)
    lines = [words] if words else []
    if machine.hidden_gpus:
        lines.append(f"{machine.hidden_gpus} hidden by CUDA_VISIBLE_DEVICES")
    if not machine.gpus:
        lines.append("none could be read" if machine.gpu_problem else "none to use" if machine.hidden_gpus else "none")
    lines += _table([_gpu_row(gpu) for gpu in machine.gpus])
    if len(machine.gpus) > 1:
        lines += ["", "from \\ to", *_matrix(machine.gpus)]
    return lines


def _gpu_row(gpu: Gpu) -> list[str]:
    return [
        str(gpu.index),
        gpu.name,
        f"capability {gpu.capability}",
        f"{gib(gpu.free_bytes)} free of {gib(gpu.memory_bytes)}",
        {"off": "", "on": "MIG on", "instance": "MIG instance", "unknown": "MIG unknown"}[gpu.mig],
        _link(gpu),
        f"BAR1 {gib(gpu.bar1_bytes)}" if gpu.bar1_bytes is not None else "",
        f"NUMA {gpu.numa_node}" if gpu.numa_node is not None else "",
        f"IOMMU {gpu.iommu}" if gpu.iommu != "unknown" else "",
        f"ACS {gpu.acs}" if gpu.acs != "unknown" else "",
        _clock(gpu),
        {True: "persistent", False: "not persistent", None: ""}[gpu.persistence],
        gpu.uuid,
    ]


def _matrix(gpus: Sequence[Gpu]) -> list[str]:
    head = ["", *(str(gpu.index) for gpu in gpus)]
    return _table([head, *([str(a.index), *("-" if a is b else a.link(b) for b in gpus)] for a in gpus)])


def _finding_lines(findings: Sequence[Finding]) -> list[str]:
    return [line for finding in findings for line in str(finding).splitlines()] or ["nothing is wrong"]


def _link(gpu: Gpu) -> str:
    """The PCIe link: what is in use, and in parentheses what card and slot could."""
    if not gpu.pcie_generation and not gpu.pcie_width:
        return ""
    words = f"PCIe {gpu.pcie_generation or '?'} x{gpu.pcie_width or '?'}"
    most = [f"x{gpu.pcie_width_max}"] if gpu.pcie_width_max not in (None, gpu.pcie_width) else []
    most += [f"card {gpu.pcie_generation_card}"] if gpu.pcie_generation_card not in (None, gpu.pcie_generation) else []
    most += [f"now {gpu.pcie_generation_now}"] if gpu.pcie_generation_now not in (None, gpu.pcie_generation) else []
    return f"{words} ({', '.join(most)})" if most else words


def _clock(gpu: Gpu) -> str:
    if gpu.clock_mhz is None:
        return ""
    held = f", held by {', '.join(gpu.throttled_by)}" if gpu.throttled_by else ""
    return f"{gpu.clock_mhz} of {gpu.clock_max_mhz or '?'} MHz{held}"


def _folder(folder: Folder) -> str:
    return f"{folder.path}, {gib(folder.free_bytes)} free" if folder.writable else f"{folder.path} (not writable)"


def _limit(number: int | None, noun: str) -> str:
    return f"unlimited {noun}s" if number is None else f"{number:,} {noun}s"


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with their columns aligned; a column that is empty throughout is left out."""
    kept = [column for column in zip(*rows, strict=True) if any(column)]
    widths = [max(map(len, column)) for column in kept]
    lines = zip(*kept, strict=True)
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
