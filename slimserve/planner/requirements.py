"""What a platform asks of a machine beside its cards."""

from __future__ import annotations

from collections.abc import Iterator

from slimserve.errors import Finding
from slimserve.machine import GIB, Machine, counted, gib
from slimserve.subject import Subject


def unmet(subject: Subject, machine: Machine, listing: str) -> Iterator[Finding]:
    """What `machine` lacks that the platform of `subject` needs; `listing` is the command that lists what it runs."""
    platform, needs, memory = subject.platform, subject.platform.needs, machine.memory
    if machine.system != "Linux":
        yield Finding(f"the system is {machine.system}", "the engine runs on Linux", "use a Linux machine")
    if machine.cpu.architecture != platform.architecture:
        yield Finding(
            f"the processor is {machine.cpu.architecture}",
            f"{subject.profile.id} was made for {platform.architecture}",
            f"use a profile for this machine: {listing}",
        )
    if memory.usable_bytes < needs.memory_bytes.value:
        limit = " (the control group's limit)" if memory.usable_bytes < memory.available_bytes else ""
        yield Finding(
            f"{gib(memory.usable_bytes)} of host memory can be used{limit}, {gib(needs.memory_bytes.value)} are needed",
            needs.memory_bytes.why,
            "end other programs, raise the limit, or use a machine with more memory",
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
            f"{counted(machine.cpu.cores, 'core')} can be used, {needs.cores.value} are needed",
            needs.cores.why,
            "allow this program more cores",
        )
    if needs.cpu_flags and machine.cpu.flags is not None:
        missing = [flag for flag in needs.cpu_flags.value if flag not in machine.cpu.flags]
        if missing:
            yield Finding(f"the processor lacks {', '.join(missing)}", needs.cpu_flags.why, "use a newer processor")
