"""What can go wrong while the driver is asked, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from slimserve.machine import GpuProblem
from slimserve.probe.text import printable

LOOK = "run nvidia-smi, and look for NVRM and Xid lines in dmesg"
HALF_WHY = "what that call would have told is left unknown here, and nothing is assumed in its place"
HALF_DO = f"{LOOK}; a driver that answers by halves is often mended by a restart"

# By the library's error code.
_REMEDIES = {
    4: "let this user open /dev/nvidiactl and /dev/nvidia*: their group, or the container's device list",
    9: "load the driver (modprobe nvidia), and look in dmesg for why it did not load",
    12: "install the driver's library libnvidia-ml.so.1; in a container, start it with the NVIDIA runtime",
    18: "restart the machine: the driver was updated, and the old one is still in the kernel",
}


class Problem(NamedTuple):
    """One problem; a `Machine` holds all of them as one `GpuProblem`."""

    what: str
    why: str
    do: str


def combine(problems: Sequence[Problem]) -> GpuProblem | None:
    """All problems as one, each sentence once; None when there are none."""
    if not problems:
        return None
    what, why, do = ("; ".join(dict.fromkeys(column)) for column in zip(*problems, strict=True))
    return GpuProblem(what=_short(what), why=_short(why), do=_short(do))


def group_failures(failures: Iterable[dict[str, Any]]) -> list[str]:
    """One sentence for each call and error, with the GPUs that it failed on."""
    groups: dict[tuple[str, str], list[int]] = {}
    for failure in failures:
        gpus = groups.setdefault((failure["call"], failure["error"]), [])
        if failure["gpu"] is not None and failure["gpu"] not in gpus:
            gpus.append(failure["gpu"])
    return [
        f"{call} failed{' on GPU ' + ', '.join(map(str, gpus)) if gpus else ''}: {error}"
        for (call, error), gpus in groups.items()
    ]


def init_remedy(code: int | None) -> str:
    """What to do when the library as a whole refuses."""
    return _REMEDIES.get(code or 0, LOOK)


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= 4000 else text[:3997] + "..."
