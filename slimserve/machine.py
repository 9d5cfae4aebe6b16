"""What a machine has, as facts: frozen, checked, and read from a file as well as from the hardware.

Nothing here looks at the hardware (`slimserve.probe` does) and nothing here judges (`slimserve.doctor` and the plan
do). A fact that nobody could read is None, or "unknown"; it is never filled in.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Literal

from slimserve.records import dataclass
from slimserve.shapes import Between, Matching, Satisfying

GIB = 1 << 30
# What `--doctor --json` adds to the facts. Findings follow from facts, so they are drawn anew when it is read back.
FINDINGS_KEY = "findings"
# What `--doctor --json` says of a test that it ran; no fact of the machine either.
EXCHANGE_KEY = "exchange"
# The source of an NCCL setting that is no file.
ENVIRONMENT = "the environment"

MigState = Literal["off", "on", "instance", "unknown"]
Link = Literal["nvlink", "p2p", "none", "unknown"]
Iommu = Literal["off", "passthrough", "translated", "unknown"]
DriverModule = Literal["open", "proprietary", "unknown"]
Acs = Literal["off", "redirecting", "unknown"]
Throttle = Literal[
    "power cap",
    "hardware slowdown",
    "sync boost",
    "heat",
    "heat, in hardware",
    "power brake",
    "set clocks",
    "display clocks",
]


def _printable(text: str) -> str | None:
    # These texts are printed on terminals; a control sequence in a machine file must not reach one.
    return None if text.isprintable() and 0 < len(text) <= 4096 else "it is empty, too long, or cannot be printed"


def _at_most_256(gpus: tuple[object, ...]) -> str | None:
    return None if len(gpus) <= 256 else "no machine has more than 256 GPUs"


Text = Annotated[str, Satisfying(_printable)]
# An exbibyte: more than any machine has, so a value above it is a slip of units.
Bytes = Annotated[int, Between(0, 1 << 60)]
SomeBytes = Annotated[int, Between(1, 1 << 60)]
GpuIndex = Annotated[int, Between(0, 4095)]
Port = Annotated[int, Between(1, 65535)]


def counted(number: int, noun: str) -> str:
    """So many of them, in words whose plural takes an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def gib(size_bytes: int) -> str:
    """A size in GiB; below one in MiB, where GiB would round too much away."""
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB or not size_bytes else f"{size_bytes / (1 << 20):.0f} MiB"


def _not_more(part: int | None, whole: int | None, part_name: str, whole_name: str) -> None:
    if part is not None and whole is not None and part > whole:
        raise ValueError(f"{part_name} = {part} is more than {whole_name} = {whole}")


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that holds memory on a GPU."""

    pid: Annotated[int, Between(0, 1 << 32)]
    """process id as the driver states it; inside a container it may be one of another namespace"""
    name: Text | None = None
    """name as the driver states it; null when it does not"""
    used_bytes: Bytes | None = None
    """GPU memory that it holds, in bytes; null when the driver does not say"""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG instance of a GPU."""

    index: GpuIndex
    """number in PCI bus order, as the driver library counts; MIG instances are numbered on after the cards"""
    name: Text
    """product name as the driver states it"""
    uuid: Text
    """the driver's identifier: GPU-... or MIG-..."""
    capability: Annotated[str, Matching(r"[1-9][0-9]?\.[0-9]", "major.minor, as 8.6")]
    """compute capability, major.minor: "8.6" """
    memory_bytes: SomeBytes
    """memory of the card or the slice, in bytes"""
    free_bytes: Bytes
    """memory that nothing held when it was read, in bytes"""
    mig: MigState
    """off; on (the card is cut into slices); instance (this is such a slice); unknown"""
    bar1_bytes: SomeBytes | None = None
    """size of the window through which the bus reaches GPU memory, in bytes; null when unknown"""
    pcie_generation: Annotated[int, Between(1, 16)] | None = None
    """highest PCIe generation that card and slot agree on; null when unknown"""
    pcie_width: Annotated[int, Between(1, 32)] | None = None
    """PCIe lanes in use; null when unknown"""
    pcie_generation_now: Annotated[int, Between(1, 16)] | None = None
    """PCIe generation at the moment, which falls when the card idles; null when unknown"""
    pcie_generation_card: Annotated[int, Between(1, 16)] | None = None
    """highest PCIe generation of the card itself, whatever its slot; null when unknown"""
    pcie_width_max: Annotated[int, Between(1, 32)] | None = None
    """PCIe lanes that card and slot could use; null when unknown"""
    iommu: Iommu = "unknown"
    """off; passthrough (addresses go through unchanged); translated (each access is looked up); unknown"""
    acs: Acs = "unknown"
    """redirecting: a PCIe bridge above it sends what it sends to another GPU up to the processor; off; unknown"""
    persistence: bool | None = None
    """whether the driver keeps the card ready while nobody uses it; null when unknown"""
    clock_mhz: Annotated[int, Between(0, 1 << 16)] | None = None
    """clock of the multiprocessors at the moment, in MHz; null when unknown"""
    clock_max_mhz: Annotated[int, Between(0, 1 << 16)] | None = None
    """highest clock of the multiprocessors, in MHz; null when unknown"""
    throttled_by: tuple[Throttle, ...] | None = None
    """what holds its clocks down at the moment, idleness aside; null when unknown"""
    numa_node: Annotated[int, Between(0, 4095)] | None = None
    """NUMA node of the slot; null when unknown"""
    processes: tuple[GpuProcess, ...] = ()
    """processes that hold memory on it"""
    peers: dict[GpuIndex, Link] = field(default_factory=dict)
    """how it reaches each other GPU, by index; a GPU that is not named is unknown"""

    def __post_init__(self) -> None:
        _not_more(self.free_bytes, self.memory_bytes, "free_bytes", "memory_bytes")
        for process in self.processes:
            _not_more(process.used_bytes, self.memory_bytes, f"used_bytes of process {process.pid}", "memory_bytes")
        if self.index in self.peers:
            raise ValueError(f"peers names the GPU itself, {self.index}")

    def link(self, other: Gpu) -> Link:
        """How this GPU reaches `other`: "unknown" where nobody could tell."""
        return self.peers.get(other.index, "unknown")


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The processors, as far as this process may use them."""

    name: Text | None = None
    """model name; null when unknown"""
    architecture: Text
    """as `uname -m` prints it"""
    cores: Annotated[int, Between(1, 1 << 16)]
    """logical CPUs that this process may use: the affinity mask, cut by the cgroup's quota"""
    sockets: Annotated[int, Between(1, 1024)] | None = None
    """processor packages; null when unknown"""
    numa_nodes: Annotated[int, Between(1, 4096)] | None = None
    """NUMA nodes; null when unknown"""
    own_nodes: tuple[Annotated[int, Between(0, 4095)], ...] | None = None
    """NUMA nodes of the CPUs that this process may use; null when unknown"""
    flags: tuple[Text, ...] | None = None
    """those of avx2, avx512f, avx512_bf16, amx_bf16 that it has; null when unknown"""


