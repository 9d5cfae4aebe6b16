"""What a platform is: the kind of machine that a profile was made for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from slimserve.profile import Bytes, Count, Id, Line, Setting, Text
from slimserve.records import dataclass
from slimserve.shapes import Between, Matching, fields_of

# Boards report a little less than their label says (reserved pages, ECC); another card of the family reports far less.
MEMORY_TOLERANCE = 0.03


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """Memory of a card that neither shapes nor settings explain, as it was seen on such cards."""

    driver_bytes: Setting[Bytes]
    """of the card's memory, what the driver keeps: programs are shown the rest, and the engine's share is of that"""
    startup_bytes: Setting[Bytes]
    """context and collectives: taken before the engine looks for the first time, so outside its share"""
    runtime_bytes: Setting[Bytes]
    """loaded kernels and library workspaces: taken while it loads and profiles, so inside its share"""
    graph_bytes: Setting[Bytes]
    """of one captured graph of the whole model"""


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """The GPUs of a platform: all alike."""

    name: Line
    """the product name as the driver reports it"""
    capability: Annotated[str, Matching(r"[0-9]{1,2}\.[0-9]", "major.minor")]
    """CUDA compute capability"""
    count: Annotated[int, Between(1, 256)]
    memory_bytes: Annotated[int, Between(1 << 20, 1 << 50)]
    """memory of one, as labelled"""
    peers: Literal["nvlink", "p2p", "none"]
    """how two of them reach each other at best"""
    reserve: Reserve

    @property
    def least_bytes(self) -> int:
        """Total bytes below which a card is another card."""
        return int(self.memory_bytes * (1 - MEMORY_TOLERANCE))

    @property
    def most_bytes(self) -> int:
        """Total bytes above which a card is another card."""
        return int(self.memory_bytes * (1 + MEMORY_TOLERANCE))


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the machine must have, each with its reason."""

    memory_bytes: Setting[Bytes]
    """host memory that the engine's processes may use"""
    process_bytes: Setting[Bytes]
    """host memory of one of the engine's processes, without weights and caches"""
    shm_bytes: Setting[Bytes] | None = None
    """size of /dev/shm"""
    memlock_bytes: Setting[Bytes] | None = None
    """locked memory that a process may have"""
    cores: Setting[Count] | None = None
    cpu_flags: Setting[tuple[Text, ...]] | None = None
    driver: Setting[Annotated[str, Matching(r"[0-9]+(\.[0-9]+)*", "numbers and dots")]] | None = None
    """lowest driver version"""
    peer_access: Setting[Literal["required", "recommended"]] | None = None
    """whether the GPUs must reach each other's memory"""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """One kind of machine."""

    id: Id
    """the name of its file"""
    title: Line
    kind: Literal["cuda", "cpu"]
    architecture: Literal["x86_64", "aarch64"]
    """machine architecture of the host"""
    nodes: Annotated[int, Between(1, 64)] = 1
    """machines of this kind that one endpoint spans; all else here is of one of them"""
    numa_nodes: Annotated[int, Between(1, 64)] = 1
    """of each machine: the processor sockets, each with memory of its own"""
    gpus: Accelerators | None = None
    needs: Needs

    def settings(self) -> Iterator[tuple[str, Setting[Any]]]:
        """Every reserve and every need by key path."""
        parts: list[tuple[str, Reserve | Needs]] = [("needs", self.needs)]
        if self.gpus is not None:
            parts.insert(0, ("gpus.reserve", self.gpus.reserve))
        for path, part in parts:
            for field in fields_of(type(part)):
                setting = getattr(part, field.name)
                if setting is not None:
                    yield f"{path}.{field.name}", setting

    def __post_init__(self) -> None:
        if (self.kind == "cuda") != (self.gpus is not None):
            raise ValueError("kind cuda needs `gpus`, kind cpu has none")
        if self.kind == "cuda" and self.needs.driver is None:
            raise ValueError("kind cuda needs needs.driver")
