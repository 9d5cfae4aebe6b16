"""Facts of buses, limits, huge pages, NCCL's files and lost engines, from trees that stand for / elsewhere."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from test_machine_host import HOST, Tree, build
from test_supervisor_record import orphan, write

from slimserve.engine import procfs, record
from slimserve.machine import Engine, HugePages, Limits, NcclSetting
from slimserve.probe import read_machine
from slimserve.probe.cgroup import task_limit
from slimserve.probe.engines import read_engines
from slimserve.probe.host import read_cpu, read_driver_module, read_folder, read_memory
from slimserve.probe.limits import read_huge_pages, read_limits
from slimserve.probe.nccl import read_settings
from slimserve.probe.pci import place

BUS = "00000000:41:00.0"
CARD = "sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0"
BRIDGE = "sys/devices/pci0000:40/0000:40:01.1"
REDIRECT, VALIDATE = 0x04, 0x01


def config(*capabilities: tuple[int, int], size: int = 4096) -> bytes:
    """A configuration space with extended capabilities: (id, the word at offset 6)."""
    space = bytearray(size)
    offset = 0x100
    for number, (identifier, word) in enumerate(capabilities):
        following = offset + 0x20 if number + 1 < len(capabilities) else 0
        struct.pack_into("<I", space, offset, identifier | 1 << 16 | following << 20)
        struct.pack_into("<H", space, offset + 6, word)
        offset = following
    return bytes(space)


def machine_with_card(root: Path, bridge: bytes | None = None, group: str | None = None, node: str = "1\n") -> Path:
    card = root / CARD
    card.mkdir(parents=True)
    (card / "numa_node").write_text(node)
    if bridge is not None:
        (root / BRIDGE / "config").write_bytes(bridge)
    if group is not None:
        folder = root / "sys/kernel/iommu_groups/12"
        folder.mkdir(parents=True)
        (folder / "type").write_text(group)
        (card / "iommu_group").symlink_to(folder)
    devices = root / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    (devices / "0000:41:00.0").symlink_to(card)
    return root


@pytest.mark.parametrize(
    ("bridge", "acs"),
    [
        (config((0x0D, REDIRECT)), "redirecting"),
        (config((0x01, 0xFFFF), (0x0D, REDIRECT | VALIDATE)), "redirecting"),
        (config((0x0D, VALIDATE)), "off"),
        (config((0x01, 0xFFFF)), "off"),
        (config(), "off"),
        (config(size=64), "unknown"),  # what others than root are shown
        (config(size=256), "unknown"),
        (b"\xff" * 4096, "unknown"),  # it does not answer
        (None, "unknown"),
    ],
)
def test_a_bridge_that_redirects(tmp_path: Path, bridge: bytes | None, acs: str) -> None:
    assert place(machine_with_card(tmp_path, bridge), BUS)["acs"] == acs


def test_capabilities_that_go_round_in_a_circle_come_to_an_end(tmp_path: Path) -> None:
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x01 | 0x100 << 20)
    assert place(machine_with_card(tmp_path, bytes(space)), BUS)["acs"] == "off"


def test_a_card_without_a_bridge_in_sight_is_unknown(tmp_path: Path) -> None:
    card = tmp_path / "sys/devices/pci0000:00/0000:41:00.0"
    card.mkdir(parents=True)
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    (devices / "0000:41:00.0").symlink_to(card)
    assert place(tmp_path, BUS) == {"numa_node": None, "iommu": "unknown", "acs": "unknown"}


@pytest.mark.parametrize(
    ("group", "iommu"),
    [
        ("identity\n", "passthrough"),
        ("DMA\n", "translated"),
        ("DMA-FQ\n", "translated"),
        ("blocked\n", "unknown"),
        ("", "unknown"),
    ],
)
def test_the_iommu_of_a_card(tmp_path: Path, group: str, iommu: str) -> None:
    assert place(machine_with_card(tmp_path, group=group), BUS)["iommu"] == iommu


def test_no_iommu_is_known_only_where_the_kernel_would_say(tmp_path: Path) -> None:
    assert place(machine_with_card(tmp_path), BUS)["iommu"] == "unknown"
    (tmp_path / "sys/class/iommu").mkdir(parents=True)
    assert place(tmp_path, BUS)["iommu"] == "off"


@pytest.mark.parametrize("bus", [None, "", "nonsense", "00000000:42:00.0", "00010000:41:00.0", "../../etc"])
def test_a_card_that_is_not_on_the_bus_is_unknown(tmp_path: Path, bus: str | None) -> None:
    assert place(machine_with_card(tmp_path, config()), bus) == {
        "numa_node": None,
        "iommu": "unknown",
        "acs": "unknown",
    }


def test_a_node_that_the_firmware_does_not_state(tmp_path: Path) -> None:
    assert place(machine_with_card(tmp_path, node="-1\n"), BUS)["numa_node"] is None


LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units\n"
    "Max processes             {soft:<20} unlimited            processes\n"
    "Max open files            1024                 {files:<20} files\n"
)
STATUS = "Name:\tpython3\nCapEff:\t{caps}\n"
NOBODY, ROOT = "0000000000000000", "000001ffffffffff"


@pytest.mark.parametrize(
    ("soft", "files", "caps", "found"),
    [
        ("4096", "524288", NOBODY, Limits(open_files=524288, tasks=4096)),
        ("unlimited", "unlimited", NOBODY, Limits(open_files=None, tasks=None)),
        ("4096", "4096", ROOT, Limits(open_files=4096, tasks=None)),
        ("nonsense", "4096", ROOT, None),
    ],
)
def test_limits(tmp_path: Path, soft: str, files: str, caps: str, found: Limits | None) -> None:
    tree = {"proc/self/limits": LIMITS.format(soft=soft, files=files), "proc/self/status": STATUS.format(caps=caps)}
    assert read_limits(build(tmp_path, tree)) == found


def test_limits_that_are_not_stated_are_unknown(tmp_path: Path) -> None:
    assert read_limits(tmp_path) is None
    assert read_limits(build(tmp_path, HOST)) is None  # it names locked memory alone


def test_the_groups_limit_counts_when_it_is_less(tmp_path: Path) -> None:
    tree: Tree = {
        "proc/self/limits": LIMITS.format(soft="4096", files="1024"),
        "proc/self/status": STATUS.format(caps=NOBODY),
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/pids.max": "max\n",
        "sys/fs/cgroup/a/pids.max": "512\n",
    }
    root = build(tmp_path, HOST, tree)
    assert task_limit(root) == 512
    assert read_limits(root) == Limits(open_files=1024, tasks=512)


MEMINFO = "MemTotal: 100 kB\nHugePages_Total:      {total}\nHugePages_Free:       {free}\nHugepagesize:       2048 kB\n"


def test_huge_pages(tmp_path: Path) -> None:
    tree = {
        "proc/meminfo": MEMINFO.format(total=10, free=3),
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }
    assert read_huge_pages(build(tmp_path, tree)) == HugePages(
        reserved_bytes=10 << 21, free_bytes=3 << 21, transparent="madvise"
    )


@pytest.mark.parametrize("text", ["", "nonsense", "always madvise never"])
def test_a_mode_that_is_not_stated_is_unknown(tmp_path: Path, text: str) -> None:
    tree = {"proc/meminfo": MEMINFO.format(total=0, free=0), "sys/kernel/mm/transparent_hugepage/enabled": text}
    found = read_huge_pages(build(tmp_path, tree))
    assert found is not None
    assert found.transparent == "unknown"


def test_huge_pages_that_are_not_stated_are_unknown(tmp_path: Path) -> None:
    assert read_huge_pages(tmp_path) is None
    assert read_huge_pages(build(tmp_path, HOST)) is None
    assert read_huge_pages(build(tmp_path, {"proc/meminfo": MEMINFO.format(total="-", free=0)})) is None


@pytest.mark.parametrize(
    ("text", "module"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 13\n",
            "open",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\n", "proprietary"),
        ("GCC version: Open Kernel Module\n", "unknown"),
        ("", "unknown"),
    ],
)
def test_the_kernel_module(tmp_path: Path, text: str, module: str) -> None:
    assert read_driver_module(build(tmp_path, {"proc/driver/nvidia/version": text})) == module


def test_a_module_that_does_not_show_itself_is_unknown(tmp_path: Path) -> None:
    assert read_driver_module(tmp_path) == "unknown"


def test_nodes_of_cores_and_of_memory(tmp_path: Path) -> None:
    status = HOST["proc/self/status"].replace("0-3,8-11", "0-3") + "Mems_allowed_list:\t1\n"
    root = build(tmp_path, HOST, {"proc/self/status": status})
    assert read_cpu(root, "x86_64").own_nodes == (0,)
    assert read_memory(root).own_nodes == (1,)


def test_nodes_that_are_not_stated_are_unknown(tmp_path: Path) -> None:
    tree = {name: text for name, text in HOST.items() if not name.startswith("sys/devices")}
    root = build(tmp_path, tree)
    assert read_cpu(root, "x86_64").own_nodes is None
    assert read_memory(root).own_nodes is None


def test_nccls_files_and_variables(tmp_path: Path) -> None:
    tree = {
        "etc/nccl.conf": "# a comment\nNCCL_P2P_DISABLE = 1\nNCCL_ALGO=Ring\nOTHER=1\n",
        "home/.nccl.conf": "NCCL_P2P_DISABLE=0\nNCCL_SOCKET_IFNAME=\x1b[2J\n",
    }
    root = build(tmp_path, tree)
    environ = {"NCCL_DEBUG": "INFO", "NOT_NCCL_X": "1", "NCCL_odd": "1", "PATH": "/bin"}
    own, shared = str(root / "home/.nccl.conf"), str(root / "etc/nccl.conf")
    assert read_settings(root, environ, root / "home") == (
        NcclSetting(name="NCCL_DEBUG", value="INFO", source="the environment"),
        NcclSetting(name="NCCL_P2P_DISABLE", value="0", source=own),  # what was set first stays
        NcclSetting(name="NCCL_SOCKET_IFNAME", value="?[2J", source=own),
        NcclSetting(name="NCCL_ALGO", value="Ring", source=shared),
    )


def test_a_file_of_nccl_that_is_none_does_not_keep_us(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc/nccl.conf")
    assert read_settings(tmp_path, {}, None) == ()
    (tmp_path / ".nccl.conf").write_bytes(b"NCCL_ALGO=\xff\xfe\n\x00\xff")
    assert [one.name for one in read_settings(tmp_path, {}, tmp_path)] == ["NCCL_ALGO"]


def test_a_folder_that_cannot_be_looked_at_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    found = read_folder("logs", "SLIMSERVE_STATE", tmp_path / "link/below")
    assert (found.writable, found.free_bytes) == (False, 0)
    found = read_folder("logs", "SLIMSERVE_STATE", Path("/proc/not/yet"))  # not full: nothing can ever be kept there
    assert (found.writable, found.free_bytes) == (False, 0)
    found = read_folder("logs", "SLIMSERVE_STATE", tmp_path / "not/yet")
    assert found.writable
    assert found.free_bytes > 0


def test_the_machine_names_the_folders_of_a_launch(tmp_path: Path) -> None:
    environ = {"SLIMSERVE_STATE": str(tmp_path / "state"), "TMPDIR": str(tmp_path), "HOME": "/"}
    machine = read_machine(tmp_path, environ)
    assert {folder.variable: folder.path for folder in machine.folders} == {
        "SLIMSERVE_STATE": str(tmp_path / "state"),
        "TMPDIR": str(tmp_path),
    }


def test_where_no_engine_ran_there_is_none(tmp_path: Path) -> None:
    assert read_engines(tmp_path / "nowhere") == ()


def test_an_engine_whose_supervisor_is_dead_is_found(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with orphan("ours") as (session, child):
        own = procfs.own()
        gone = {"supervisor_pid": own.pid, "supervisor_start_ticks": own.start_ticks - 1}
        path = write(tmp_path / "run" / record.FILE_NAME, pid=session, tag="ours", **gone)
        start = record.read(path)
        assert start is not None
        assert read_engines(tmp_path) == (Engine(profile=start.profile_id, port=start.port, lost=True, pids=(child,)),)
