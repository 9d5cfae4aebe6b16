"""The engine as a set of processes: started in a session of its own, watched, and ended to the last of them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slimserve.engine import log_file, procfs
from slimserve.engine.descriptors import wait_readable
from slimserve.engine.workers import Workers

# What dies of SIGKILL dies at once, unless it sleeps in a driver; after this we say so instead of waiting on.
KILL_SECONDS = 10.0


class EngineProcess:
    """A started engine: its leader and everything that the leader starts.

    Args:
        argv: the command.
        env: its whole environment; nothing is added. The value of SLIMSERVE_ENGINE_TAG in it is what finds a process
            that left the session.
        log_path: where stdout and stderr go, appended; made with mode 0600.
        pass_fds: descriptors that the leader inherits under their own numbers.

    Raises:
        RuntimeError: not called from the main thread. The kernel kills the engine when the thread that started it
            ends, so it has to be the one that lives as long as the process.
        OSError: the log cannot be opened, or the command cannot be run.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], log_path: Path, pass_fds: Sequence[int] = ()
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("an engine is started from the main thread")
        log = log_file.open_to_append(log_path)
        try:
            os.fchmod(log, 0o600)
            self.log_start = os.fstat(log).st_size
            self._leader = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        finally:
            os.close(log)
        self.log_path = log_path
        self.pid = self._leader.pid
        self._tag = env.get(procfs.TAG, "")
        self._handle: int | None = os.pidfd_open(self.pid)
        self.workers = Workers(())

    def fileno(self) -> int:
        """A descriptor that becomes readable when the leader dies, to wait for.

        Raises:
            ValueError: the engine has been stopped.
        """
        if self._handle is None:
            raise ValueError("the engine has been stopped")
        return self._handle

    def watch_workers(self) -> None:
        """From now on note which of the processes that compute dies first."""
        self.workers.close()
        self.workers = Workers(self._computing())

    def status(self) -> int | None:
        """The leader's exit status, minus the signal's number when one ended it; None while it lives."""
        return self._leader.poll()

    def leader_lives(self) -> bool:
        """Whether the leader does, and nothing has ended it: its first thread dies before the last, and can be told.

        What the kernel kills because its parent dies goes with that first thread, so it may be dead before `status`
        has something to say.
        """
        return self.status() is None and procfs.exit_status(self.pid) is None

    def wait(self, seconds: float) -> int | None:
        """Wait at most `seconds` for the leader to end; returns its `status`."""
        if self._handle is not None:
            wait_readable([self._handle], max(0.0, seconds))
        return self.status()

    def survivors(self) -> list[procfs.Process]:
        """The processes of this engine that live: its session, and those elsewhere that carry its tag."""
        return procfs.members(self.pid, self._tag)

    def memory_bytes(self) -> int:
        """Of all its processes; what they share counts once."""
        return sum(procfs.proportional_bytes(one.pid) for one in self.survivors())

    def terminate(self) -> None:
        """Ask the leader, and it alone, to end (SIGTERM): it stops its own workers in order. None if it is dead."""
        self._leader.send_signal(signal.SIGTERM)

    def kill_leader(self) -> None:
        """SIGKILL the leader, and it alone: from then on nobody of this engine takes connections."""
        self._leader.kill()

    def kill(self) -> list[procfs.Process]:
        """SIGKILL every process and reap the leader; returns what lives all the same.

        One by one rather than the group in one call: the session holds the group and more, and multiprocessing's
        tracker, which is in the group, must live a moment longer to unlink the shared memory.
        """
        left = procfs.end(self.pid, self._tag, KILL_SECONDS)
        self.wait(KILL_SECONDS if not left else 0.0)
        self.workers.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        return left

    def _computing(self) -> list[procfs.Process]:
        """What computes: neither the leader, nor those that only clean up after it."""
        helpers = ("slimserve-guard", "multiprocessing.resource_tracker")
        return [
            one
            for one in self.survivors()
            if one.pid != self.pid and not any(word in one.name + procfs.command_line(one.pid) for word in helpers)
        ]

    def _workers(self) -> set[int]:
        return {one.pid for one in self._computing()}

    def stop(self, grace_seconds: float, hurried: Callable[[], bool] = lambda: False) -> list[procfs.Process]:
        """End the engine: SIGTERM to the leader, `grace_seconds` to follow it, SIGKILL to all that is left.

        May be called again, and when the leader is dead already.

        Args:
            grace_seconds: what the leader gets to stop its workers in order.
            hurried: asked every 50 ms; the grace ends when it says so.

        Returns:
            The processes that survived even SIGKILL; empty when all is well.
        """
        deadline = time.monotonic() + grace_seconds
        try:
            if self.status() is None and not hurried():
                workers = self._workers()
                self.terminate()
                while not hurried() and (left := deadline - time.monotonic()) > 0:
                    if self.wait(min(left, 0.05)) is not None:
                        break
                    if workers and not workers & self._workers():
                        break  # what computes is gone: the leader waits for clients to whom no token can come any more
        finally:  # an interruption of the grace is an order to hurry, not to leave the engine behind
            survivors = self.kill()
        return survivors
