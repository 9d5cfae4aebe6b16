"""What is wrong with the cards, each by itself: unread, in use, unlike, slowed down, badly placed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from slimserve.machine import Gpu, Machine, gib
from slimserve.preflight.concern import Concern

# An idle card holds several hundred MiB for itself; what is beyond belongs to somebody.
UNSEEN_BYTES = 2 << 30
# What holds clocks down on a card that should be left alone. The power cap is not among it: busy cards live at it.
SLOWED = ("hardware slowdown", "heat", "heat, in hardware", "power brake")


def reading(machine: Machine) -> Iterator[Concern]:
    """GPUs that could not be read, or that nobody sees."""
    problem = machine.gpu_problem
    if problem:
        yield Concern(problem.what, problem.why, problem.do)
    if machine.hidden_gpus and not machine.gpus:
        yield Concern(
            f"all {machine.hidden_gpus} GPUs are hidden by CUDA_VISIBLE_DEVICES",
            "a program that is started here sees none of them",
            "unset CUDA_VISIBLE_DEVICES, or list the GPUs to use",
        )


def load(machine: Machine) -> Iterator[Concern]:
    """Cards that are cut, in use by others than engines of ours that serve, or not alike."""
    gpus = machine.gpus
    cut = [gpu for gpu in gpus if gpu.mig == "on"]
    if cut:
        yield Concern(
            f"MIG is on: GPU {numbers(cut)}",
            "a program sees a slice of such a card and never the whole of it",
            "switch it off (nvidia-smi -i N -mig 0, as root, nothing running), or choose one slice by its UUID "
            "in CUDA_VISIBLE_DEVICES",
        )
    serving = {pid for engine in machine.engines if not engine.lost for pid in engine.pids}
    for gpu in gpus:
        held = gpu.memory_bytes - gpu.free_bytes
        strangers = [process for process in gpu.processes if process.pid not in serving]
        if strangers:
            names = ", ".join(
                f"{process.name or 'a process'} ({process.pid}"
                + (f", {gib(process.used_bytes)})" if process.used_bytes is not None else ")")
                for process in strangers
            )
            yield Concern(
                f"GPU {gpu.index} is in use: {gib(held)} of {gib(gpu.memory_bytes)} are taken, by {names}",
                "a plan counts on what is free when the engine starts",
                "end these processes if they are not needed, or choose other GPUs by CUDA_VISIBLE_DEVICES",
            )
        elif held > UNSEEN_BYTES and not gpu.processes and gpu.mig != "instance":
            yield Concern(
                f"GPU {gpu.index} is in use: {gib(held)} of {gib(gpu.memory_bytes)} are taken, and no process is seen",
                "they belong to another container or user, or to a process that did not end cleanly",
                "run nvidia-smi as root outside any container; if it shows none either, reset the GPU "
                f"(nvidia-smi --gpu-reset -i {gpu.index})",
            )
    kinds = _kinds(gpus)
    if len(kinds) > 1:
        shown = "; ".join(f"GPU {numbers(group)}: {kind}" for kind, group in kinds.items())
        yield Concern(
            f"the GPUs are not all alike: {shown}",
            "work that is split over them runs at the pace and in the memory of the least",
            "choose GPUs of one kind by CUDA_VISIBLE_DEVICES, with CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def pace(machine: Machine) -> Iterator[Concern]:
    """Cards that are slower than they could be: clocks, persistence, PCIe link, place."""
    slow = "what is split over cards runs at the pace of the slowest of them"
    for gpus, words in _grouped(machine.gpus, _slowed):
        yield Concern(
            f"the clocks of GPU {numbers(gpus)} are held down: {words}",
            slow,
            "look at cooling, power cables and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
        )
    for gpus, words in _grouped(machine.gpus, _set):
        yield Concern(
            f"the clocks of GPU {numbers(gpus)} are set by somebody, and run at {words}",
            slow,
            "give them back to the card: nvidia-smi -rac and nvidia-smi -rgc, as root",
        )
    idle = [gpu for gpu in machine.gpus if gpu.persistence is False]
    if idle:
        yield Concern(
            f"persistence mode is off: GPU {numbers(idle)}",
            "the driver lets go of a card that nobody uses: it takes seconds to come back, and forgets its settings",
            "start nvidia-persistenced, or run nvidia-smi -pm 1 as root after each boot",
        )
    for gpus, words in _grouped(machine.gpus, _narrow):
        yield Concern(
            f"the PCIe link of GPU {numbers(gpus)} is less than it could be: {words}",
            "weights are loaded, and without NVLink results exchanged, over this link",
            "look at the seat of the card, its riser, and the slot's speed and bifurcation in the firmware",
        )
    yield from _places(machine)


def _places(machine: Machine) -> Iterator[Concern]:
    of_cores, of_memory = machine.cpu.own_nodes, machine.memory.own_nodes
    for own, what in ((of_cores, "has no core"), (of_memory, "may take no memory")):
        far = [gpu for gpu in machine.gpus if own and gpu.numa_node is not None and gpu.numa_node not in own]
        for node in sorted({gpu.numa_node for gpu in far if gpu.numa_node is not None}):
            gpus = [gpu for gpu in far if gpu.numa_node == node]
            yield Concern(
                f"GPU {numbers(gpus)} lies at NUMA node {node}, where this process {what}",
                "each copy between host and card then crosses from one processor to the other",
                "allow it that node (docker --cpuset-cpus and --cpuset-mems, systemd AllowedCPUs= and "
                "AllowedMemoryNodes=, numactl), or choose GPUs near it",
            )


def _slowed(gpu: Gpu) -> str:
    return ", ".join(reason for reason in gpu.throttled_by or () if reason in SLOWED)


def _set(gpu: Gpu) -> str:
    if "set clocks" not in (gpu.throttled_by or ()):
        return ""
    return f"{_known(gpu.clock_mhz)} of {_known(gpu.clock_max_mhz)} MHz"


def _narrow(gpu: Gpu) -> str:
    words = []
    if gpu.pcie_width is not None and gpu.pcie_width_max is not None and gpu.pcie_width < gpu.pcie_width_max:
        words.append(f"{gpu.pcie_width} of {gpu.pcie_width_max} lanes")
    best, agreed = gpu.pcie_generation_card, gpu.pcie_generation
    # The generation of the moment is not judged: it falls when the card idles.
    if best is not None and agreed is not None and agreed < best:
        words.append(f"generation {agreed}, and the card could {best}")
    return "; ".join(words)


def _grouped(gpus: Sequence[Gpu], words: Callable[[Gpu], str]) -> Iterator[tuple[list[Gpu], str]]:
    """The GPUs of which something is to be said, those of the same words together."""
    groups: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(words(gpu), []).append(gpu)
    return ((group, text) for text, group in groups.items() if text)


def _kinds(gpus: Sequence[Gpu]) -> dict[str, list[Gpu]]:
    kinds: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        kinds.setdefault(f"{gpu.name}, {gib(gpu.memory_bytes)}, capability {gpu.capability}", []).append(gpu)
    return kinds


def _known(number: int | None) -> str:
    return "unknown" if number is None else str(number)


def numbers(gpus: Sequence[Gpu]) -> str:
    """GPUs in a sentence."""
    return ", ".join(str(gpu.index) for gpu in gpus)