@dataclass(frozen=True, kw_only=True)
class HugePages:
    """Pages of more than 4 KiB, as the kernel is set up for them."""

    reserved_bytes: Bytes
    """memory set aside for those who ask for huge pages by name, in bytes"""
    free_bytes: Bytes
    """the part of it that nobody has taken, in bytes"""
    transparent: Literal["always", "madvise", "never", "unknown"] = "unknown"
    """who gets them without asking by name"""

    def __post_init__(self) -> None:
        _not_more(self.free_bytes, self.reserved_bytes, "free_bytes", "reserved_bytes")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What this process and what it starts may have; null where nothing limits it."""

    open_files: Annotated[int, Between(0, 1 << 60)] | None
    """file descriptors that a process may raise its limit to"""
    tasks: Annotated[int, Between(0, 1 << 60)] | None
    """processes and threads: the least of the user's limit and the control groups'"""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Host memory and every limit on it that binds this process. All sizes in bytes."""

    total_bytes: SomeBytes
    """RAM of the machine, in bytes"""
    available_bytes: Bytes
    """RAM that can be taken without swapping, in bytes"""
    cgroup_limit_bytes: Bytes | None
    """limit of the control group that leaves the least room, in bytes; null when none sets a limit"""
    cgroup_used_bytes: Bytes | None
    """what that group holds, without file cache that it can drop, in bytes; null when there is no limit"""
    memlock_bytes: Bytes | None
    """memory that this process may lock, in bytes; null when unlimited"""
    shm_total_bytes: Bytes
    """size of /dev/shm, in bytes; 0 when there is none"""
    shm_free_bytes: Bytes
    """free space in /dev/shm, in bytes"""
    own_nodes: tuple[Annotated[int, Between(0, 4095)], ...] | None = None
    """NUMA nodes from which this process may take memory; null when unknown"""
    huge_pages: HugePages | None = None
    """huge pages; null when unknown"""

    def __post_init__(self) -> None:
        _not_more(self.available_bytes, self.total_bytes, "available_bytes", "total_bytes")
        _not_more(self.shm_free_bytes, self.shm_total_bytes, "shm_free_bytes", "shm_total_bytes")
        if (self.cgroup_limit_bytes is None) != (self.cgroup_used_bytes is None):
            raise ValueError("cgroup_limit_bytes and cgroup_used_bytes belong together: give both, or null for both")

    @property
    def usable_bytes(self) -> int:
        """What can still be taken: the least of what is available and what the control group leaves, in bytes."""
        if self.cgroup_limit_bytes is None or self.cgroup_used_bytes is None:
            return self.available_bytes
        # A group can stand above a limit that was lowered under it; what it leaves is then nothing.
        return min(self.available_bytes, max(0, self.cgroup_limit_bytes - self.cgroup_used_bytes))


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The file system of the cache folder."""

    path: Text
    """the cache folder; it need not exist yet"""
    free_bytes: Bytes
    """space that this user may fill, in bytes"""
    total_bytes: Bytes
    """size of the file system, in bytes"""
    writable: bool
    """whether the folder, or the deepest folder above it that exists, can be written to"""
    executable: bool | None = None
    """whether libraries that lie there can be loaded; null when unknown"""

    def __post_init__(self) -> None:
        _not_more(self.free_bytes, self.total_bytes, "free_bytes", "total_bytes")


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that a launch writes to, beside the cache."""

    purpose: Text
    """what is kept there"""
    path: Text
    """the folder; it need not exist yet"""
    variable: Text
    """environment variable that names another"""
    writable: bool
    """whether it, or the deepest folder above it that exists, can be written to"""
    free_bytes: Bytes
    """space that this user may fill, in bytes"""


