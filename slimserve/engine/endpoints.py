"""What each supervisor tells the other programs of its user: one file in its run's folder, written at each change."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from slimserve.engine import procfs
from slimserve.engine.record import Pid, Ticks, read_fields, write_fields
from slimserve.engine.state import Status
from slimserve.exposure import Reach
from slimserve.shapes import Between, ShapeError, build, plain

FILE_NAME = "status.json"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One endpoint, as its supervisor describes it.

    Args:
        profile: what it serves.
        pid, start_ticks, boot: the supervisor, named for good.
        port: the public TCP port; 0: a node that has none.
        url: where clients of this machine reach it.
        reach: where it listens, and for whom.
        page: the operator page; None: there is none.
        control: the engine's unix socket.
        log: the engine's log.
        status: where it stands.
        node: which node of several it is, in words; empty: it is the only one.
    """

    profile: str
    pid: Pid
    start_ticks: Ticks
    boot: str
    port: Annotated[int, Between(0, 65535)]
    url: str
    reach: Reach
    page: str | None
    control: str
    log: str
    status: Status
    node: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether its supervisor lives."""
        return self.boot == procfs.boot() and procfs.lives(self.pid, self.start_ticks)


def write(run_folder: Path, endpoint: Endpoint) -> None:
    """Say where the endpoint stands, whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    write_fields(run_folder / FILE_NAME, plain(endpoint))


def remove(run_folder: Path) -> None:
    """The endpoint is no more."""
    with contextlib.suppress(OSError):
        (run_folder / FILE_NAME).unlink()


def living(runs_folder: Path) -> list[Endpoint]:
    """The endpoints under `runs_folder` whose supervisors live; what the dead have left of theirs is removed."""
    found = []
    for path in sorted(runs_folder.glob(f"*/{FILE_NAME}")):
        fields = read_fields(path)
        try:
            endpoint = build(Endpoint, fields)
        except ShapeError:  # another version's
            continue
        if endpoint.is_alive:
            found.append(endpoint)
        else:
            path.unlink(missing_ok=True)
    return found
