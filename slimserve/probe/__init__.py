"""Look at the machine in front of us: /proc, /sys, the file system and the GPU driver.

`slimserve.probe.nvml` runs as a process of its own; so that it starts at once, nothing is imported here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slimserve.machine import Folder, Machine


def read_machine(cache_folder: Path, environ: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """The machine that this process runs on.

    Args:
        cache_folder: where weights will lie; it need not exist.
        environ: the environment that an engine would be started with.
        root: folder that stands for `/`.

    Returns:
        The facts. What the GPU driver does not tell is None or "unknown", and `gpu_problem` says so.

    Raises:
        Refused: when the host's own facts cannot be read, or contradict each other.
    """
    import os

    from slimserve.errors import Finding, Refused
    from slimserve.machine import Machine
    from slimserve.probe import host, nccl
    from slimserve.probe.gpus import read_gpus
    from slimserve.probe.limits import read_limits

    kernel = os.uname()
    gpus = read_gpus(root, environ)
    try:
        return Machine(
            source="this machine",
            system=kernel.sysname,
            cpu=host.read_cpu(root, kernel.machine),
            memory=host.read_memory(root),
            disk=host.read_disk(cache_folder),
            driver=gpus.driver,
            gpus=gpus.gpus,
            hidden_gpus=gpus.hidden_gpus,
            gpu_problem=gpus.gpu_problem,
            listening_ports=host.read_listening_ports(root),
            kernel_parameters=host.read_kernel_parameters(root),
            driver_module=host.read_driver_module(root),
            limits=read_limits(root),
            folders=_folders(environ),
            nccl=nccl.read_settings(root, environ, nccl.account_home()),
        )
    except ValueError as error:
        raise Refused(
            Finding(
                f"what the system says about this machine contradicts itself: {error}",
                "a plan on numbers that cannot be true would be a guess",
                "describe the machine in a file and pass --machine FILE",
            )
        ) from None


def _folders(environ: Mapping[str, str]) -> tuple[Folder, ...]:
    """What a launch writes to beside the cache."""
    from slimserve import paths
    from slimserve.errors import UsageError
    from slimserve.probe.host import read_folder

    found = [read_folder("sockets and files of the engine's start", "TMPDIR", Path(environ.get("TMPDIR") or "/tmp"))]
    with contextlib.suppress(UsageError):  # without a home folder there is none; a launch says so itself
        found.insert(0, read_folder("logs and start records", "SLIMSERVE_STATE", paths.state_folder(environ)))
    return tuple(found)
