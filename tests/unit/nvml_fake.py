"""A driver library that answers as it is told to: it shows the failures that the real one cannot be made to show."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20
MESSAGES = {
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    18: "Driver/library version mismatch",
    999: "Unknown Error",
}


class NVMLError(Exception):
    """As in the binding: the code is `value`, and the text comes from it."""

    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(value)

    def __str__(self) -> str:
        return MESSAGES[self.value]


@dataclass
class Card:
    """What one handle answers. `link` is the state of reading, writing and NVLink to every other card."""

    name: Any = "NVIDIA GeForce RTX 3090"
    uuid: str = "GPU-0"
    capability: tuple[int, int] = (8, 6)
    memory: int = 24576 * MIB
    free: int = 24210 * MIB
    bar1: int = 32768 * MIB
    bus: Any = "00000000:41:00.0"
    mig: int | None = None
    link: tuple[int, int, int] = (0, 0, 5)
    compute: list[tuple[int, int | None]] = field(default_factory=list)
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    slices: dict[int, tuple[Card, int, int]] = field(default_factory=dict)
    numbers: tuple[int, int] = (0, 0)
    reasons: int = 0x1
    persistence: int = 1


class FakeNvml:
    """The functions that are asked.

    Args:
        cards: one for each GPU.
        fail: error by call, or by call and GPU: a code, or any exception.
    """

    NVMLError = NVMLError

    def __init__(self, *cards: Card, fail: dict[str | tuple[str, int], int | Exception] | None = None) -> None:
        self.cards = cards
        self.fail = fail or {}

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("nvml"):
            return found

        def call(*arguments: Any) -> Any:
            first = arguments[0] if arguments else None
            gpu = self.cards.index(first) if isinstance(first, Card) and first in self.cards else first
            failure = self.fail.get(name, self.fail.get((name, gpu)) if isinstance(gpu, int) else None)
            if isinstance(failure, int):
                raise NVMLError(failure)
            if failure is not None:
                raise failure
            return found(*arguments)

        return call

    def nvmlInit(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        return self.cards[index]

    def nvmlDeviceGetCudaComputeCapability(self, card: Card) -> tuple[int, int]:
        return card.capability

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:
        return SimpleNamespace(total=card.memory, free=card.free)

    def nvmlDeviceGetBAR1MemoryInfo(self, card: Card) -> Any:
        return SimpleNamespace(bar1Total=card.bar1)

    def nvmlDeviceGetName(self, card: Card) -> Any:
        return card.name

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def nvmlDeviceGetPciInfo(self, card: Card) -> Any:
        return SimpleNamespace(busId=card.bus)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: Card) -> int:
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: Card) -> int:
        return 16

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: Card) -> int:
        return 16

    def nvmlDeviceGetCurrPcieLinkGeneration(self, card: Card) -> int:
        return 1

    def nvmlDeviceGetGpuMaxPcieLinkGeneration(self, card: Card) -> int:
        return 4

    def nvmlDeviceGetPersistenceMode(self, card: Card) -> int:
        return card.persistence

    def nvmlDeviceGetClockInfo(self, card: Card, kind: int) -> int:
        return {1: 210}[kind]

    def nvmlDeviceGetMaxClockInfo(self, card: Card, kind: int) -> int:
        return {1: 2100}[kind]

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: Card) -> int:
        return card.reasons

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:
        if card.mig is None:
            raise NVMLError(3)
        return [card.mig, card.mig]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, place: int) -> Card:
        if place not in card.slices:
            raise NVMLError(6)
        instance, gpu_instance, compute_instance = card.slices[place]
        instance.numbers = (gpu_instance, compute_instance)
        return instance

    def nvmlDeviceGetGpuInstanceId(self, instance: Card) -> int:
        return instance.numbers[0]

    def nvmlDeviceGetComputeInstanceId(self, instance: Card) -> int:
        return instance.numbers[1]

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.compute]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: Card) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.graphics]

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        if pid > 9000:
            raise NVMLError(6)
        return b"/usr/bin/python3"

    def nvmlDeviceGetP2PStatus(self, card: Card, other: Card, capability: int) -> int:
        return card.link[capability]
