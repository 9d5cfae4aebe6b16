"""Which GPUs of a machine a profile runs on, or every reason why there are not enough."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from slimserve.errors import Finding, Refused, raise_if_any
from slimserve.machine import Gpu, Machine, gib
from slimserve.platform import Accelerators, Platform
from slimserve.subject import Subject

_RANK = {"unknown": 0, "none": 0, "p2p": 1, "nvlink": 2}


def choose(subject: Subject, wanted: Accelerators, machine: Machine, listing: str) -> tuple[Gpu, ...]:
    """The first GPUs that qualify and are idle.

    Args:
        listing: the command that lists what runs on `machine`.

    Raises:
        Refused: with the reasons why there are not enough.
    """
    refusals: list[Finding] = []
    needed = f"{wanted.count} x {wanted.name} ({gib(wanted.memory_bytes)}, capability {wanted.capability})"
    fitting = [gpu for gpu in machine.gpus if mismatch(wanted, gpu) is None]
    if not machine.gpus and machine.gpu_problem is not None:
        problem = machine.gpu_problem
        raise Refused(Finding(f"{needed} needed; GPUs could not be read: {problem.what}", problem.why, problem.do))
    if len(fitting) < wanted.count:
        found = Counter(gpu.name for gpu in machine.gpus)
        shown = ", ".join(f"{count} x {name}" for name, count in found.items()) or "none"
        hidden = f" ({machine.hidden_gpus} more hidden by CUDA_VISIBLE_DEVICES)" if machine.hidden_gpus else ""
        legal = ", ".join(map(str, subject.model.geometry.legal_tensor_parallel()))
        why = [f"the profile runs on exactly {wanted.count}; {subject.model.title} can be split over {legal}"]
        why += _not_counted(wanted, machine.gpus)
        if machine.gpu_problem is not None:
            why.append(machine.gpu_problem.what)
        refusals.append(
            Finding(
                f"GPUs found: {shown}{hidden}; needed: {needed}",
                "; ".join(why),
                f"use a profile for this machine: {listing}",
            )
        )
    engine = subject.profile.engine
    share = engine.gpu_memory_utilization.value if engine.gpu_memory_utilization else 0.0
    idle = [gpu for gpu in fitting if gpu.free_bytes >= share * gpu.memory_bytes]
    if len(fitting) >= wanted.count > len(idle):
        busy = [gpu for gpu in fitting if gpu not in idle]
        refusals.append(
            Finding(
                f"{len(idle)} of {len(fitting)} GPUs are free enough, {wanted.count} are needed: "
                + "; ".join(map(_load, busy)),
                f"the profile takes {share:.0%} of each card's memory",
                "end the programs that hold them, or pick other cards with CUDA_VISIBLE_DEVICES",
            )
        )
    chosen = tuple(idle[: wanted.count])
    refusals += _driver(subject.platform, machine) if machine.gpus else ()
    if len(chosen) == wanted.count:
        refusals += _links(subject.platform, chosen)
    raise_if_any(Refused, refusals)
    return chosen


def _not_counted(wanted: Accelerators, gpus: tuple[Gpu, ...]) -> Iterator[str]:
    """Each reason once, with the cards that it holds for."""
    reasons: dict[str, list[int]] = {}
    for gpu in gpus:
        if reason := mismatch(wanted, gpu):
            reasons.setdefault(reason, []).append(gpu.index)
    for reason, (first, *others) in reasons.items():
        if others:
            yield f"{1 + len(others)} GPUs do not count, each because {reason}"
        else:
            yield f"GPU {first} does not count: {reason}"


def mismatch(wanted: Accelerators, gpu: Gpu) -> str | None:
    """Why `gpu` is not one of `wanted`, or None."""
    if gpu.name != wanted.name:
        return f"it is {'an' if gpu.name.startswith(('NVIDIA', 'AMD')) else 'a'} {gpu.name}"
    if gpu.capability != wanted.capability:
        return f"its capability is {gpu.capability}"
    if gpu.mig == "instance":
        return "it is a MIG slice"
    if gpu.mig != "off":
        return "MIG is on" if gpu.mig == "on" else "whether MIG is on could not be read"
    if not wanted.least_bytes <= gpu.memory_bytes <= wanted.most_bytes:
        return f"it has {gib(gpu.memory_bytes)} of memory, {gib(wanted.memory_bytes)} belong to this card"
    return None


def _load(gpu: Gpu) -> str:
    holders = (
        ", ".join(f"{process.name or 'a process'} (pid {process.pid})" for process in gpu.processes)
        or "nobody that the driver names"
    )
    return f"GPU {gpu.index} has {gib(gpu.free_bytes)} of {gib(gpu.memory_bytes)} free, held by {holders}"


def _driver(platform: Platform, machine: Machine) -> Iterator[Finding]:
    needed = platform.needs.driver
    if needed is None:
        return
    if machine.driver is None:
        yield Finding("the driver's version could not be read", needed.why, "check that nvidia-smi works")
    elif _version(machine.driver) < _version(needed.value):
        yield Finding(
            f"the driver is {machine.driver}, {needed.value} or newer is needed", needed.why, "update the driver"
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if re.fullmatch("[0-9]{1,9}", part))


def worse_links(platform: Platform, gpus: tuple[Gpu, ...]) -> list[str]:
    """Pairs that reach each other less well than the platform's cards do, each with how."""
    if platform.gpus is None:
        return []
    wanted = _RANK[platform.gpus.peers]
    pairs = [(one, other) for place, one in enumerate(gpus) for other in gpus[place + 1 :]]
    links = [(one, other, min(one.link(other), other.link(one), key=_RANK.__getitem__)) for one, other in pairs]
    return [f"{one.index}-{other.index} ({link})" for one, other, link in links if _RANK[link] < wanted]


def _links(platform: Platform, gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    need, worse = platform.needs.peer_access, worse_links(platform, gpus)
    if need is not None and need.value == "required" and worse and platform.gpus is not None:
        yield Finding(
            f"GPUs are not linked by {platform.gpus.peers}: {', '.join(worse)}",
            need.why,
            "check nvidia-smi topo -m and topo -p2p r, IOMMU and ACS settings",
        )
