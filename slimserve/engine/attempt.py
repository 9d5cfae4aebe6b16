"""One start of the engine: from the fork to the last of its processes."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from slimserve import BUILD, exposure
from slimserve.admission.config import Config
from slimserve.engine import ending, ports, procfs, stop_signals, waiting
from slimserve.engine.control import Control, Unanswerable
from slimserve.engine.entry import PARENT, SUPERVISOR
from slimserve.engine.gate.words import Words
from slimserve.engine.process import EngineProcess
from slimserve.engine.record import RunFolder, StartRecord
from slimserve.engine.state import Board, State
from slimserve.engine.variables import ADMISSION_VARIABLE, SCRATCH_VARIABLE, WORDS_VARIABLE
from slimserve.engine.workers import Death
from slimserve.errors import Failed, Finding, Refused
from slimserve.exposure import Reach

# The engine does not listen to SIGTERM in some parts of its load, so a wait for it is mostly in vain.
UNREADY_STOP_SECONDS = 2.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is started, and how long it may take.

    Args:
        argv: the command; it makes the engine listen at `control`, and nowhere else.
        env: the engine's environment; each start adds the supervisor's pid and build, the engine's tag, its
            temporary folder and the door.
        admission: what the door is told; each start adds the listening socket.
        control: the engine's unix socket.
        host, port: the public address; empty and 0 for a node that has none.
        model_name: the name in the request that proves readiness.
        run_folder: of this run alone: log, start record, status. Its parent holds the runs.
        load_seconds: deadline from the start until `/health` answers (`serve.load_seconds`).
        warmup_seconds: deadline from there until the first token (`serve.warmup_seconds`).
        drain_seconds: how long running answers may go on after SIGTERM (`serve.drain_seconds`).
        stall_seconds: without a step, or an answer of the API server, for so long it is frozen (`serve.stall_seconds`).
        stop_seconds: how long the engine may take to stop by itself once it is ready (`serve.stop_seconds`); before
            that, when nobody has a request in it, it gets 2 s at most.
        profile_id: the profile, for the start record.
        processes: those of the engine that have to pass the gate; none for an engine that is not ours.
        node: which node of several this is, in words; empty: it is the only one.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    admission: Config = field(repr=False)
    control: Path
    host: str
    port: int
    model_name: str
    run_folder: Path
    load_seconds: float
    warmup_seconds: float
    drain_seconds: float
    stall_seconds: float
    stop_seconds: float
    profile_id: str
    processes: Sequence[str] = ()
    node: str = ""

    @property
    def url(self) -> str:
        """The endpoint for clients, such as `http://127.0.0.1:8000/v1`."""
        return ports.url(self.host, self.port)

    @property
    def reach(self) -> Reach:
        """Where it listens, and for whom."""
        return exposure.reach(self.host, self.port, self.admission)


class Attempt:
    """An engine that has been started. Make one with the stop signals deferred: until it is made, nobody can stop it.

    Args:
        launch: what to start.
        listening: the endpoint's socket, which the engine inherits; None: it has no endpoint.
        folder: of the run.
        board: told of the states on the way to ready.
        report: called with one line for each thing worth telling.
        signals: those that end a wait; None: Python's own KeyboardInterrupt does.
        peers: other nodes, whose word ends a wait too.

    Raises:
        Refused: the command cannot be run, or the run folder not be written; nothing was started.
    """

    def __init__(
        self,
        launch: Launch,
        listening: socket.socket | None,
        folder: RunFolder,
        board: Board,
        report: Callable[[str], None],
        signals: stop_signals.Counter | None,
        peers: waiting.Peers | None = None,
    ) -> None:
        self._launch, self._folder, self._board, self._report = launch, folder, board, report
        self._signals, self._peers = signals, peers
        self.control = Control(launch.control)
        self._ready = False
        self._gone = False
        self._oom_before = ending.oom_counters()
        folder.prepare()  # anew, since a tidy hand may have removed it while the engine before ran
        folder.clear()
        tag = secrets.token_hex(16)
        self._gate = Words(folder.path, launch.processes, tag)
        scratch = str(folder.make_scratch())
        env = {**launch.env, PARENT: str(os.getpid()), SUPERVISOR: BUILD, procfs.TAG: tag, SCRATCH_VARIABLE: scratch}
        inherited: tuple[int, ...] = ()
        if listening is not None:
            inherited = (listening.fileno(),)
            door = replace(launch.admission, control=str(launch.control), listen_fd=listening.fileno())
            env[ADMISSION_VARIABLE] = door.to_text()
        if launch.processes:
            env[WORDS_VARIABLE] = str(self._gate.folder)
        self._started = time.monotonic()
        try:
            self._gate.prepare()
            self._process = EngineProcess(launch.argv, env, folder.log_path, inherited)
        except OSError as error:
            raise Refused(
                Finding(
                    f"cannot start the engine: {error}",
                    f"its command begins with {launch.argv[0]}",
                    "see that the environment holds the engine; `make serve` sets one up",
                )
            ) from error
        try:
            self._write_record(tag, scratch)
        except BaseException:
            self.stop()
            raise

    def wait_ready(self, others: Callable[[threading.Event], bool] | None = None) -> None:
        """Wait until the engine has answered with a token.

        Args:
            others: waits until other nodes' parts have passed the gate too; None: there are none.

        Raises:
            Refused: it is not what was planned, or nobody looked whether it is. It is not stopped yet.
            Failed: it died, refused the question, or missed a deadline. It is not stopped yet.
            Stopped: a signal came.
        """
        launch = self._launch
        self._board.move(State.LOADING, "the engine loads the model", deadline_seconds=launch.load_seconds)
        self._report(f"loading (at most {launch.load_seconds:g} s)")
        if not self._ask(partial(waiting.until_healthy, self.control, self._gate.check), launch.load_seconds):
            self._fail(
                f"the engine did not load within {launch.load_seconds:g} s",
                "`serve.load_seconds` of the profile ended before /health answered 200",
                "see the log; raise `serve.load_seconds` when the machine is slow and the log shows progress",
            )
        if launch.processes:
            digest = self._gate.close()
            self._report(f"gate: {len(launch.processes)} processes are as planned, configuration {digest[:12]}")
            self._report(f"gate: {self._gate.tensors()} tensors of weights hold finite numbers alone")
        if others is not None:
            self._await(others)
        self._board.move(State.WARMING, "the first token is computed", deadline_seconds=launch.warmup_seconds)
        self._report(f"warming after {self.seconds:.1f} s (at most {launch.warmup_seconds:g} s)")
        question = partial(waiting.until_token, self.control, launch.model_name, launch.warmup_seconds)
        try:
            warm = self._ask(question, launch.warmup_seconds)
        except Unanswerable as error:
            self._fail(
                f"the engine refuses a one-token completion: {error}",
                f"it is ready when it has answered one for the model {launch.model_name!r}",
                "see that the served model name is that of this launch",
            )
        if not warm:
            self._fail(
                f"the engine gave no token within {launch.warmup_seconds:g} s of loading",
                "`serve.warmup_seconds` of the profile ended before a one-token completion came back",
                "see the log; raise `serve.warmup_seconds` when the machine is slow and the log shows progress",
            )
        self._ready = True
        self._process.watch_workers()

    def _await(self, others: Callable[[threading.Event], bool]) -> None:
        left = max(0.0, self._launch.load_seconds - self.seconds)
        if not self._ask(others, left):
            self._fail(
                f"not every node's gate had spoken within {self._launch.load_seconds:g} s",
                "what nobody has looked at may have resolved anything",
                "see what the other nodes say, and their logs",
            )

    def watch(self) -> NoReturn:
        """Stay by the engine for as long as it works.

        Raises:
            Failed: it died, or it is frozen. What is left of it is not stopped yet.
            Stopped: a signal came.
        """
        seconds = self._launch.stall_seconds
        frozen = self._ask(partial(waiting.until_frozen, self.control, seconds, self._report), None)
        self._fail(
            f"the engine is frozen: {frozen}",
            f"`serve.stall_seconds` of the profile allows {seconds:g} s",
            "see the log; raise `serve.stall_seconds` when steps of the engine really take that long",
        )

    def drain(self) -> bool:
        """Wait until no answer is under way, at most `drain_seconds`; returns whether that was reached.

        Raises:
            Failed: the engine died meanwhile.
            Stopped: another signal came.
        """
        return bool(self._ask(partial(waiting.until_idle, self.control), self._launch.drain_seconds))

    def memory_bytes(self) -> int:
        """Of the engine's processes, as `EngineProcess.memory_bytes`."""
        return self._process.memory_bytes()

    def check(self) -> None:
        """Look whether the engine lives.

        Raises:
            Failed: it died; its exit status in words and the tail of its log are in it.
        """
        self._process.workers.look(self._process.leader_lives())  # between two calls nobody did
        self._check_leader()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    @property
    def last_words(self) -> tuple[str, ...]:
        """What this start's log has to say about its end."""
        return ending.last_words(self._folder.log_path, self._process.log_start)

    def kill_leader(self) -> None:
        """SIGKILL the API server: from then on it takes no connection that others could answer."""
        if not self._gone:
            self._process.kill_leader()

    def stop(self) -> None:
        """Stop the engine and everything that it started. May be called at any time, and again.

        Raises:
            Failed: a process did not die of SIGKILL.
        """
        if self._gone:
            return
        begun = time.monotonic()
        grace = self._launch.stop_seconds if self._ready else min(self._launch.stop_seconds, UNREADY_STOP_SECONDS)
        if self._process.status() is None:
            self._report(f"stopping (at most {grace:g} s)")
        left = self._process.stop(grace, lambda: self._signals is not None and self._signals.count >= 2)
        if left:
            raise Failed(
                Finding(
                    f"processes of the engine do not die: {procfs.names(left)}",
                    "SIGKILL waits while a process sleeps in the kernel, as a rule in a driver",
                    "wait, then look at `ps`; a driver that never wakes needs a restart of the machine",
                )
            )
        self._gone = True
        self._folder.clear()
        self._report(f"stopped after {time.monotonic() - begun:.1f} s")

    def _ask(self, call: Callable[[threading.Event], T], seconds: float | None) -> T | None:
        """What `call` returns; None when that takes longer than `seconds`."""
        with waiting.Question(call) as question:
            if waiting.wait(question, self._process, self._signals, seconds, self._peers) == "died":
                self._check_leader()
            return question.result

    def _check_leader(self) -> None:
        status = self._process.status()
        if status is not None and not self._gone:
            self._fail_dead(status)

    def _write_record(self, tag: str, scratch: str) -> None:
        launch = self._launch
        leader, own = procfs.read(self._process.pid), procfs.own()
        if leader is None:
            raise RuntimeError("/proc does not show our child")
        self._folder.write(
            StartRecord(
                profile_id=launch.profile_id,
                port=launch.port,
                pid=leader.pid,
                start_ticks=leader.start_ticks,
                tag=tag,
                supervisor_pid=own.pid,
                supervisor_start_ticks=own.start_ticks,
                argv=launch.argv,
                scratch=scratch,
            )
        )

    def _fail(self, what: str, why: str, do: str) -> NoReturn:
        """Raise Failed with the tail of the engine's log."""
        words = "".join(f"\n    | {line}" for line in self.last_words)
        raise Failed(Finding(what, f"{why}\n  log: {self._folder.log_path}{words}", do))

    def _fail_dead(self, status: int) -> NoReturn:
        self._gate.check()  # one that was ended there says more than its exit status
        role = "the API server" if self._launch.port else "the main one"
        leader = Death(self._process.pid, os.getpid(), role, status)
        workers = self._process.workers
        cause = status if workers.status is None else workers.status
        verdict = ending.memory_verdict(cause, self._oom_before, ending.oom_counters())
        do = "see the log"
        if "probably" in verdict or "struck" in verdict:
            do = "free memory, raise the memory limit of the container, or take a profile that needs less; see the log"
        self._fail(
            f"the engine ended by itself after {self.seconds:.1f} s: {workers.with_leader(leader)}",
            verdict or "an engine ends when it is told to, and it was not",
            do,
        )
