"""Machines of every kind, for property tests."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from slimserve.machine import (
    Cpu,
    Disk,
    Engine,
    Folder,
    Gpu,
    GpuProblem,
    GpuProcess,
    HugePages,
    Limits,
    Machine,
    Memory,
    NcclSetting,
    Throttle,
)

texts = st.text(min_size=1, max_size=20).map(lambda t: "".join(c for c in t if c.isprintable())).filter(bool) | (
    st.sampled_from(
        ["no", "1e5", "0x1F", "22:22", "~", "null", "- a", "a: b", "#x", "'", '"', "\\", " x ", "1.0", "&a", "*a"]
    )
)
sizes = st.integers(0, 1 << 50)
pairs = st.tuples(sizes, sizes).map(sorted)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    indices = draw(st.lists(st.integers(0, 64), unique=True, max_size=4))
    gpus = []
    for index in indices:
        free, total = draw(pairs)
        others = [other for other in indices if other != index]
        processes = st.builds(GpuProcess, pid=st.integers(0, 99999), name=st.none() | texts, used_bytes=st.just(free))
        gpus.append(
            Gpu(
                index=index,
                name=draw(texts),
                uuid=f"GPU-{index}-{draw(texts)}",
                capability=f"{draw(st.integers(1, 20))}.{draw(st.integers(0, 9))}",
                memory_bytes=total + 1,
                free_bytes=free,
                mig=draw(st.sampled_from(["off", "on", "instance", "unknown"])),
                bar1_bytes=draw(st.none() | st.integers(1, 1 << 40)),
                pcie_width=draw(st.none() | st.sampled_from([1, 4, 16])),
                pcie_generation=draw(st.none() | st.integers(1, 6)),
                pcie_generation_now=draw(st.none() | st.integers(1, 6)),
                pcie_generation_card=draw(st.none() | st.integers(1, 6)),
                pcie_width_max=draw(st.none() | st.sampled_from([4, 16])),
                iommu=draw(st.sampled_from(["off", "passthrough", "translated", "unknown"])),
                acs=draw(st.sampled_from(["off", "redirecting", "unknown"])),
                persistence=draw(st.none() | st.booleans()),
                clock_mhz=draw(st.none() | st.integers(0, 3000)),
                clock_max_mhz=draw(st.none() | st.integers(0, 3000)),
                throttled_by=draw(st.none() | st.lists(st.sampled_from(get_args(Throttle)), max_size=3).map(tuple)),
                numa_node=draw(st.none() | st.integers(0, 7)),
                processes=tuple(draw(st.lists(processes, max_size=2))),
                peers={other: draw(st.sampled_from(["nvlink", "p2p", "none", "unknown"])) for other in others},
            )
        )
    nodes = st.none() | st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)
    folders = st.builds(
        Folder, purpose=texts, path=texts, variable=texts, writable=st.booleans(), free_bytes=st.integers(0, 9)
    )
    names = st.sampled_from(["NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_ALGO", "NCCL_ELSE"])
    values = st.sampled_from(["", "0", "1", "LOC", "NVL", "SYS", "LL128", "^LL128"]) | texts
    settings = st.builds(NcclSetting, name=names, value=values, source=texts)
    engines = st.builds(
        Engine, profile=texts, port=st.integers(0, 65535), lost=st.booleans(), pids=st.tuples(st.integers(1, 99999))
    )
    huge_free, huge_all = draw(pairs)
    transparent = draw(st.sampled_from(["always", "madvise", "never", "unknown"]))
    pages = HugePages(reserved_bytes=huge_all, free_bytes=huge_free, transparent=transparent)
    (available, total), (shm_free, shm_total), (free, disk) = draw(pairs), draw(pairs), draw(pairs)
    limit = draw(st.none() | sizes)
    return Machine(
        system=draw(texts),
        cpu=Cpu(
            name=draw(st.none() | texts),
            architecture="x86_64",
            cores=draw(st.integers(1, 512)),
            flags=("avx2",),
            own_nodes=draw(nodes),
        ),
        memory=Memory(
            total_bytes=total + 1,
            available_bytes=available,
            cgroup_limit_bytes=limit,
            cgroup_used_bytes=None if limit is None else draw(sizes),
            memlock_bytes=draw(st.none() | sizes),
            shm_total_bytes=shm_total,
            shm_free_bytes=shm_free,
            own_nodes=draw(nodes),
            huge_pages=draw(st.none() | st.just(pages)),
        ),
        disk=Disk(
            path=draw(texts),
            free_bytes=free,
            total_bytes=disk,
            writable=draw(st.booleans()),
            executable=draw(st.none() | st.booleans()),
        ),
        driver=draw(st.none() | texts),
        gpus=tuple(gpus),
        hidden_gpus=draw(st.integers(0, 8)),
        gpu_problem=draw(st.none() | st.builds(GpuProblem, what=texts, why=texts, do=texts)),
        listening_ports=tuple(draw(st.lists(st.integers(1, 65535), max_size=3))),
        kernel_parameters=draw(st.none() | texts),
        driver_module=draw(st.sampled_from(["open", "proprietary", "unknown"])),
        limits=draw(st.none() | st.builds(Limits, open_files=st.none() | sizes, tasks=st.none() | sizes)),
        folders=tuple(draw(st.lists(folders, max_size=2))),
        nccl=tuple(draw(st.lists(settings, max_size=3))),
        engines=tuple(draw(st.lists(engines, max_size=2))),
    )
