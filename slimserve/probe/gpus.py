"""The GPUs that a program started here would see: ask in a child process, check the answers, apply the filter."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimserve.machine import Gpu, GpuProblem
from slimserve.probe import pci
from slimserve.probe.child import COMMAND, DEADLINE_SECONDS, ask_driver
from slimserve.probe.problems import HALF_DO, HALF_WHY, LOOK, Problem, combine, group_failures, init_remedy
from slimserve.probe.text import printable, read_text
from slimserve.probe.visible import Candidate, Selection, select
from slimserve.records import dataclass
from slimserve.shapes import ShapeError, build

_NVIDIA, _DISPLAY = "0x10de", "0x03"
_PACE = (
    *("pcie_generation_now", "pcie_generation_card", "pcie_width_max"),
    *("persistence", "clock_mhz", "clock_max_mhz", "throttled_by"),
)


@dataclass(frozen=True)
class GpuReading:
    """What is known about the GPUs; the fields of `Machine` of the same names."""

    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    hidden_gpus: int = 0
    gpu_problem: GpuProblem | None = None


def read_gpus(
    root: Path,
    environ: Mapping[str, str],
    command: Sequence[str] = COMMAND,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> GpuReading:
    """Read the GPUs.

    Args:
        root: folder that holds `proc`, `sys` and `dev`.
        environ: where CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are looked up.
        command: what asks the driver; by default `slimserve.probe.nvml` in this Python.
        deadline_seconds: after this long the driver counts as hung.

    Returns:
        The reading. It never raises: what went wrong is its `gpu_problem`.
    """
    if not driver_present(root):
        count = cards_on_bus(root)
        if not count:
            return GpuReading()
        problem = Problem(
            f"{count} NVIDIA GPU{'s' * (count > 1)} on the PCI bus, and no driver is loaded",
            "without the driver nothing can be known about a GPU, nor run on it",
            "install the NVIDIA driver, or load it (modprobe nvidia); in a container, start it with GPU access",
        )
        return GpuReading(gpu_problem=combine([problem]))
    answer, problem_or_none = ask_driver(command, deadline_seconds)
    if problem_or_none is not None:
        return GpuReading(gpu_problem=combine([problem_or_none]))
    return reading(answer, environ, root)


def driver_present(root: Path) -> bool:
    """Whether an NVIDIA driver shows itself: its /proc folder, a device file, or its library for WSL."""
    if (root / "proc/driver/nvidia").exists() or (root / "usr/lib/wsl/lib/libnvidia-ml.so.1").exists():
        return True
    try:
        return any(re.fullmatch(r"nvidia[0-9]+", name) for name in os.listdir(root / "dev"))
    except OSError:
        return False


def cards_on_bus(root: Path) -> int:
    """NVIDIA display and 3D controllers on the PCI bus."""
    devices = root / "sys/bus/pci/devices"
    try:
        names = os.listdir(devices)
    except OSError:
        return 0
    return sum(
        (read_text(devices / name / "vendor") or "").strip() == _NVIDIA
        and (read_text(devices / name / "class") or "").startswith(_DISPLAY)
        for name in names
    )


def reading(answer: dict[str, Any], environ: Mapping[str, str], root: Path) -> GpuReading:
    """The reading that the driver's answer (see `slimserve.probe.nvml`) makes under `environ`."""
    if answer["missing"]:
        problem = Problem(
            "GPUs cannot be read: the Python package nvidia-ml-py is not installed",
            "an NVIDIA driver is there, and only this package asks it",
            "install slimserve with its cuda extra, or nvidia-ml-py alone",
        )
        return GpuReading(gpu_problem=combine([problem]))
    failures, cards = answer["failures"], answer["cards"]
    general = next(
        (failure for failure in failures if failure["gpu"] is None and failure["call"] != "nvmlSystemGetDriverVersion"),
        None,
    )
    if general:
        problem = Problem(
            f"GPUs cannot be read: {general['call']} failed: {general['error']}",
            "the driver library is the only source for what the GPUs are",
            init_remedy(general["code"]),
        )
        return GpuReading(driver=answer["driver"], gpu_problem=combine([problem]))
    problems = [Problem(text, HALF_WHY, HALF_DO) for text in group_failures(failures)]
    if not cards:
        problems.append(
            Problem(
                "the driver answers and lists no GPU",
                "its device files are there, so a GPU was expected",
                f"check that the GPU has not fallen off the bus: {LOOK}; in a container, give it the device files",
            )
        )
    things = [*cards, *({**i, "parent": c} for c in cards for i in c.get("instances", ()))]
    selection = select(
        environ.get("CUDA_VISIBLE_DEVICES"),
        [
            Candidate(t.get("uuid") or "", (t.get("parent") or {}).get("uuid") or "", _pair(t.get("instance")))
            for t in things
        ],
    )
    problems += _of_the_variables(selection, environ, cards)
    chosen = [(position, things[position]) for position in selection.positions]
    shown = {(thing.get("parent") or thing)["index"] for _, thing in chosen}
    gpus: list[Gpu] = []
    for position, thing in chosen:
        gpu = _gpu(position, thing, root)
        if isinstance(gpu, Problem):
            problems.append(gpu)
        elif any(gpu.uuid == other.uuid for other in gpus):
            problems.append(
                Problem(
                    f"GPU {gpu.index} is left out: its UUID is that of another",
                    "two GPUs cannot be told apart",
                    HALF_DO,
                )
            )
        else:
            gpus.append(gpu)
    known = {gpu.index for gpu in gpus}
    return GpuReading(
        driver=printable(answer["driver"]) if answer["driver"] else None,
        gpus=tuple(replace(gpu, peers={i: link for i, link in gpu.peers.items() if i in known}) for gpu in gpus),
        hidden_gpus=len(cards) - len(shown),
        gpu_problem=combine(problems),
    )


