"""What is wrong between GPUs: peer access and the driver that grants it, BAR1, IOMMU, ACS, and NCCL's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from slimserve.machine import ENVIRONMENT, Gpu, Machine, NcclSetting, gib
from slimserve.preflight.cards import numbers
from slimserve.preflight.concern import Concern

_ON = ("", "0")  # what NCCL takes for no


def links(machine: Machine) -> Iterator[Concern]:
    """Pairs without peer access, and windows that are too small for it."""
    pairs = list(combinations(machine.gpus, 2))
    off = [(a, b) for a, b in pairs if "none" in (a.link(b), b.link(a))]
    if off:
        which = "between any two GPUs" if len(off) == len(pairs) else "between GPU " + _pairs(off)
        boot = f"; the kernel was started with {machine.kernel_parameters}" if machine.kernel_parameters else ""
        yield Concern(
            f"no peer-to-peer access {which}{boot}",
            "what these GPUs send each other goes through host memory: right, and slower",
            "look at IOMMU and ACS in the firmware and at iommu= among the boot parameters" + _module(machine),
            blocks="profiles that need peer access",
        )
    # Over NVLink the window does not matter. Without it, a peer reaches only what the window covers.
    narrow = [
        gpu for gpu in _without_nvlink(machine) if gpu.bar1_bytes is not None and gpu.bar1_bytes < gpu.memory_bytes
    ]
    if narrow:
        least = min(narrow, key=lambda gpu: gpu.bar1_bytes or 0)
        yield Concern(
            f"the BAR1 window of GPU {numbers(narrow)} is smaller than its memory: "
            f"{gib(least.bar1_bytes or 0)} of {gib(least.memory_bytes)}",
            "without NVLink, GPUs reach each other's memory through this window",
            'switch on "Above 4G decoding" and "Resizable BAR" in the firmware',
        )


def on_the_way(machine: Machine) -> Iterator[Concern]:
    """What leads traffic between GPUs astray: IOMMU, ACS, NCCL's settings."""
    over_pcie = _without_nvlink(machine)
    translated = [gpu for gpu in over_pcie if gpu.iommu == "translated"]
    if translated:
        yield Concern(
            f"the IOMMU translates what GPU {numbers(translated)} sends",
            "what a GPU reads from another over PCIe is then looked up on the way: slower, and with a driver that was "
            "changed to allow peer access it can hang or arrive wrong",
            "boot with iommu=pt, or switch the IOMMU off in the firmware",
        )
    redirecting = [gpu for gpu in over_pcie if gpu.acs == "redirecting"]
    if redirecting:
        yield Concern(
            f"PCIe ACS redirects what GPU {numbers(redirecting)} sends to its peers",
            "it goes up to the processor and down again in the place of straight across the switch",
            "switch ACS off in the firmware, or clear it in each PCIe bridge (setpci, as root, after each boot)",
        )
    for setting in machine.nccl if len(machine.gpus) > 1 else ():
        yield from _nccl(setting, over_pcie)


def module_words(machine: Machine) -> str:
    """The driver in words: version, kernel module, and whether that was changed; empty when there is none.

    NVIDIA's own modules grant GeForce cards no access to each other over PCIe: where it is granted, they were changed.
    """
    if not machine.driver:
        return ""
    kind = {"open": ", open kernel module", "proprietary": ", proprietary kernel module", "unknown": ""}
    words = f"driver {machine.driver}{kind[machine.driver_module]}"
    geforce = [(a, b) for a, b in combinations(machine.gpus, 2) if _is_geforce(a) and _is_geforce(b)]
    if any("p2p" in (a.link(b), b.link(a)) for a, b in geforce):
        words += ", changed to allow peer access between GeForce cards"
    elif geforce and all("none" in (a.link(b), b.link(a)) for a, b in geforce):
        words += ", without peer access between GeForce cards"
    return words


def _module(machine: Machine) -> str:
    """What the driver has to do with it, as the end of a remedy."""
    if machine.gpus and not any(map(_is_geforce, machine.gpus)):
        return ""
    version = f" {machine.driver}" if machine.driver else ""
    return {
        "open": f"; between GeForce cards the open kernel modules{version} allow it only when they are patched for it",
        "proprietary": "; between GeForce cards it takes patched open kernel modules in the place of the proprietary "
        f"one{version}",
        "unknown": "; GeForce cards also need a driver that allows it",
    }[machine.driver_module]


def _is_geforce(gpu: Gpu) -> bool:
    return "GeForce" in gpu.name


def _without_nvlink(machine: Machine) -> list[Gpu]:
    """Of several GPUs those that reach others over PCIe alone."""
    gpus = machine.gpus if len(machine.gpus) > 1 else ()
    return [gpu for gpu in gpus if not any(gpu.link(other) == "nvlink" for other in machine.gpus)]


# Name: when it hurts, given whether GPUs depend on PCIe; and how.
_HURTS: dict[str, tuple[Callable[[str, bool], bool], str]] = {
    "NCCL_P2P_DISABLE": (
        lambda value, pcie: value not in _ON,
        "everything between GPUs then goes through host memory",
    ),
    "NCCL_P2P_LEVEL": (
        lambda value, pcie: value.upper() in ("LOC", "0") or (pcie and value.upper() in ("NVL", "PIX", "PXB", "PHB")),
        "GPUs that are further apart than that exchange everything through host memory",
    ),
    "NCCL_SHM_DISABLE": (
        lambda value, pcie: value not in _ON,
        "what cannot go from GPU to GPU then goes through the network stack",
    ),
    "NCCL_PROTO": (
        lambda value, pcie: "LL128" in value.upper() and not value.startswith("^"),
        "where the hardware does not keep 128 bytes together, this protocol delivers wrong values",
    ),
    "NCCL_ALGO": (lambda value, pcie: bool(value), "NCCL no longer chooses what suits the links and the size"),
    "NCCL_MAX_NCHANNELS": (lambda value, pcie: bool(value), "fewer channels than the links could feed are a brake"),
    "NCCL_DEBUG": (lambda value, pcie: value.upper() == "TRACE", "every call is written to the log"),
}


def _nccl(setting: NcclSetting, over_pcie: Sequence[Gpu]) -> Iterator[Concern]:
    hurts, how = _HURTS.get(setting.name, (lambda value, pcie: False, ""))
    if not hurts(setting.value, bool(over_pcie)):
        return
    what = f"{setting.name}={setting.value} is set in {setting.source}"
    if setting.source == ENVIRONMENT:
        why, do = f"{how}; the engine is not given it, while other programs here are", f"unset {setting.name}"
        yield Concern(what, why, do)
        return
    yield Concern(
        what,
        f"{how}; NCCL reads this file in the engine too, where the profile does not state the variable itself",
        "take the line out of the file",
        blocks="profiles that need peer access" if setting.name == "NCCL_P2P_DISABLE" else "nothing",
    )


def _pairs(pairs: Sequence[tuple[Gpu, Gpu]]) -> str:
    shown = ", ".join(f"{a.index} and {b.index}" for a, b in pairs[:4])
    return shown + (f" and {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")
