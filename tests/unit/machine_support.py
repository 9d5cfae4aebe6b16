"""Machines of every kind, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from slimserve.machine import Cpu, Disk, Gpu, GpuProblem, GpuProcess, Machine, Memory

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
                numa_node=draw(st.none() | st.integers(0, 7)),
                processes=tuple(draw(st.lists(processes, max_size=2))),
                peers={other: draw(st.sampled_from(["nvlink", "p2p", "none", "unknown"])) for other in others},
            )
        )
    (available, total), (shm_free, shm_total), (free, disk) = draw(pairs), draw(pairs), draw(pairs)
    limit = draw(st.none() | sizes)
    return Machine(
        system=draw(texts),
        cpu=Cpu(name=draw(st.none() | texts), architecture="x86_64", cores=draw(st.integers(1, 512)), flags=("avx2",)),
        memory=Memory(
            total_bytes=total + 1,
            available_bytes=available,
            cgroup_limit_bytes=limit,
            cgroup_used_bytes=None if limit is None else draw(sizes),
            memlock_bytes=draw(st.none() | sizes),
            shm_total_bytes=shm_total,
            shm_free_bytes=shm_free,
        ),
        disk=Disk(path=draw(texts), free_bytes=free, total_bytes=disk, writable=draw(st.booleans())),
        driver=draw(st.none() | texts),
        gpus=tuple(gpus),
        hidden_gpus=draw(st.integers(0, 8)),
        gpu_problem=draw(st.none() | st.builds(GpuProblem, what=texts, why=texts, do=texts)),
        listening_ports=tuple(draw(st.lists(st.integers(1, 65535), max_size=3))),
        kernel_parameters=draw(st.none() | texts),
    )
