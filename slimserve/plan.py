"""The verdict: profile x model x machine gives a plan, or every reason why not. Pure: nothing here looks or acts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slimserve import preflight
from slimserve.errors import Finding, Refused, SlimserveError
from slimserve.machine import Cpu, Disk, Gpu, Machine, Memory, gib
from slimserve.planner import cards, fitting, host, requirements
from slimserve.planner.budget import Budget
from slimserve.planner.capacity import Capacity, capacity
from slimserve.planner.rank import Rank, rank_of
from slimserve.platform import Accelerators, Platform
from slimserve.profile import Profile
from slimserve.records import dataclass
from slimserve.shapes import Loc
from slimserve.subject import Subject


@dataclass(frozen=True)
class WeightsOnDisk:
    """What the cache holds of a checkpoint.

    Args:
        folder: where the engine will find it.
        ready: all of it is there.
        needed_bytes: disk space that fetching and converting the rest takes at its peak, in bytes.
        here: whether that is the disk of the machine that is judged; nothing is known of another's.
    """

    folder: Path
    ready: bool
    needed_bytes: int
    here: bool = True


@dataclass(frozen=True)
class Room:
    """How a profile fills its machine.

    Args:
        rank: one of its ranks; every other is like it.
        memory: the budgets, each of which adds up: of a rank's card where there is one, and of the host.
        capacity: what the cache holds.
    """

    rank: Rank
    memory: tuple[Budget, ...]
    capacity: Capacity

    @functools.cached_property
    def largest(self) -> dict[str, float]:
        """The largest legal value of each setting that memory limits, by its key, the others being as they are."""
        return fitting.largest(self.rank)


@dataclass(frozen=True)
class Plan:
    """Exactly one launch: what to run, on which devices, from which weights."""

    subject: Subject
    machine: Machine
    gpus: tuple[Gpu, ...]
    weights: WeightsOnDisk
    room: Room
    notes: tuple[str, ...]


class NoRoom(Refused):
    """A profile that does not fit, and how it fills its machine all the same."""

    def __init__(self, room: Room, *findings: Finding) -> None:
        super().__init__(*findings)
        self.room = room


@dataclass(frozen=True)
class Advice:
    """What only the registry knows, for refusals.

    Args:
        where: `file:line` of a key of the profile.
        others: profiles of the same model that would fit elsewhere, each with its platform.
        listing: the command that lists what runs on the machine that is judged.
    """

    where: Callable[[Loc], str]
    others: Callable[[], tuple[str, ...]]
    listing: str = "slimserve --list"


NO_ADVICE = Advice(lambda loc: "", lambda: ())


@dataclass(frozen=True)
class Verdict:
    """A profile with what the machine says to it: no refusals means that it runs.

    Args:
        fetchable: whether its weights can be fetched from somewhere.
        bundled: whether they come with slimserve.
    """

    profile: Profile
    refusals: tuple[Finding, ...]
    weights_ready: bool
    fetchable: bool = True
    bundled: bool = False

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
            "fetchable": self.fetchable,
            "bundled": self.bundled,
            "refusals": [finding.to_json() for finding in self.refusals],
        }


def make_plan(subject: Subject, machine: Machine, weights: WeightsOnDisk, advice: Advice = NO_ADVICE) -> Plan:
    """Judge whether `subject` runs on `machine`.

    Args:
        subject: the profile with its model and platform.
        machine: the machine, real or described.
        weights: what is on its disk.
        advice: for the words of a refusal.

    Returns:
        The plan.

    Raises:
        Refused: with every reason that can be known before anything is downloaded or started; `NoRoom`, where that
            could be reckoned.
    """
    refusals: list[Finding] = []
    gpus: tuple[Gpu, ...] | None = ()
    if subject.platform.gpus is not None:  # first, since it is what a reader asks first
        try:
            gpus = cards.choose(subject, subject.platform.gpus, machine, advice.listing)
        except Refused as refused:
            refusals += refused.findings
            gpus = None
    refusals += requirements.unmet(subject, machine, advice.listing)
    refusals += disk(machine, weights)
    refusals += preflight.blocking(machine, subject.platform)
    rank: Rank | None = None
    try:
        rank = rank_of(subject, gpus or ())
        refusals += _memory(rank, machine, gpus, advice)
    except SlimserveError as error:  # a geometry that contradicts itself speaks against this profile alone
        refusals += error.findings
    if rank is None or gpus is None or not fitting.has_room(rank, rank.sizes):
        raise Refused(*refusals)
    budget, host_budget = rank.budget(rank.sizes), host.host_budget(rank, machine)
    memory = (budget, host_budget) if budget else (host_budget,)
    room = Room(rank, memory, capacity(rank, rank.sizes))
    if refusals:
        raise NoRoom(room, *refusals)
    slow = [f"{concern.what}; {concern.why}" for concern in preflight.warnings(machine, gpus)]
    notes = (*_notes(subject, gpus), *host.notes(rank, machine, host_budget), *slow)
    return Plan(subject, machine, gpus, weights, room, notes)


def _memory(rank: Rank, machine: Machine, gpus: tuple[Gpu, ...] | None, advice: Advice) -> Iterator[Finding]:
    """Every way in which a rank does not fit its card, or all of them the host; nothing where the cards are wanting."""
    if gpus is None:
        return
    problems = list(fitting.problems(rank))
    others = advice.others() if problems else ()
    for problem in problems:
        do = f"{problem.do}; or {' or '.join(others)}" if others else problem.do
        yield Finding(problem.what, problem.why, do, advice.where(problem.loc))
    # Below what the platform needs for any profile there is one refusal already.
    if machine.memory.usable_bytes >= rank.subject.platform.needs.memory_bytes.value:
        yield from host.problems(rank, machine, host.host_budget(rank, machine))


def matches(platform: Platform, machine: Machine) -> bool:
    """Whether `machine` is of the kind that `platform` describes, whatever else may be missing or busy."""
    if machine.cpu.architecture != platform.architecture:
        return False
    if platform.gpus is None:
        return True
    wanted = platform.gpus
    return sum(cards.mismatch(wanted, gpu) is None for gpu in machine.gpus) >= wanted.count


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
            flags=needs.cpu_flags.value if needs.cpu_flags else None,
            numa_nodes=platform.numa_nodes,
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


def disk(machine: Machine, weights: WeightsOnDisk) -> Iterator[Finding]:
    """What keeps the weights from being fetched: all that `--fetch` asks of a machine."""
    yield from preflight.host.writable(machine)
    if not weights.ready and machine.disk.free_bytes < weights.needed_bytes:
        yield Finding(
            f"{gib(machine.disk.free_bytes)} are free at {machine.disk.path}, {gib(weights.needed_bytes)} are needed",
            "the weights are not there yet; this is the peak of download and conversion",
            "free space, or give SLIMSERVE_CACHE a folder on a larger disk",
        )


def _notes(subject: Subject, gpus: tuple[Gpu, ...]) -> Iterator[str]:
    """What a plan says once, without refusing."""
    profile = subject.profile
    if profile.status == "published":
        yield f"{profile.id} rests on published numbers; no receipt of ours covers it"
    elif profile.status == "unmeasured":
        yield f"{profile.id} is unmeasured: no receipt covers it yet"
    need = subject.platform.needs.peer_access
    worse = cards.worse_links(subject.platform, gpus)
    if need is not None and need.value == "recommended" and worse:
        yield f"GPUs do not reach each other's memory as well as they could: {', '.join(worse)}; {need.why}"