def _gpu(index: int, thing: dict[str, Any], root: Path) -> Gpu | Problem:
    """One GPU, or why there is none. `index` is its place among all cards and then all instances."""
    card = thing.get("parent") or thing
    slice_ = "parent" in thing
    lacking = [
        name
        for name, owner in (("name", thing), ("uuid", thing), ("memory_bytes", thing), ("capability", card))
        if not owner.get(name)
    ]
    why = "without its name, UUID, memory and capability nothing can be planned on it"
    if lacking:
        return Problem(
            f"GPU {card['index']} is left out: the driver does not give its {', '.join(lacking)}", why, HALF_DO
        )
    try:
        return build(
            Gpu,
            {
                "index": index,
                "name": printable(thing["name"]),
                "uuid": printable(thing["uuid"]),
                "capability": card["capability"],
                "memory_bytes": thing["memory_bytes"],
                "free_bytes": thing["free_bytes"],
                "mig": "instance" if slice_ else card["mig"],
                "bar1_bytes": card["bar1_bytes"],
                "pcie_generation": card["pcie_generation"],
                "pcie_width": card["pcie_width"],
                **{name: card[name] for name in _PACE},
                **pci.place(root, card["bus_id"]),
                # What runs on the card as a whole is not known to run on this slice of it.
                "processes": [] if slice_ else [_process(process) for process in card["processes"]],
                "peers": {} if slice_ else card["peers"],
            },
        )
    except ShapeError as error:
        what = f"GPU {card['index']} is left out: the driver's answer contradicts itself: {error}"
        return Problem(what, why, HALF_DO)


def _process(process: dict[str, Any]) -> dict[str, Any]:
    name = process["name"]
    return {"pid": process["pid"], "name": printable(name) if name else None, "used_bytes": process["used_bytes"]}


def _of_the_variables(selection: Selection, environ: Mapping[str, str], cards: list[dict[str, Any]]) -> list[Problem]:
    value = printable(environ.get("CUDA_VISIBLE_DEVICES", ""))[:200]
    problems = [
        Problem(
            f"CUDA_VISIBLE_DEVICES={value}: {text}",
            "a CUDA program then sees other GPUs than were meant",
            "mend the list, or unset it",
        )
        for text in selection.problems
    ]
    mixed = len({card.get("name") for card in cards}) > 1
    if selection.by_number and mixed and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        order = printable(environ.get("CUDA_DEVICE_ORDER", "")) or "not set"
        problems.append(
            Problem(
                f"CUDA_VISIBLE_DEVICES chooses by number among unlike GPUs, and CUDA_DEVICE_ORDER is {order}",
                "CUDA then numbers the fastest first, while the numbers here follow the PCI bus",
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or choose by UUID",
            )
        )
    return problems


def _pair(numbers: Any) -> tuple[int, int] | None:
    return (numbers[0], numbers[1]) if numbers else None
