"""The engines that slimserve itself runs for this user, and those that it lost."""

from __future__ import annotations

from pathlib import Path

from slimserve.machine import Engine


def read_engines(runs_folder: Path) -> tuple[Engine, ...]:
    """Engines that serve, and engines whose supervisors are dead.

    Args:
        runs_folder: holds one folder for each run; it need not exist.
    """
    from slimserve.engine import endpoints, record

    found = []
    for endpoint in endpoints.living(runs_folder):
        start = record.read(Path(endpoint.log).parent / record.FILE_NAME)
        pids = tuple(process.pid for process in start.members()) if start else ()
        found.append(Engine(profile=endpoint.profile, port=endpoint.port, lost=False, pids=(endpoint.pid, *pids)))
    for left in record.leftovers(runs_folder):
        pids = tuple(process.pid for process in left.processes)
        found.append(Engine(profile=left.record.profile_id, port=left.record.port, lost=True, pids=pids))
    return tuple(found)
