"""One start of an engine that has no endpoint: it computes for that of node 0."""

from __future__ import annotations

import threading
from functools import partial

from slimserve.engine.attempt import Attempt
from slimserve.engine.gate.words import Words
from slimserve.engine.state import State

_LOOK_SECONDS = 0.2


class HeadlessAttempt(Attempt):
    """An `Attempt` without a listening socket, and with nothing to ask but its processes and their words."""

    def wait_passed(self) -> str:
        """Wait until the gate has passed each of this node's processes.

        Returns:
            The hash of what they resolved.

        Raises:
            Refused: one is not what was planned. It is not stopped yet.
            Failed: the engine died, or missed the deadline. It is not stopped yet.
            Stopped, Order: a signal came, or node 0 wants something else.
        """
        seconds = self._launch.load_seconds
        self._board.move(State.LOADING, "the engine loads its part of the model", deadline_seconds=seconds)
        self._report(f"loading (at most {seconds:g} s)")
        if not self._ask(partial(_until_given, self._gate), seconds):
            self._fail(
                f"this node's engine did not load within {seconds:g} s",
                f"`serve.load_seconds` ended before the gate had the word of {', '.join(self._gate.missing())}",
                "see the log; raise `serve.load_seconds` when the machine is slow and the log shows progress",
            )
        digest = self._gate.close()
        self._report(f"gate: {len(self._launch.processes)} processes are as planned, configuration {digest[:12]}")
        self._ready = True
        self._process.watch_workers()
        return digest

    def stay(self, seconds: float | None) -> None:
        """Stay by the engine while it lives, at most `seconds`; whether it is frozen shows at the door of node 0.

        Raises:
            Failed: it died. What is left of it is not stopped yet.
            Stopped, Order: a signal came, or node 0 wants something else.
        """
        self._ask(_until_cancelled, seconds)


def _until_given(gate: Words, cancelled: threading.Event) -> bool:
    while True:
        gate.check()
        if not gate.missing():
            return True
        if cancelled.wait(_LOOK_SECONDS):
            return False


def _until_cancelled(cancelled: threading.Event) -> None:
    cancelled.wait()
