"""Who died first: real processes, one the parent of the other, as an API server and its core are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import until

from slimserve.engine import procfs
from slimserve.engine.process import EngineProcess
from slimserve.engine.workers import Death, Workers, first

KILLED = -signal.SIGKILL
TIED = "import ctypes, time; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); print(flush=True); time.sleep(600)"
# SYS_exit ends the first thread alone: that is how a program looks while it is being killed, for as long as we like.
EXIT_THREAD = f"ctypes.CDLL(None).syscall({60 if os.uname().machine == 'x86_64' else 93}, 0)"
PARENT = f"""
import ctypes, subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-S", "-c", {TIED!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
order = sys.stdin.readline()
if order == "die\\n":
    threading.Thread(target=sys.stdin.read).start()
    {EXIT_THREAD}
if order == "fetch\\n":
    print(child.wait(), flush=True)
sys.stdin.read()
"""


@contextmanager
def pair(order: str) -> Iterator[tuple[subprocess.Popen[str], procfs.Process, Workers]]:
    """A parent that has its order, its child, and the watch over the child."""
    argv = [sys.executable, "-S", "-c", PARENT]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = procfs.read(int(parent.stdout.readline()))
        assert child is not None
        workers = Workers([child])
        try:
            parent.stdin.write(order)
            parent.stdin.flush()
            yield parent, child, workers
        finally:
            workers.close()
            parent.kill()


def test_a_core_that_dies_with_its_parent_s_first_thread_is_not_taken_for_the_first() -> None:
    with pair("die\n") as (parent, child, workers):
        until(lambda: not procfs.lives(child.pid, child.start_ticks))
        assert parent.poll() is None  # there is nothing to wait for yet, and it is dying all the same
        workers.look(leader_lives=False)
        assert workers.fallen == ""
        leader = Death(parent.pid, os.getpid(), "the API server", KILLED)
        assert workers.with_leader(leader) == (
            f"its process {parent.pid} (the API server) died first: signal 9 (SIGKILL)"
        )
        # Nothing tells a server that exits by itself from one that exits since its core is dead.
        told = workers.with_leader(Death(parent.pid, os.getpid(), "the API server", 1))
        assert told.startswith("which of its processes died first is not known; dead are process ")
        assert "(the API server): exit status 1, process " in told


def test_a_leader_whose_first_thread_is_dead_does_not_live_though_it_cannot_be_waited_for(tmp_path: Path) -> None:
    code = f"import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); {EXIT_THREAD}"
    process = EngineProcess([sys.executable, "-S", "-c", code], {}, tmp_path / "log")
    try:
        until(lambda: not process.leader_lives())
        assert process.status() is None
    finally:
        process.kill_leader()
        assert process.kill() == []
    assert process.status() is not None


def test_the_signal_of_a_core_is_seen_after_its_parent_has_fetched_it() -> None:
    with pair("fetch\n") as (parent, child, workers):
        assert parent.stdout is not None
        os.kill(child.pid, signal.SIGKILL)
        assert parent.stdout.readline() == "-9\n"
        workers.look(leader_lives=True)
        name = f"its process {child.pid} ({child.name}) died first"
        assert workers.fallen.startswith(name)
        if workers.status is None:
            assert workers.fallen == name
            pytest.skip("this kernel tells nothing of a process that its parent has fetched: that came with 6.15")
        assert workers.fallen == f"{name}: signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    ("core", "worker", "expected"),
    [
        (KILLED, KILLED, "its process 2 (core) died first: signal 9 (SIGKILL)"),
        (KILLED, None, "its process 2 (core) died first: signal 9 (SIGKILL)"),
        (1, KILLED, "which of its processes died first is not known; dead are process 2 (core): exit status 1, "),
        (KILLED, -11, "which of its processes died first is not known; dead are process 2 (core): signal 9 (SIGKILL)"),
        (None, None, "which of its processes died first is not known; dead are process 2 (core), process 3 (worker)"),
    ],
)
def test_of_those_found_dead_at_once_one_is_named_only_where_that_is_certain(
    core: int | None, worker: int | None, expected: str
) -> None:
    told, status = first([Death(2, 1, "core", core), Death(3, 2, "worker", worker)])
    assert told.startswith(expected)
    assert (status is None) == told.startswith("which")


def test_a_core_that_ended_in_order_was_told_to() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as core:
        process = procfs.read(core.pid)
        assert process is not None
        workers = Workers([process])
        assert core.stdin is not None
        core.stdin.write(b"\n")
        core.stdin.close()
        until(lambda: not procfs.lives(core.pid, process.start_ticks))
        workers.look(leader_lives=True)
        assert workers.fallen == ""
        assert workers.with_leader(Death(1, 0, "the API server", -15)).endswith("died first: signal 15 (SIGTERM)")
