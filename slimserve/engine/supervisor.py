"""Starts one engine, sees it ready, stays by it, and leaves no process of it behind.

    with Supervisor(launch, report) as supervisor:     # a client of its own: start, wait_ready, stop
        ...
    Supervisor(launch, report).run()                   # in the foreground, until a signal or the engine's end

Ready means that a real token came back, not that a port is open. Two deadlines, because the causes differ: loading
ends when `/health` answers, warming when the first token is there.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from slimserve.engine import ending, ports, probe, procfs, stop_signals
from slimserve.engine.launch import PARENT
from slimserve.engine.process import EngineProcess
from slimserve.engine.record import RunFolder, StartRecord, leftovers, without_secrets
from slimserve.errors import Failed, Finding, Refused

# The engine does not listen to SIGTERM in some parts of its load, so a wait for it is mostly in vain.
UNREADY_STOP_SECONDS = 2.0

__all__ = ["Launch", "Supervisor", "leftovers"]


@dataclass(frozen=True)
class Launch:
    """What is started, and how long it may take.

    Args:
        argv: the command; no secret in it, since every user of the machine can read it.
        env: the engine's environment; the supervisor adds its own pid and the engine's tag.
        host, port: where the command makes the engine listen.
        model_name: the name in the request that proves readiness.
        api_key: what a client must show, or None.
        run_folder: of this run alone: log and start record. Its parent holds the runs.
        load_seconds: deadline from the start until `/health` answers (`serve.load_seconds`).
        warmup_seconds: deadline from there until the first token (`serve.warmup_seconds`).
        stop_seconds: how long the engine may take to stop by itself once it is ready (`serve.stop_seconds`); before
            that, when nobody has a request in it, it gets 2 s at most.
        profile_id: the profile, for the start record.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    host: str
    port: int
    model_name: str
    api_key: str | None = field(repr=False)
    run_folder: Path
    load_seconds: float
    warmup_seconds: float
    stop_seconds: float
    profile_id: str = ""


class _Stopped(Exception):
    """A signal asked for the end."""