@dataclass(frozen=True, kw_only=True)
class NcclSetting:
    """One NCCL_... setting that a program started here would find."""

    name: Annotated[str, Matching(r"NCCL_[A-Z0-9_]+", "NCCL_...")]
    value: Annotated[str, Satisfying(lambda text: None if text.isprintable() else "it cannot be printed")]
    source: Text
    """a file, or "the environment" """


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine that slimserve started on this machine, for this user."""

    profile: Text
    """what it serves"""
    port: Annotated[int, Between(0, 65535)]
    """its TCP port; 0: it has none of its own"""
    lost: bool
    """whether the supervisor that has to end it is dead"""
    pids: tuple[Annotated[int, Between(1, 1 << 32)], ...] = ()
    """its processes"""


@dataclass(frozen=True, kw_only=True)
class GpuProblem:
    """Why GPUs could not be read, at all or in part."""

    what: Text
    """what happened, with the call and the GPU"""
    why: Text
    """what follows from it"""
    do: Text
    """how to mend it"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Everything that a plan may know about a machine."""

    source: Text = "a machine file"
    """where these facts come from: "this machine", a file, or "platform NAME" """
    system: Text
    """as `uname -s` prints it"""
    cpu: Cpu
    """the processors"""
    memory: Memory
    """host memory and its limits"""
    disk: Disk
    """the file system of the cache folder"""
    driver: Text | None = None
    """version of the GPU driver; null when there is none or it is unknown"""
    gpus: Annotated[tuple[Gpu, ...], Satisfying(_at_most_256)]
    """the GPUs that a program started here would see, in the order in which it would see them; may be empty"""
    hidden_gpus: Annotated[int, Between(0, 4096)] = 0
    """GPUs that exist and that CUDA_VISIBLE_DEVICES hides"""
    gpu_problem: GpuProblem | None = None
    """why GPUs could not be read, at all or in part; null when all went well"""
    listening_ports: tuple[Port, ...] = ()
    """TCP ports on which something listens, as far as the system shows them"""
    kernel_parameters: Text | None = None
    """boot parameters that touch traffic between GPUs (IOMMU, PCI); null when none is set or they cannot be read"""
    driver_module: DriverModule = "unknown"
    """kind of the driver's kernel module; only the open one can be changed by others"""
    limits: Limits | None = None
    """limits of processes; null when unknown"""
    folders: tuple[Folder, ...] = ()
    """what a launch writes to beside the cache"""
    nccl: tuple[NcclSetting, ...] = ()
    """NCCL's settings in the environment and in its files"""
    engines: tuple[Engine, ...] = ()
    """engines of this user, as far as they were looked for"""

    def __post_init__(self) -> None:
        for name, values in (("index", [g.index for g in self.gpus]), ("uuid", [g.uuid for g in self.gpus])):
            twice = sorted(str(value) for value, count in Counter[object](values).items() if count > 1)
            if twice:
                raise ValueError(f"gpus: {name} {', '.join(twice)} is given to more than one GPU")
        known = {gpu.index for gpu in self.gpus}
        for gpu in self.gpus:
            strangers = sorted(set(gpu.peers) - known)
            if strangers:
                raise ValueError(f"gpus: peers of GPU {gpu.index} names GPU {strangers[0]}, which is not listed")


def load_machine(path: Path) -> Machine:
    """Read a machine from a YAML or JSON file, such as `--doctor --json` prints (whose findings are not read).

    Args:
        path: the file. It becomes the machine's `source`, whatever the file says.

    Returns:
        The machine.

    Raises:
        RegistryError: with every problem of the file, each with file, line and key.
    """
    from slimserve.validate import validate
    from slimserve.yaml_source import read_document

    document = read_document(path)
    if isinstance(document.data, dict):
        document = replace(
            document,
            data={key: value for key, value in document.data.items() if key not in (FINDINGS_KEY, EXCHANGE_KEY)},
        )
    machine = validate(Machine, document)
    shown = "".join(letter if letter.isprintable() else "?" for letter in str(path))
    return replace(machine, source=shown)
