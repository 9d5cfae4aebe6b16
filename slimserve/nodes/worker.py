"""The life of a node without an endpoint: joins node 0, has its weights, runs its part of the engine as it is told.

It decides nothing by itself but two things: an engine whose node 0 is gone is ended at once, and a node that is told to
stop asks node 0, so that what runs may finish first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from slimserve.engine import descriptors, endpoints, procfs, stop_signals, waiting
from slimserve.engine.attempt import Launch
from slimserve.engine.endpoints import Endpoint
from slimserve.engine.fetching import fetch
from slimserve.engine.record import RunFolder
from slimserve.engine.state import Board, Crash, State, Status
from slimserve.engine.stop_signals import Stopped
from slimserve.errors import Failed, Finding, Refused, SlimserveError
from slimserve.exposure import Reach
from slimserve.nodes.agreement import Claim
from slimserve.nodes.head import JOIN_SECONDS, LEAVE_SECONDS, short
from slimserve.nodes.headless import HeadlessAttempt
from slimserve.nodes.orders import Halted, Left, Lost, Order, Orders, Started, Welcomed, connect
from slimserve.nodes.seat import Seat
from slimserve.nodes.wire import Link
from slimserve.weights.meter import Tick

# What node 0 gets beyond the time to drain, until a node that asked for the end ends by itself.
PATIENCE_SECONDS = 30.0

T = TypeVar("T", bound=Order)


@dataclass
class Worker:
    """One node's life, from the main thread.

    Args:
        seat: which node it is.
        launch: what is started here.
        claim: what this node says of itself.
        secret: of the nodes.
        report: called with one line for each thing worth telling.
        prepare: makes the weights complete; called in a thread beside, with what it tells its progress.
    """

    seat: Seat
    launch: Launch
    claim: Claim
    secret: bytes = field(repr=False)
    report: Callable[[str], None]
    prepare: Callable[[Tick], None]

    def __post_init__(self) -> None:
        self._folder = RunFolder(self.launch.run_folder, self.launch.control)
        self.board = Board(self._write_status)
        self._own, self._boot = procfs.own(), procfs.boot()
        self._asked = False

    def run(self) -> int:
        """Take part until node 0 says that it is over, or a signal does and node 0 has had its time to drain.

        Returns:
            0 when all was stopped while ready; 1 otherwise.

        Raises:
            Refused: something stands in the way, here or between the nodes.
            Failed: it broke, here or on another node, too often; nothing of this node's engine is left.
        """
        descriptors.raise_limit()
        with stop_signals.Counter() as self._signals, contextlib.ExitStack() as undo:
            self._folder.end_leftovers(self.report)
            self._folder.prepare()
            undo.callback(self._folder.close)
            undo.callback(endpoints.remove, self._folder.path)
            self.board.move(State.STARTING, "node 0 is looked for", deadline_seconds=JOIN_SECONDS)
            self.report(f"log {self._folder.log_path}")
            try:
                while True:
                    try:
                        self._take_part()
                    except Lost as lost:
                        self._lost(str(lost))
            except Left as left:
                return self._left(left)
            except Order as order:
                what = f"node 0 said {type(order).__name__.lower()} out of turn"
                do = "install one version of slimserve on all nodes"
                raise Failed(Finding(what, "orders come in one sequence", do)) from None
            except Stopped:
                self.report("stopped without node 0")
                return 1

    def _take_part(self) -> None:
        """One link to node 0, from its first moment to its last.

        Raises:
            Left, Lost: it is over.
            Stopped: a signal came, and nobody is there to be asked.
            Refused: node 0 was not there in time.
        """
        orders = Orders(self._connect(), lambda: f"is {self.board.status.state}", self._ready)
        try:
            self.report(f"is {self.seat}")
            self.board.move(State.STARTING, "waits until all are there and agree", deadline_seconds=JOIN_SECONDS)
            self._wait_for(orders, Welcomed)
            try:
                fetch(self.prepare, self.board, self._signals, orders)
            except SlimserveError as error:
                self._tell_failure(orders, error, 0)
                waiting.wait(None, None, self._signals, LEAVE_SECONDS, orders)  # node 0 tells what it makes of that
                raise
            except Stopped:
                self._ask_for_end(orders)
                self._wait_for(orders, Started)  # it does not come: node 0 ends all
            while True:
                self.board.move(State.STARTING, "waits until all nodes have their weights")
                orders.say({"is": "idle"})
                self._run(orders, self._wait_for(orders, Started).round)
        finally:
            orders.close()

    def _connect(self) -> Link:
        """Reach node 0.

        Raises:
            Refused: it was not there in time.
            Stopped: a signal came.
        """
        said: list[str] = []

        def tell(line: str) -> None:
            said[:] = [line]
            self.report(line)
            self.board.amend(line)

        call = partial(connect, self.seat, self.claim, self.secret, tell)
        with waiting.Question[Link](call, leave_seconds=0.5) as question:
            if waiting.wait(question, None, self._signals, JOIN_SECONDS) == "answered" and question.result is not None:
                return question.result
        why = said[0] if said else "nobody answers"
        do = f"start node 0 with --node 0 --head {self.seat.head}, and see that port {self.seat.port} can be reached"
        raise Refused(Finding(f"node 0 was not reached within {JOIN_SECONDS:g} s", why, do))

    def _wait_for(self, orders: Orders, kind: type[T]) -> T:
        """Wait for an order of one kind. A halt is passed over: nothing runs.

        Raises:
            Left, Lost: it is over.
            Stopped: a second signal came, or node 0 did not end what it was asked to.
        """
        while True:
            try:
                self._patiently(lambda seconds: waiting.wait(None, None, self._signals, seconds, orders))
            except kind as order:
                return order
            except Halted:
                pass
            except Stopped:
                self._ask_for_end(orders)

    def _patiently(self, wait: Callable[[float | None], object]) -> None:
        """Wait, but once the end was asked for no longer than that takes."""
        if not self._asked:
            wait(None)
            return
        wait(max(0.0, self._patience - time.monotonic()))
        if time.monotonic() >= self._patience:
            self.report("node 0 has not ended it: stopping now")
            raise Stopped

    def _run(self, orders: Orders, round_: int) -> None:
        """One start of the engine, to its end.

        Raises:
            Left, Lost, Stopped: as `_wait_for`.
        """
        attempt = None
        try:
            with stop_signals.deferred():
                args = (self.launch, None, self._folder, self.board, self.report, self._signals, orders)
                attempt = HeadlessAttempt(*args)
            try:
                self._load(attempt, orders, round_)
            except Stopped:
                self._ask_for_end(orders)
            while True:
                try:
                    self._patiently(attempt.stay)
                except Stopped:
                    self._ask_for_end(orders)
        except Halted as order:
            self.report(f"node 0: {order}")
            self.board.move(State.RESTARTING, str(order) or "node 0 says so")
        except SlimserveError as error:
            words = attempt.last_words if attempt is not None else ()
            self._failed(orders, error, words, round_)
        finally:
            if attempt is not None:
                attempt.stop()

    def _load(self, attempt: HeadlessAttempt, orders: Orders, round_: int) -> None:
        digest = attempt.wait_passed()
        self.board.move(State.WARMING, "waits for node 0 to be ready")
        orders.say({"is": "passed", "round": round_, "gate": digest})

    def _ready(self) -> None:
        self.board.move(State.READY, "computes for the endpoint of node 0")
        self.report("ready: computes for the endpoint of node 0")

    def _failed(self, orders: Orders, error: SlimserveError, words: tuple[str, ...], round_: int) -> None:
        first = error.findings[0]
        crash = Crash(time.time(), first.what, first.why.partition("\n")[0], words, str(self._folder.log_path))
        self.board.move(State.RESTARTING, first.what, crash=crash)
        for finding in error.findings:
            self.report(str(finding))
        self._tell_failure(orders, error, round_)

    def _tell_failure(self, orders: Orders, error: SlimserveError, round_: int) -> None:
        refused = isinstance(error, Refused)
        orders.say({"is": "failed", "round": round_, "refused": refused, "findings": short(error)})

    def _ask_for_end(self, orders: Orders) -> None:
        """Have node 0 drain and end all; a second signal ends this node without it."""
        if self._asked:
            raise Stopped
        self._signals.heed()
        self._asked = True
        seconds = self.launch.drain_seconds + self.launch.stop_seconds + PATIENCE_SECONDS
        self._patience = time.monotonic() + seconds
        self.board.move(State.DRAINING, "told to stop; node 0 lets finish what runs", deadline_seconds=seconds)
        self.report("asks node 0 to drain and to end all nodes")
        orders.say({"ask": "stop"})

    def _lost(self, reason: str) -> None:
        if self._asked:
            raise Stopped
        what = f"the link to node 0 is lost: {reason}"
        crash = Crash(time.time(), what, "node 0 runs what all depends on", (), str(self._folder.log_path))
        self.report(f"{what}; its engine is ended, and node 0 looked for again")
        self.board.move(State.RESTARTING, what, deadline_seconds=JOIN_SECONDS, crash=crash)

    def _left(self, left: Left) -> int:
        self.board.move(State.STOPPED, "node 0 has ended all")
        if left.findings:
            raise (Refused if left.status == Refused.exit_code else Failed)(*left.findings)
        self.report("node 0 has ended all" if left.status == 0 else "node 0 has ended all before it was ready")
        return left.status

    def _write_status(self, status: Status) -> None:
        """Tell other programs where this node stands."""
        endpoint = Endpoint(
            profile=self.launch.profile_id,
            pid=self._own.pid,
            start_ticks=self._own.start_ticks,
            boot=self._boot,
            port=0,
            url="",
            reach=Reach(host="", port=0, has_keys=True, keys_file=None, origins=()),
            page=None,
            control=str(self.launch.control),
            log=str(self._folder.log_path),
            status=status,
            node=str(self.seat),
        )
        with contextlib.suppress(OSError):  # a full disk is no reason to stop computing
            endpoints.write(self._folder.path, endpoint)
