"""Where a GPU sits on the PCI bus: its NUMA node, and what stands between it and the memory of another.

Sources: the kernel's ABI documents for `sysfs-bus-pci` (numa_node, config) and `sysfs-kernel-iommu_groups` (type); the
PCI Express base specification, sections on extended capabilities and on access control services (capability 0x000D,
control register at offset 6).
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import Any

from slimserve.machine import Acs, Iommu
from slimserve.probe.text import read_bytes, read_text

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_CONFIG_BYTES = 4096
_FIRST_EXTENDED = 0x100
_ACS_ID = 0x000D
_REDIRECTS = 0x04 | 0x08  # requests to a peer, and their completions


def place(root: Path, bus_id: str | None) -> dict[str, Any]:
    """The fields `numa_node`, `iommu` and `acs` of a `Gpu`, each unknown where the kernel does not tell.

    Args:
        root: folder that holds `sys`.
        bus_id: the address as the driver writes it, with eight digits of domain; None when it does not.
    """
    # The kernel writes the domain with four digits.
    found = re.fullmatch(r"0000([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])", (bus_id or "").lower())
    if not found:
        return {"numa_node": None, "iommu": "unknown", "acs": "unknown"}
    device = root / "sys/bus/pci/devices" / found[1]
    node = (read_text(device / "numa_node") or "").strip()
    return {
        "numa_node": int(node) if node.isdigit() else None,  # -1: the firmware does not say
        "iommu": _iommu(root, device),
        "acs": _acs(device),
    }


def _iommu(root: Path, device: Path) -> Iommu:
    if not device.is_dir():
        return "unknown"
    if (device / "iommu_group").is_dir():
        kind = (read_text(device / "iommu_group/type") or "").strip()
        if kind == "identity":
            return "passthrough"
        return "translated" if kind.startswith("DMA") else "unknown"
    try:
        os.listdir(root / "sys/class/iommu")
    except OSError:
        return "unknown"
    return "off"  # the kernel knows of IOMMUs, be there one or none, and this device is behind none


def _acs(device: Path) -> Acs:
    """Whether a bridge above the device redirects. Those of a virtual machine's host cannot be seen from inside."""
    try:
        above = device.resolve(strict=True).parents
    except OSError:
        return "unknown"
    bridges = [_redirects(read_bytes(folder / "config", _CONFIG_BYTES)) for folder in above if _is_device(folder)]
    if any(bridges):
        return "redirecting"
    return "unknown" if None in bridges or not bridges else "off"


def _is_device(folder: Path) -> bool:
    return _ADDRESS.fullmatch(folder.name) is not None


def _redirects(config: bytes | None) -> bool | None:
    """Whether the bridge of this configuration space redirects; None when the space is not shown, as to other users."""
    if config is None or len(config) < _CONFIG_BYTES:
        return None
    offset, seen = _FIRST_EXTENDED, set[int]()
    while offset >= _FIRST_EXTENDED and offset <= _CONFIG_BYTES - 8 and offset not in seen:
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header in (0, 0xFFFFFFFF):
            return None if header else False  # all ones: the device did not answer
        if header & 0xFFFF == _ACS_ID:
            (control,) = struct.unpack_from("<H", config, offset + 6)
            return bool(control & _REDIRECTS)
        offset = header >> 20 & 0xFFC
    return False
