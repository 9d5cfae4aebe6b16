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
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from slimserve.engine import endpoints, ports, stop_signals, waiting
from slimserve.engine.attempt import Attempt, Launch
from slimserve.engine.control import Control
from slimserve.engine.fetching import Progress, fetch
from slimserve.engine.page import Page
from slimserve.engine.record import RunFolder
from slimserve.engine.state import Board, State, Status
from slimserve.engine.stop_signals import Stopped
from slimserve.errors import Failed, Finding, SlimserveError

if TYPE_CHECKING:
    from slimserve.engine.front import Front

# Waits before the starts that follow the first and the second crash in a row; the one after ends in `failed`.
BACKOFF_SECONDS = (0.0, 1.0)
# An engine that has served for so long has not crashed "in a row".
STEADY_SECONDS = 600.0
# How long a failed endpoint stays to say why.
HOLD_SECONDS = 600.0

__all__ = ["Launch", "Supervisor"]


class Supervisor:
    """One endpoint's life, from the main thread.

    Args:
        launch: what to start.
        report: called with one line for each thing worth telling.
        prepare: makes the weights complete; called in a thread beside, with what it tells its progress.
        page: the operator page; None: there is none.
    """

    def __init__(
        self,
        launch: Launch,
        report: Callable[[str], None],
        prepare: Callable[[Progress], None] | None = None,
        page: Page | None = None,
    ) -> None:
        self._launch, self._report = launch, report
        self._prepare, self._page = prepare, page
        self._folder = RunFolder(launch.run_folder, launch.control)
        usual = {State.LOADING: launch.load_seconds / 10, State.WARMING: launch.warmup_seconds / 10}
        self.board = Board(self._write_status, usual)
        self._signals: stop_signals.Counter | None = None
        self._listening: socket.socket | None = None
        self._front: Front | None = None
        self._attempt: Attempt | None = None
        self._page_url: str | None = None
        self._write_failed = False

    @property
    def base_url(self) -> str:
        """The endpoint for clients, such as `http://127.0.0.1:8000/v1`."""
        return ports.url(self._launch.host, self._launch.port)

    @property
    def log_path(self) -> Path:
        """Where the engine's output goes."""
        return self._folder.log_path

    def __enter__(self) -> Supervisor:
        """Take the port, have the weights, start the engine and wait until it is ready."""
        try:
            self._open()
            self._fetch()
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def run(self) -> int:
        """Serve until SIGTERM, SIGINT or SIGHUP; then drain and stop. A second signal stops without grace.

        Returns:
            0 when it was stopped while ready, 1 otherwise.

        Raises:
            Refused: something stands in the way; nothing was started.
            Failed: the engine did not become ready, or crashed too often; nothing of it is left.
        """
        with stop_signals.Counter() as self._signals:
            try:
                self._open()
                self._fetch()
                self._start()
                self._serve()
            except Stopped:
                return self._end_as_told(self._signals)
            finally:
                self._close()

    def check(self) -> None:
        """Look whether the engine lives.

        Raises:
            Failed: it died; its exit status in words and the tail of its log are in it.
        """
        if self._attempt is not None:
            self._attempt.check()

    def _open(self) -> None:
        """Take what only one can have, and answer from then on.

        Raises:
            Refused: an engine without a supervisor is in the way, or the port, or the run folder; nothing was started.
        """
        from slimserve.engine.front import Front  # asyncio: 50 ms that a chat with a running endpoint need not pay

        launch = self._launch
        self._folder.end_leftovers(self._report)
        self._listening = ports.listen(launch.host, launch.port, endpoints.living(launch.run_folder.parent))
        self._folder.prepare()
        self._front = Front(self._listening, self.board)
        self._front.accept()
        if self._page is not None:
            listening = ports.listen_for_page(self._page.port)
            self._page_url = f"http://{ports.PAGE_HOST}:{listening.getsockname()[1]}/"
            app = self._page.app(self.board, Control(launch.control), self.base_url, self.log_path)
            self._front.serve(app, listening)
            self._report(f"page {self._page_url}")
        self.board.move(State.STARTING, "the port is taken")
        self._report(f"log {self.log_path}")

    def _fetch(self) -> None:
        if self._prepare is not None:
            fetch(self._prepare, self.board, self._signals)

    def _start(self) -> None:
        """Start the engine, see it ready, and hand the door over to it.

        Raises:
            Refused: its command cannot be run.
            Failed: it died, refused the question, or missed a deadline. What is left of it is not stopped yet.
        """
        assert self._listening is not None
        assert self._front is not None
        self._heed_signals()
        with stop_signals.deferred():
            args = (self._launch, self._listening, self._folder, self.board, self._report, self._signals)
            self._attempt = attempt = Attempt(*args)
        attempt.wait_ready()
        # From here to the engine's first `accept` clients wait in the kernel, for a moment.
        self._front.pause()
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

    def _serve(self) -> NoReturn:
        """Stay by the engine, and start it anew when it fails.

        Raises:
            Stopped: a signal came.
            Failed: it crashed too often.
        """
        crashes = 0
        while True:
            begun = time.monotonic()
            try:
                assert self._attempt is not None
                self._attempt.watch()
            except Failed as failed:
                crash: SlimserveError = failed
            if time.monotonic() - begun >= STEADY_SECONDS:
                crashes = 0
            while True:
                crashes += 1
                self._clear_away(crash, crashes)
                try:
                    self._start()
                    break
                except SlimserveError as failed:
                    crash = failed

    def _clear_away(self, crash: SlimserveError, crashes: int) -> None:
        """Answer at once in the dead engine's place, end what is left of it, and wait for the time to start it anew.

        Raises:
            Failed: that was one crash too many.
            Stopped: a signal came.
        """
        assert self._front is not None
        what = crash.findings[0].what
        words = self._attempt.last_words if self._attempt is not None else ()
        final = crashes > len(BACKOFF_SECONDS)
        backoff = 0.0 if final else BACKOFF_SECONDS[crashes - 1]
        state = State.FAILED if final else State.RESTARTING
        if self._attempt is not None:
            self._attempt.kill_leader()
        self.board.move(
            state,
            f"{what}; that was the crash number {crashes} in a row",
            deadline_seconds=HOLD_SECONDS if final else backoff,
            restarts=self.board.status.restarts + (not final),
            last_words=words,
        )
        self._front.accept()
        for finding in crash.findings:
            self._report(str(finding))
        try:
            self._stop()
        except Failed as also:  # what does not die holds the memory that the next one would need
            self._hold(Failed(*crash.findings, *also.findings))
        if final:
            self._hold(Failed(*crash.findings))
        self._report(f"restarting in {backoff:g} s")
        waiting.wait(None, None, self._signals, backoff)

    def _hold(self, failed: Failed) -> NoReturn:
        """Stay for a while to say why the endpoint failed, then fail."""
        status = self.board.status
        if status.state is not State.FAILED:
            reason, words = failed.findings[-1].what, status.last_words
            self.board.move(State.FAILED, reason, deadline_seconds=HOLD_SECONDS, last_words=words)
        self._report(f"failed; the reason is answered for {HOLD_SECONDS:g} s more, or until a signal")
        with contextlib.suppress(Stopped):
            waiting.wait(None, None, self._signals, HOLD_SECONDS)
        raise failed

    def _end_as_told(self, signals: stop_signals.Counter) -> int:
        if self.board.status.state is not State.READY:
            self._report("told to stop before it was ready")
            return 1
        signals.heed()
        assert self._front is not None
        assert self._attempt is not None
        seconds = self._launch.drain_seconds
        self.board.move(State.DRAINING, "told to stop; what runs may finish", deadline_seconds=seconds)
        self._report(f"draining (at most {seconds:g} s)")
        try:
            self._attempt.control.drain()
            self._front.accept()
            complete = self._attempt.drain()
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
            self.board.move(State.STOPPED, "told to stop")
            if self._front is not None:
                self._front.close()
                endpoints.remove(self._launch.run_folder)
                self._folder.close()
            if self._listening is not None:
                self._listening.close()
            self._front = self._listening = None

    def _heed_signals(self) -> None:
        if self._signals is not None and self._signals.pending:
            raise Stopped

    def _write_status(self, status: Status) -> None:
        if self._front is None:  # the run has no folder yet, or none any more
            return
        launch = self._launch
        facts = {"profile": launch.profile_id, "port": launch.port, "url": self.base_url, "page": self._page_url}
        facts |= {"control": str(launch.control), "log": str(self.log_path)}
        try:
            endpoints.write(launch.run_folder, facts, status)
        except OSError as error:  # a full disk is no reason to stop serving
            if not self._write_failed:
                self._report(f"the status cannot be written to {launch.run_folder}: {error.strerror}")
            self._write_failed = True