class Supervisor:
    """One engine's life, from the main thread.

    Args:
        launch: what to start.
        report: called with one line for each thing worth telling.
    """

    def __init__(self, launch: Launch, report: Callable[[str], None]) -> None:
        self._launch = launch
        self._report = report
        self._address = probe.Address(launch.host, launch.port)
        self._process: EngineProcess | None = None
        self._folder = RunFolder(launch.run_folder)
        self._oom_before: dict[str, int] = {}
        self._started = 0.0
        self._ready = False
        self._signals: stop_signals.Counter | None = None

    @property
    def base_url(self) -> str:
        """The endpoint for clients, such as `http://127.0.0.1:8000/v1`."""
        return self._address.base_url

    @property
    def log_path(self) -> Path:
        """Where the engine's output goes."""
        return self._folder.log_path

    def __enter__(self) -> Supervisor:
        """Start the engine and wait until it is ready."""
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def run(self) -> int:
        """Start, wait, and stop at SIGTERM, SIGINT or SIGHUP; a second signal stops the engine without grace.

        Returns:
            0 when it was stopped while serving, 1 when before it was ready.

        Raises:
            Refused: something stands in the way; nothing was started.
            Failed: the engine died, or missed a deadline; nothing of it is left.
        """
        with stop_signals.Counter() as self._signals:
            try:
                self.start()
                self.wait_ready()
                self._wait(None, None)
            except _Stopped:
                if not self._ready:
                    self._report("told to stop before it was ready")
            finally:
                self.stop()
        self._signals = None
        return 0 if self._ready else 1

    def require_place(self) -> None:
        """Check what can be checked before the engine, and before the weights that it needs: `start` does it again.

        Raises:
            Refused: an engine without a supervisor is in the way, or the port, or the run folder.
        """
        self._folder.refuse_leftovers()
        ports.require_free(self._launch.host, self._launch.port)
        self._folder.prepare()

    def start(self) -> None:
        """Check what can be checked, then start the engine; returns at once.

        Raises:
            Refused: an engine without a supervisor is in the way, or the port, or the run folder; nothing was started.
        """
        launch = self._launch
        if self._process is not None:
            raise RuntimeError("this supervisor has started its engine already")
        self.require_place()
        tag = secrets.token_hex(16)
        env = {**launch.env, PARENT: str(os.getpid()), procfs.TAG: tag}
        self._oom_before = ending.oom_counters()
        self._report(f"log {self.log_path}")
        self._check_signals()
        with stop_signals.deferred():  # until the engine is known to us, there is nobody to stop it
            self._started = time.monotonic()
            try:
                self._process = EngineProcess(launch.argv, env, self.log_path)
            except OSError as error:
                raise Refused(
                    Finding(
                        f"cannot start the engine: {error}",
                        f"its command begins with {launch.argv[0]}",
                        "see that the environment holds the engine; `make serve` sets one up",
                    )
                ) from error
            try:
                self._write_record(self._process, tag)
            except BaseException:
                self.stop()
                raise

    def wait_ready(self) -> None:
        """Wait until the engine has answered with a token.

        Raises:
            Failed: it died, refused the question, or missed a deadline. It is stopped then.
        """
        launch, address = self._launch, self._address
        self._report(f"loading (at most {launch.load_seconds:g} s)")
        if not self._wait(lambda cancelled: probe.until_healthy(address, cancelled), launch.load_seconds):
            self._fail(
                f"the engine did not load within {launch.load_seconds:g} s",
                "`serve.load_seconds` of the profile ended before /health answered 200",
                "see the log; raise `serve.load_seconds` when the machine is slow and the log shows progress",
            )
        self._report(f"warming after {self._elapsed():.1f} s (at most {launch.warmup_seconds:g} s)")
        question = (address, launch.model_name, launch.api_key, launch.warmup_seconds)
        try:
            answered = self._wait(lambda cancelled: probe.until_token(*question, cancelled), launch.warmup_seconds)
        except probe.Unanswerable as error:
            (said,) = without_secrets([str(error)], [launch.api_key or ""])
            self._fail(
                f"the engine refuses a one-token completion: {said}",
                f"it is ready when it has answered one for the model {launch.model_name!r}",
                "see that the served model name and the key are those of this launch",
            )
        if not answered:
            self._fail(
                f"the engine gave no token within {launch.warmup_seconds:g} s of loading",
                "`serve.warmup_seconds` of the profile ended before a one-token completion came back",
                "see the log; raise `serve.warmup_seconds` when the machine is slow and the log shows progress",
            )
        self._ready = True
        self._report(f"ready {self.base_url} after {self._elapsed():.1f} s")

    def check(self) -> None:
        """Look whether the engine lives.

        Raises:
            Failed: it died; its exit status in words and the tail of its log are in it.
        """
        status = self._process.status() if self._process is not None else None
        if self._process is not None and status is not None:
            self._fail_dead(self._process, status)

    def stop(self) -> None:
        """Stop the engine and everything that it started. May be called at any time, and again.

        Raises:
            Failed: a process did not die of SIGKILL.
        """
        process = self._process
        if process is None:
            return
        begun = time.monotonic()
        grace = self._launch.stop_seconds if self._ready else min(self._launch.stop_seconds, UNREADY_STOP_SECONDS)
        if process.status() is None:
            self._report(f"stopping (at most {grace:g} s)")
        left = process.stop(grace, lambda: self._signals is not None and self._signals.count >= 2)
        if left:
            names = ", ".join(f"{one.pid} ({one.name})" for one in left)
            raise Failed(
                Finding(
                    f"processes of the engine do not die: {names}",
                    "SIGKILL waits while a process sleeps in the kernel, as a rule in a driver",
                    "wait, then look at `ps`; a driver that never wakes needs a restart of the machine",
                )
            )
        self._process = None
        self._folder.remove_record()
        self._report(f"stopped after {time.monotonic() - begun:.1f} s")

    def _wait(self, call: Callable[[threading.Event], None] | None, seconds: float | None) -> bool:
        """Wait until `call`, which runs in a thread beside, has returned; without one, for ever.

        Returns:
            True when it has, False when `seconds` are over.

        Raises:
            _Stopped: a signal came.
            Failed: the engine died.
            Unanswerable: from the call.
        """
        process = self._process
        if process is None:
            raise RuntimeError("the engine has not been started")
        deadline = None if seconds is None else time.monotonic() + seconds
        with ExitStack() as stack:
            question = None if call is None else stack.enter_context(probe.Question(call))
            handles = [handle for handle in (process, question, self._signals) if handle is not None]
            while True:
                self._check_signals()
                status = process.status()
                if status is not None:
                    self._fail_dead(process, status)
                if question is not None and question.is_over():
                    return True
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                select.select(handles, [], [], left)

    def _check_signals(self) -> None:
        if self._signals is not None and self._signals.count:
            raise _Stopped

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _write_record(self, process: EngineProcess, tag: str) -> None:
        launch = self._launch
        leader, own = procfs.read(process.pid), procfs.read(os.getpid())
        if leader is None or own is None:
            raise RuntimeError("/proc does not show this process and its child")
        self._folder.write(
            StartRecord(
                profile_id=launch.profile_id,
                port=launch.port,
                pid=process.pid,
                start_ticks=leader.start_ticks,
                tag=tag,
                supervisor_pid=own.pid,
                supervisor_start_ticks=own.start_ticks,
                argv=without_secrets(launch.argv, [launch.api_key or ""]),
            )
        )

    def _fail(self, what: str, why: str, do: str) -> NoReturn:
        """Stop the engine and raise Failed with the tail of its log."""
        failed = Failed(Finding(what, why + self._log_tail(self._process), do))
        try:
            self.stop()
        except Failed as also:  # what does not die is told beside the reason, not instead of it
            raise Failed(*failed.findings, *also.findings) from None
        raise failed

    def _fail_dead(self, process: EngineProcess, status: int) -> NoReturn:
        verdict = ending.memory_verdict(status, self._oom_before, ending.oom_counters())
        do = "see the log"
        if "probably" in verdict or "struck" in verdict:
            do = "free memory, raise the memory limit of the container, or take a profile that needs less; see the log"
        self._fail(
            f"the engine ended by itself after {self._elapsed():.1f} s: {ending.status_in_words(status)}",
            verdict or "an engine ends when it is told to, and it was not",
            do,
        )

    def _log_tail(self, process: EngineProcess | None) -> str:
        lines = ending.tail(self.log_path, process.log_start if process else 0)
        lines = list(without_secrets(lines, [self._launch.api_key or ""]))
        head = f"\n  log: {self.log_path}"
        return head + "".join(f"\n    | {line}" for line in lines)
