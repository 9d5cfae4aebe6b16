"""The endpoint's life: takes the port, has an engine ready behind it, starts that anew when it fails, drains, ends it.

    with Supervisor(launch, report) as supervisor:     # for a client of its own: ready until the end of the block
        ...
    Supervisor(launch, report).run()                   # in the foreground, until a signal

One listening socket serves from the first moment to the last. While an engine is ready, that accepts on it; at all
other times the front does, and answers 503 with the reason. Ready means that a real token came back, not that a port
is open. Each state has a deadline of its own, because the causes of being late differ.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from slimserve.engine import descriptors, stop_signals, waiting
from slimserve.engine.attempt import Attempt, Launch
from slimserve.engine.control import Control
from slimserve.engine.fetching import fetch
from slimserve.engine.place import Place
from slimserve.engine.record import RunFolder
from slimserve.engine.state import Board, Crash, State, Status
from slimserve.engine.stop_signals import Stopped
from slimserve.errors import Failed, Finding, SlimserveError
from slimserve.operator.source import Source
from slimserve.weights.meter import Tick

if TYPE_CHECKING:
    from slimserve.nodes.head import Head

# Waits before the starts that follow the first and the second crash in a row; the one after ends in `failed`.
BACKOFF_SECONDS = (0.0, 1.0)
# An engine that has served for so long has not crashed "in a row".
STEADY_SECONDS = 600.0
# How long a failed endpoint stays to say why.
HOLD_SECONDS = 600.0
# Until a load and a warm-up have been measured, each is taken to last this share of its deadline: deadlines leave room
# for slow machines, and who asks a few times in vain is served sooner than who was told to wait out the deadline.
USUAL_SHARE = 0.1

__all__ = ["Launch", "Supervisor"]


class Supervisor:
    """One endpoint's life, from the main thread.

    Args:
        launch: what to start.
        report: called with one line for each thing worth telling.
        prepare: makes the weights complete; called in a thread beside, with what it tells its progress.
        nodes: the other nodes of the endpoint; None: there are none.
    """

    def __init__(
        self,
        launch: Launch,
        report: Callable[[str], None],
        prepare: Callable[[Tick], None] | None = None,
        nodes: Head | None = None,
    ) -> None:
        self._nodes = nodes
        self._launch, self._report, self._prepare = launch, report, prepare
        self._folder = RunFolder(launch.run_folder, launch.control)
        seconds = {State.LOADING: launch.load_seconds, State.WARMING: launch.warmup_seconds}
        self.board = Board(self._write_status, {state: USUAL_SHARE * most for state, most in seconds.items()})
        self._page: tuple[Source, int | None] | None = None
        self._signals: stop_signals.Counter | None = None
        self._place: Place | None = None
        self._attempt: Attempt | None = None

    @property
    def base_url(self) -> str:
        """The endpoint for clients, such as `http://127.0.0.1:8000/v1`."""
        return self._launch.url

    @property
    def log_path(self) -> Path:
        """Where the engine's output goes."""
        return self._folder.log_path

    @property
    def control(self) -> Control:
        """The engine's private socket, for whoever looks after this endpoint; nobody is there before it is ready."""
        return Control(self._folder.control)

    def show(self, source: Source, port: int | None) -> None:
        """Have an operator page, from the moment on in which the port is taken.

        Args:
            source: what it shows.
            port: TCP port on loopback; None: 8001 when that is free, else any.
        """
        self._page = source, port

    def __enter__(self) -> Supervisor:
        """Take the port, have the weights, start the engine and wait until it is ready."""
        try:
            self._begin()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def run(self) -> int:
        """Serve until SIGTERM, SIGINT or SIGHUP; then drain and stop. A second signal stops without grace.

        Another node that is told to stop asks for the end as a signal does. It is no second one, nor is the first
        signal after it: who ends all nodes tells each of them.

        Returns:
            0 when it was stopped while ready; 1 otherwise, during a restart too: somebody was not served.

        Raises:
            Refused: something stands in the way; nothing was started.
            Failed: the engine did not become ready, or crashed too often; nothing of it is left.
        """
        with stop_signals.Counter() as self._signals:
            try:
                self._serve(*self._begin())
            except Stopped:
                status = self._end_as_told(self._signals)
                if self._nodes is not None:
                    self._nodes.leave(None, status)
                return status
            except SlimserveError as error:
                if self._nodes is not None:
                    self._nodes.leave(error, error.exit_code)
                raise
            finally:
                self._close()

    def check(self) -> None:
        """Look whether the engine lives.

        Raises:
            Failed: it died; its exit status in words and the tail of its log are in it.
        """
        if self._attempt is not None:
            self._attempt.check()

    def memory_bytes(self) -> int | None:
        """Proportional set size of the engine's processes, in bytes; None while there is none."""
        return None if self._attempt is None else self._attempt.memory_bytes()

    def _begin(self) -> tuple[Place, Attempt]:
        """Take what only one can have, answer from then on, have the weights, and an engine that is ready.

        Raises:
            Refused: something stands in the way; nothing was started.
            Failed: the weights did not come, or the engine did not become ready. It is not stopped yet.
        """
        descriptors.raise_limit()
        self._place = place = Place(self._launch, self._folder, self.board, self._page, self._report)
        self.board.move(State.STARTING, "the port is taken")
        self._report(f"log {self.log_path}")
        if self._nodes is not None:
            self._nodes.open()
            self._nodes.gather(self._signals, self.board.amend)
        if self._prepare is not None:
            fetch(self._prepare, self.board, self._signals, self._nodes)
        return place, self._start(place)

    def _start(self, place: Place) -> Attempt:
        """Start the engine, see it ready, and hand the door over to it.

        Raises:
            Refused: its command cannot be run.
            Failed: it died, refused the question, or missed a deadline. What is left of it is not stopped yet.
        """
        if self._signals is not None and self._signals.pending:
            raise Stopped
        if self._nodes is not None:
            self._nodes.gather(self._signals, self.board.amend)
            self._nodes.idle(self._signals, self.board.amend)
            self._nodes.start()
        with stop_signals.deferred():
            args = (self._launch, place.listening, self._folder, self.board, self._report, self._signals, self._nodes)
            self._attempt = attempt = Attempt(*args)
        attempt.wait_ready(None if self._nodes is None else self._nodes.passed)
        # From here to the engine's first `accept` clients wait in the kernel, for a moment.
        place.front.pause()
        try:
            attempt.control.accept()
        except OSError as error:
            attempt.check()
            raise Failed(
                Finding(
                    f"the engine does not take the door over: {error}",
                    "a ready engine serves the public socket itself",
                    f"see the log: {self.log_path}",
                )
            ) from error
        self.board.move(State.READY, f"ready after {attempt.seconds:.1f} s")
        self._report(f"ready {self.base_url} after {attempt.seconds:.1f} s")
        if self._nodes is not None:
            self._nodes.ready()
        return attempt

    def _serve(self, place: Place, attempt: Attempt) -> NoReturn:
        """Stay by the engine, and start it anew when it fails.

        Raises:
            Stopped: a signal came.
            Failed: it crashed too often.
        """
        crashes = 0
        while True:
            begun = time.monotonic()
            try:
                attempt.watch()
            except (SlimserveError, OSError) as error:
                crash = _crash(error)
            if time.monotonic() - begun >= STEADY_SECONDS:
                crashes = 0
            while True:
                crashes += 1
                self._clear_away(place, crash, crashes)
                try:
                    attempt = self._start(place)
                    break
                except (SlimserveError, OSError) as error:
                    crash = _crash(error)

    def _clear_away(self, place: Place, crash: SlimserveError, crashes: int) -> None:
        """Answer at once in the dead engine's place, end what is left of it, and wait for the time to start it anew.

        Raises:
            Failed: that was one crash too many.
            Stopped: a signal came.
        """
        first = crash.findings[0]
        reason = f"{first.what}; that was the crash number {crashes} in a row"
        words = self._attempt.last_words if self._attempt is not None else ()
        end = Crash(time.time(), first.what, first.why.partition("\n")[0], words, str(self.log_path))
        backoff = BACKOFF_SECONDS[crashes - 1] if crashes <= len(BACKOFF_SECONDS) else None
        if self._nodes is not None:
            self._nodes.halt(reason)
        if self._attempt is not None:
            self._attempt.kill_leader()
        self.board.move(State.RESTARTING, reason, deadline_seconds=backoff, crash=end)
        place.front.accept()
        for finding in crash.findings:
            self._report(str(finding))
        try:
            self._stop()
        except Failed as also:  # what does not die holds the memory that the next one would need
            self._hold(also.findings[0].what, Failed(*crash.findings, *also.findings))
        if backoff is None:
            self._hold(reason, Failed(*crash.findings))
        self._report(f"restarting in {backoff:g} s")
        waiting.wait(None, None, self._signals, backoff, self._nodes)

    def _hold(self, reason: str, failed: Failed) -> NoReturn:
        """Stay for a while to say why the endpoint failed, then fail."""
        self.board.move(State.FAILED, reason, deadline_seconds=HOLD_SECONDS)
        self._report(f"failed; the reason is answered for {HOLD_SECONDS:g} s more, or until a signal")
        with contextlib.suppress(Stopped):
            waiting.wait(None, None, self._signals, HOLD_SECONDS, self._nodes)
        raise failed

    def _end_as_told(self, signals: stop_signals.Counter) -> int:
        if self._nodes is not None:
            self._nodes.heed()
        place, attempt = self._place, self._attempt
        if place is None or attempt is None or self.board.status.state is not State.READY:
            self._report("told to stop before it was ready")
            return 1
        signals.heed()  # when another node asked for the end, ours is still to come
        seconds = self._launch.drain_seconds
        self.board.move(State.DRAINING, "told to stop; what runs may finish", deadline_seconds=seconds)
        self._report(f"draining (at most {seconds:g} s)")
        try:
            attempt.control.drain()
            place.front.accept()
            complete = attempt.drain()
            self._report("every answer is complete" if complete else "answers that still ran are cut off")
        except OSError as error:
            self._report(f"the engine does not drain: {error}")
        except Stopped:
            self._report("told again: stopping now")
        return 0

    def _stop(self) -> None:
        if self._attempt is not None:
            self._attempt.stop()
            self._attempt = None

    def _close(self) -> None:
        """End the engine, the front and the page, and let go of the port."""
        try:
            self._stop()
        finally:
            if self._nodes is not None:
                self._nodes.close()
            self.board.move(State.STOPPED, "told to stop")
            place, self._place = self._place, None
            if place is not None:
                place.close()

    def _write_status(self, status: Status) -> None:
        if self._place is not None:  # before and after, the run has no folder
            self._place.write(status)


def _crash(error: SlimserveError | OSError) -> SlimserveError:
    """What ended an engine, or kept the next from starting, as something to be told and not to fail of."""
    if isinstance(error, SlimserveError):
        return error
    return Failed(
        Finding(
            f"the engine cannot be looked after: {error}",
            "the system refuses what that takes, such as a descriptor, memory or a file",
            "see what this machine is short of; `slimserve --doctor` looks at it",
        )
    )
