"""The verdict: profile x model x machine gives a plan, or every reason why not. Pure: nothing here looks or acts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimserve.errors import Finding, Refused, raise_if_any
from slimserve.machine import GIB, Cpu, Disk, Gpu, Machine, Memory, gib
from slimserve.platform import Accelerators, Platform
from slimserve.policies import Subject
from slimserve.profile import Profile

_RANK = {"unknown": 0, "none": 0, "p2p": 1, "nvlink": 2}


@dataclass(frozen=True, slots=True)
class WeightsOnDisk:
    """What the cache holds of a checkpoint.

    Args:
        folder: where the engine will find it.
        ready: all of it is there.
        needed_bytes: disk space that fetching and converting the rest takes at its peak, in bytes.
    """

    folder: Path
    ready: bool
    needed_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Exactly one launch: what to run, on which devices, from which weights."""

    subject: Subject
    machine: Machine
    gpus: tuple[Gpu, ...]
    weights: WeightsOnDisk
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A profile with what the machine says to it: no refusals means that it runs."""

    profile: Profile
    refusals: tuple[Finding, ...]
    weights_ready: bool

    def to_json(self) -> dict[str, Any]:
        """The verdict as a JSON object."""
        return {
            "id": self.profile.id,
            "title": self.profile.title,
            "aliases": list(self.profile.aliases),
            "model": self.profile.model,
            "quant": self.profile.quant,
            "platform": self.profile.platform,
            "status": self.profile.status,
            "default": self.profile.default,
            "runs": not self.refusals,
            "weights_ready": self.weights_ready,
            "refusals": [finding.to_json() for finding in self.refusals],
        }


def make_plan(subject: Subject, machine: Machine, weights: WeightsOnDisk) -> Plan:
    """Judge whether `subject` runs on `machine`.

    Args:
        subject: the profile with its model and platform.
        machine: the machine, real or described.
        weights: what is on its disk.

    Returns:
        The plan.

    Raises:
        Refused: with every reason that can be known before anything is downloaded or started.
    """
    refusals: list[Finding] = []
    gpus: tuple[Gpu, ...] = ()
    if subject.platform.gpus is not None:  # first, since it is what a reader asks first
        try:
            gpus = _choose(subject, subject.platform.gpus, machine)
        except Refused as refused:
            refusals += refused.findings
    refusals += _host(subject, machine)
    refusals += disk(machine, weights)
    raise_if_any(Refused, refusals)
    return Plan(subject, machine, gpus, weights, tuple(_notes(subject, gpus)))


def matches(platform: Platform, machine: Machine) -> bool:
    """Whether `machine` is of the kind that `platform` describes, whatever else may be missing or busy."""
    if machine.cpu.architecture != platform.architecture:
        return False
    if platform.gpus is None:
        return True
    wanted = platform.gpus
    return sum(_mismatch(wanted, gpu) is None for gpu in machine.gpus) >= wanted.count


def describe(platform: Platform, needed_disk_bytes: int) -> Machine:
    """The machine that `platform` describes: just what it states, idle, with room on its disk.

    Args:
        platform: the platform.
        needed_disk_bytes: disk is no part of a platform; the described machine has this much.
    """
    needs = platform.needs
    memory = needs.memory_bytes.value
    shm = needs.shm_bytes.value if needs.shm_bytes else 0
    count = platform.gpus.count if platform.gpus else 0
    return Machine(
        source=f"platform {platform.id}",
        system="Linux",
        cpu=Cpu(
            architecture=platform.architecture,
            cores=needs.cores.value if needs.cores else 1,
            flags=needs.cpu_flags.value if needs.cpu_flags else (),
        ),
        memory=Memory(
            total_bytes=memory,
            available_bytes=memory,
            cgroup_limit_bytes=None,
            cgroup_used_bytes=None,
            memlock_bytes=None,
            shm_total_bytes=shm,
            shm_free_bytes=shm,
        ),
        disk=Disk(path="/", free_bytes=needed_disk_bytes, total_bytes=needed_disk_bytes, writable=True),
        driver=needs.driver.value if needs.driver else None,
        gpus=tuple(_described_gpu(platform.gpus, index) for index in range(count)) if platform.gpus else (),
    )


def _described_gpu(gpus: Accelerators, index: int) -> Gpu:
    return Gpu(
        index=index,
        name=gpus.name,
        uuid=f"GPU-{index:08d}",
        capability=gpus.capability,
        memory_bytes=gpus.memory_bytes,
        free_bytes=gpus.memory_bytes,
        mig="off",
        peers={other: gpus.peers for other in range(gpus.count) if other != index},
    )


def _host(subject: Subject, machine: Machine) -> Iterator[Finding]:
    platform, needs, memory = subject.platform, subject.platform.needs, machine.memory
    if machine.system != "Linux":
        yield Finding(f"the system is {machine.system}", "the engine runs on Linux", "use a Linux machine")
    if machine.cpu.architecture != platform.architecture:
        yield Finding(
            f"the processor is {machine.cpu.architecture}",
            f"{subject.profile.id} was made for {platform.architecture}",
            "use a profile for this machine: slimserve --list",
        )
    if memory.usable_bytes < needs.memory_bytes.value:
        limit = " (the control group's limit)" if memory.usable_bytes < memory.available_bytes else ""
        yield Finding(
            f"{gib(memory.usable_bytes)} of host memory can be used{limit}, {gib(needs.memory_bytes.value)} are needed",
            needs.memory_bytes.why,
            "end other programs, raise the limit, or use a machine with more memory",
        )
    kv_cache = subject.profile.engine.kv_cache_memory_bytes
    if platform.kind == "cpu" and kv_cache is not None:
        together = kv_cache.value + subject.model.checkpoints[subject.profile.quant].bytes
        if together > memory.usable_bytes:
            yield Finding(
                f"weights and KV cache take {gib(together)}, {gib(memory.usable_bytes)} of host memory can be used",
                "on a CPU both lie in host memory",
                "use a smaller kv_cache_memory_bytes, or a machine with more memory",
            )
    if needs.shm_bytes and memory.shm_free_bytes < needs.shm_bytes.value:
        yield Finding(
            f"/dev/shm has {gib(memory.shm_free_bytes)} free, {gib(needs.shm_bytes.value)} are needed",
            needs.shm_bytes.why,
            f"mount -o remount,size={-(-needs.shm_bytes.value // GIB)}G /dev/shm (in a container: --shm-size)",
        )
    if needs.memlock_bytes and memory.memlock_bytes is not None and memory.memlock_bytes < needs.memlock_bytes.value:
        yield Finding(
            f"{gib(memory.memlock_bytes)} may be locked, {gib(needs.memlock_bytes.value)} are needed",
            needs.memlock_bytes.why,
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit",
        )
    if needs.cores and machine.cpu.cores < needs.cores.value:
        yield Finding(
            f"{machine.cpu.cores} cores can be used, {needs.cores.value} are needed",
            needs.cores.why,
            "allow this program more cores",
        )
    missing = [flag for flag in (needs.cpu_flags.value if needs.cpu_flags else ()) if flag not in machine.cpu.flags]
    if missing and needs.cpu_flags:
        yield Finding(f"the processor lacks {', '.join(missing)}", needs.cpu_flags.why, "use a newer processor")


def disk(machine: Machine, weights: WeightsOnDisk) -> Iterator[Finding]:
    """What keeps the weights from being fetched: all that `--fetch` asks of a machine."""
    if not machine.disk.writable:
        yield Finding(
            f"{machine.disk.path} cannot be written",
            "weights, kernels and logs are kept there",
            "give SLIMSERVE_CACHE a folder that can be written",
        )
    if not weights.ready and machine.disk.free_bytes < weights.needed_bytes:
        yield Finding(
            f"{gib(machine.disk.free_bytes)} are free at {machine.disk.path}, {gib(weights.needed_bytes)} are needed",
            "the weights are not there yet; this is the peak of download and conversion",
            "free space, or give SLIMSERVE_CACHE a folder on a larger disk",
        )


def _choose(subject: Subject, wanted: Accelerators, machine: Machine) -> tuple[Gpu, ...]:
    """The first GPUs that qualify and are idle.

    Raises:
        Refused: with the reasons why there are not enough.
    """
    refusals: list[Finding] = []
    needed = f"{wanted.count} x {wanted.name} ({gib(wanted.memory_bytes)}, capability {wanted.capability})"
    fitting = [gpu for gpu in machine.gpus if _mismatch(wanted, gpu) is None]
    if not machine.gpus and machine.gpu_problem is not None:
        problem = machine.gpu_problem
        raise Refused(Finding(f"{needed} needed; GPUs could not be read: {problem.what}", problem.why, problem.do))
    if len(fitting) < wanted.count:
        found = Counter(gpu.name for gpu in machine.gpus)
        shown = ", ".join(f"{count} x {name}" for name, count in found.items()) or "none"
        hidden = f" ({machine.hidden_gpus} more hidden by CUDA_VISIBLE_DEVICES)" if machine.hidden_gpus else ""
        legal = ", ".join(map(str, subject.model.geometry.legal_tensor_parallel()))
        why = [f"the profile runs on exactly {wanted.count}; {subject.model.title} can be split over {legal}"]
        why += [
            f"GPU {gpu.index} does not count: {reason}" for gpu in machine.gpus if (reason := _mismatch(wanted, gpu))
        ]
        if machine.gpu_problem is not None:
            why.append(machine.gpu_problem.what)
        refusals.append(
            Finding(
                f"GPUs found: {shown}{hidden}; needed: {needed}",
                "; ".join(why),
                "use a profile for this machine: slimserve --list",
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
        refusals += _capacity(subject, chosen, share)
    raise_if_any(Refused, refusals)
    return chosen


def _mismatch(wanted: Accelerators, gpu: Gpu) -> str | None:
    """Why `gpu` is not one of `wanted`, or None."""
    if gpu.name != wanted.name:
        return f"it is a {gpu.name}"
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


def _worse_links(platform: Platform, gpus: tuple[Gpu, ...]) -> list[str]:
    """Pairs that reach each other less well than the platform's cards do, each with how."""
    if platform.gpus is None:
        return []
    wanted = _RANK[platform.gpus.peers]
    pairs = [(one, other) for place, one in enumerate(gpus) for other in gpus[place + 1 :]]
    links = [(one, other, min(one.link(other), other.link(one), key=_RANK.__getitem__)) for one, other in pairs]
    return [f"{one.index}-{other.index} ({link})" for one, other, link in links if _RANK[link] < wanted]


