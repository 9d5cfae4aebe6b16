"""The host's facts from trees that stand for / on machines that are not here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slimserve.errors import Refused
from slimserve.machine import GIB
from slimserve.probe import read_machine
from slimserve.probe.cgroup import MemoryGroup, cpu_quota, tightest_memory_group
from slimserve.probe.host import read_cpu, read_disk, read_kernel_parameters, read_listening_ports, read_memory

Tree = dict[str, str]

V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 24 0:27 {root} /sys/fs/cgroup/memory rw shared:5 - cgroup cgroup rw,memory\n"
    "32 24 0:28 {root} /sys/fs/cgroup/cpu,cpuacct rw shared:6 - cgroup cgroup rw,cpu,cpuacct\n"
)
NO_LIMIT_V1 = "9223372036854771712\n"

HOST: Tree = {
    "proc/self/status": "Name:\tpython3\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-3,8-11\n",
    "proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units\n"
    "Max locked memory         8388608              unlimited            bytes\n",
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": V2,
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 7532 32-Core Processor\nflags\t\t: fpu avx2 avx512_vnni\n\n"
    "processor\t: 1\nmodel name\t: another\nflags\t\t: avx512f\n\n",
    "proc/meminfo": "MemTotal:       65536000 kB\nMemFree:         1000000 kB\nMemAvailable:   32768000 kB\n",
    "proc/cmdline": "BOOT_IMAGE=/vmlinuz root=UUID=1 password=secret iommu=pt intel_iommu=on pci=realloc quiet\n",
    "proc/net/tcp": "  sl  local_address rem_address   st tx_queue\n"
    "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000\n"
    "   1: 0100007F:1F41 0100007F:1F40 01 00000000:00000000\n",
    "proc/net/tcp6": "  sl  local_address remote_address st\n"
    "   0: 00000000000000000000000000000000:0016 00000000000000000000000000000000:0000 0A 0:0\n"
    "   1: 00000000000000000000000000000000:1F40 00000000000000000000000000000000:0000 0A 0:0\n",
    "sys/devices/system/node/online": "0-1\n",
    "sys/devices/system/node/node0/cpulist": "0-3\n",
    "sys/devices/system/node/node1/cpulist": "8-11\n",
    "sys/devices/system/cpu/cpu0/topology/physical_package_id": "0\n",
    "sys/devices/system/cpu/cpu8/topology/physical_package_id": "1\n",
    "dev/shm/keep": "",
}


def build(root: Path, *trees: Tree) -> Path:
    for tree in trees:
        for name, text in tree.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return root


def group_v2(path: str, limit: str, used: int, cache: int = 0) -> Tree:
    folder = f"sys/fs/cgroup{path}"
    stat = f"anon 5\ninactive_file {cache}\nactive_file 0\n"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": f"{used}\n", f"{folder}/memory.stat": stat}


def group_v1(path: str, limit: str, used: int, cache: int = 0) -> Tree:
    folder = f"sys/fs/cgroup/memory{path}"
    stat = f"cache 99999\ninactive_file 7\ntotal_inactive_file {cache}\ntotal_active_file 0\n"
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


def test_the_parts_of_a_host(tmp_path: Path) -> None:
    root = build(tmp_path, HOST)
    cpu = read_cpu(root, "x86_64")
    assert (cpu.name, cpu.cores, cpu.sockets, cpu.numa_nodes) == ("AMD EPYC 7532 32-Core Processor", 8, 2, 2)
    assert cpu.flags == ("avx2",)  # of the first block alone, and whole words
    memory = read_memory(root)
    assert (memory.total_bytes, memory.available_bytes) == (65536000 * 1024, 32768000 * 1024)
    assert memory.cgroup_limit_bytes is None
    assert memory.memlock_bytes == 8388608
    assert memory.shm_total_bytes > 0
    assert read_listening_ports(root) == (22, 8000)
    assert read_kernel_parameters(root) == "iommu=pt intel_iommu=on pci=realloc"


def test_what_a_thin_system_does_not_say_is_unknown(tmp_path: Path) -> None:
    thin = {
        name: text
        for name, text in HOST.items()
        if not name.startswith(("sys", "proc/cpuinfo", "proc/net", "proc/cmdline", "dev"))
    }
    root = build(tmp_path, thin)
    cpu = read_cpu(root, "riscv64")
    assert (cpu.name, cpu.sockets, cpu.numa_nodes, cpu.flags) == (None, None, None, None)
    assert cpu.cores == 8
    assert read_memory(root).shm_total_bytes == 0
    assert read_listening_ports(root) == ()
    assert read_kernel_parameters(root) is None


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ("proc/meminfo", "the host's memory"),
        ("proc/self/status", "the CPUs that this process may use"),
        ("proc/self/limits", "locked memory"),
    ],
)
def test_what_must_be_known_and_is_not_is_a_refusal(tmp_path: Path, lacking: str, said: str) -> None:
    root = build(tmp_path, {name: text for name, text in HOST.items() if name != lacking})
    with pytest.raises(Refused, match=said):
        read_machine(tmp_path, {}, root)


def test_memory_that_contradicts_itself_is_a_refusal(tmp_path: Path) -> None:
    root = build(tmp_path, HOST, {"proc/meminfo": "MemTotal: 10 kB\nMemAvailable: 20 kB\n"})
    with pytest.raises(Refused, match=r"available_bytes = 20480 is more than total_bytes = 10240"):
        read_machine(tmp_path, {}, root)


def test_the_right_to_lock_memory_lifts_the_limit(tmp_path: Path) -> None:
    status = HOST["proc/self/status"].replace("0000000000000000", "0000000000004000")
    assert read_memory(build(tmp_path, HOST, {"proc/self/status": status})).memlock_bytes is None


def test_an_unlimited_lock_is_none(tmp_path: Path) -> None:
    limits = HOST["proc/self/limits"].replace("8388608  ", "unlimited")
    assert read_memory(build(tmp_path, HOST, {"proc/self/limits": limits})).memlock_bytes is None


CGROUPS: dict[str, tuple[list[Tree], MemoryGroup | None]] = {
    "v2, no limit": ([{"proc/self/cgroup": "0::/a\n"}, group_v2("/a", "max\n", 5)], None),
    "v2, own limit": ([{"proc/self/cgroup": "0::/a\n"}, group_v2("/a", "1000\n", 300)], MemoryGroup(1000, 300)),
    "v2, file cache is not use": (
        [{"proc/self/cgroup": "0::/a\n"}, group_v2("/a", "1000\n", 900, 700)],
        MemoryGroup(1000, 200),
    ),
    "v2, limit of a parent": (
        [
            {"proc/self/cgroup": "0::/a/b/c\n"},
            group_v2("/a", "2000\n", 100),
            group_v2("/a/b", "max\n", 1),
            group_v2("/a/b/c", "max\n", 1),
        ],
        MemoryGroup(2000, 100),
    ),
    "v2, the parent is fuller": (
        [{"proc/self/cgroup": "0::/a/b\n"}, group_v2("/a", "2000\n", 1900), group_v2("/a/b", "1000\n", 10)],
        MemoryGroup(2000, 1900),
    ),
    "v2, in a container": ([{"proc/self/cgroup": "0::/\n"}, group_v2("", "4000\n", 1)], MemoryGroup(4000, 1)),
    "v2, a path outside the namespace": (
        [{"proc/self/cgroup": "0::/../../x\n"}, group_v2("", "4000\n", 1)],
        MemoryGroup(4000, 1),
    ),
    "v1, no limit": (
        [
            {"proc/self/cgroup": "4:memory:/a\n", "proc/self/mountinfo": V1.format(root="/")},
            group_v1("/a", NO_LIMIT_V1, 5),
        ],
        None,
    ),
    "v1, limit of a parent": (
        [
            {"proc/self/cgroup": "5:cpu,cpuacct:/a/b\n4:memory:/a/b\n", "proc/self/mountinfo": V1.format(root="/")},
            group_v1("/a", "3000\n", 1500, 500),
            group_v1("/a/b", NO_LIMIT_V1, 5),
            group_v1("", NO_LIMIT_V1, 5),
        ],
        MemoryGroup(3000, 1000),
    ),
    "v1, in a container": (
        [
            {"proc/self/cgroup": "4:memory:/docker/1f\n", "proc/self/mountinfo": V1.format(root="/docker/1f")},
            group_v1("", "7000\n", 1),
        ],
        MemoryGroup(7000, 1),
    ),
    "both, as systems in transition have": (
        [
            {
                "proc/self/cgroup": "4:memory:/a\n0::/z\n",
                "proc/self/mountinfo": V1.format(root="/") + V2.replace("cgroup rw", "cgroup/unified rw"),
            },
            group_v1("/a", "500\n", 1),
        ],
        MemoryGroup(500, 1),
    ),
    "above the limit": ([{"proc/self/cgroup": "0::/a\n"}, group_v2("/a", "1000\n", 1200)], MemoryGroup(1000, 1200)),
    "unreadable numbers": ([{"proc/self/cgroup": "0::/a\n"}, group_v2("/a", "lots\n", 1)], None),
    "no cgroup at all": ([{"proc/self/cgroup": "", "proc/self/mountinfo": ""}], None),
}


@pytest.mark.parametrize(("trees", "group"), CGROUPS.values(), ids=CGROUPS.keys())
def test_the_group_that_leaves_the_least_room(tmp_path: Path, trees: list[Tree], group: MemoryGroup | None) -> None:
    root = build(tmp_path, HOST, *trees)
    assert tightest_memory_group(root) == group
    memory = read_memory(root)
    assert memory.cgroup_limit_bytes == (group.limit_bytes if group else None)
    assert memory.usable_bytes == (max(0, group.limit_bytes - group.used_bytes) if group else 32768000 * 1024)


QUOTAS: dict[str, tuple[list[Tree], float | None, int]] = {
    "none": ([], None, 8),
    "v2": ([{"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}], 2.5, 2),
    "v2, max": ([{"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}], None, 8),
    "v2, a parent's": (
        [
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            }
        ],
        3.0,
        3,
    ),
    "half a CPU is one core": ([{"sys/fs/cgroup/cpu.max": "50000 100000\n"}], 0.5, 1),
    "more than there are": ([{"sys/fs/cgroup/cpu.max": "9900000 100000\n"}], 99.0, 8),
    "v1": (
        [
            {"proc/self/cgroup": "5:cpu,cpuacct:/a\n", "proc/self/mountinfo": V1.format(root="/")},
            {
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
        ],
        4.0,
        4,
    ),
    "v1, none": (
        [
            {"proc/self/cgroup": "5:cpu,cpuacct:/a\n", "proc/self/mountinfo": V1.format(root="/")},
            {
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
        ],
        None,
        8,
    ),
}


@pytest.mark.parametrize(("trees", "quota", "cores"), QUOTAS.values(), ids=QUOTAS.keys())
def test_the_cores_that_a_quota_leaves(tmp_path: Path, trees: list[Tree], quota: float | None, cores: int) -> None:
    root = build(tmp_path, HOST, *trees)
    assert cpu_quota(root) == quota
    assert read_cpu(root, "x86_64").cores == cores


def test_the_cache_folder_need_not_exist(tmp_path: Path) -> None:
    disk = read_disk(tmp_path / "a" / "b")
    assert disk.path == str(tmp_path / "a" / "b")
    assert disk.writable
    assert 0 < disk.free_bytes <= disk.total_bytes
    assert not (tmp_path / "a").exists()  # looking leaves nothing behind


def test_a_file_in_the_place_of_the_cache_folder_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    assert not read_disk(tmp_path / "a" / "b").writable
    assert not read_disk(tmp_path / "a").writable


def test_a_system_folder_that_refuses_writing_is_not_writable() -> None:
    assert not read_disk(Path("/proc/slimserve")).writable or os.access("/proc", os.W_OK)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_not_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert not read_disk(tmp_path / "a").writable


def test_a_link_that_leads_nowhere_is_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / "gone")
    with pytest.raises(Refused, match="cannot look at the cache folder"):
        read_disk(tmp_path / "cache" / "slimserve")


def test_the_machine_in_front_of_us(tmp_path: Path) -> None:
    machine = read_machine(tmp_path, os.environ)
    assert machine.source == "this machine"
    assert machine.system == "Linux"
    assert machine.cpu.cores <= len(os.sched_getaffinity(0))
    assert machine.memory.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.memory.usable_bytes > GIB // 64
    assert machine.disk.writable
    if not any(name.startswith("nvidia") for name in os.listdir("/dev")):
        assert machine.gpus == ()


def test_a_port_that_is_taken_here_is_listed(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert taken.getsockname()[1] in read_machine(tmp_path, os.environ).listening_ports