def _links(platform: Platform, gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    need, worse = platform.needs.peer_access, _worse_links(platform, gpus)
    if need is not None and need.value == "required" and worse and platform.gpus is not None:
        yield Finding(
            f"GPUs are not linked by {platform.gpus.peers}: {', '.join(worse)}",
            need.why,
            "check nvidia-smi topo -m and topo -p2p r, IOMMU and ACS settings",
        )


def _capacity(subject: Subject, gpus: tuple[Gpu, ...], share: float) -> Iterator[Finding]:
    checkpoint = subject.model.checkpoints[subject.profile.quant]
    engram = subject.profile.engine.engram_config
    on_host = checkpoint.host_bytes if engram is not None and engram.value.cpu_offload else 0
    each = (checkpoint.bytes - on_host) // len(gpus)
    for gpu in gpus:
        given = int(share * gpu.memory_bytes)
        if each > given:
            yield Finding(
                f"the weights take {gib(each)} on each of {len(gpus)} GPUs, GPU {gpu.index} gives {gib(given)}",
                "there would be no room for the KV cache, or for the weights themselves",
                "use a profile with more GPUs or a smaller checkpoint",
            )
            return


def _notes(subject: Subject, gpus: tuple[Gpu, ...]) -> Iterator[str]:
    """What a plan says once, without refusing."""
    profile = subject.profile
    if profile.status == "published":
        yield f"{profile.id} rests on published numbers; no receipt of ours covers it"
    elif profile.status == "unmeasured":
        yield f"{profile.id} is unmeasured: no receipt covers it yet"
    need = subject.platform.needs.peer_access
    worse = _worse_links(subject.platform, gpus)
    if need is not None and need.value == "recommended" and worse:
        yield f"GPUs do not reach each other's memory as well as they could: {', '.join(worse)}; {need.why}"
