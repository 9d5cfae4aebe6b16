"""The state before the engine: weights come in a thread beside, are told of, and are given up when they stop coming."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from slimserve.engine import waiting
from slimserve.engine.state import Board, State
from slimserve.engine.stop_signals import Counter
from slimserve.errors import Failed, Finding
from slimserve.weights.meter import Tick

# Weights of which not a byte arrived, or was verified, for so long do not come any more.
FETCH_SECONDS = 300.0
TOLD_SECONDS = 1.0
# What the thread gets to leave in order, once nobody waits for it.
LEAVE_SECONDS = 2.0


class Cancelled(BaseException):
    """Raised out of the tick when nobody waits any more; no handler of a fetch's own errors should take it."""


def fetch(
    prepare: Callable[[Tick], None], board: Board, signals: Counter | None, peers: waiting.Peers | None = None
) -> None:
    """Call `prepare` and wait for its end; the board says how far it has come.

    Raises:
        Failed: nothing has moved for too long.
        Stopped: a signal came.
        BaseException: whatever `prepare` raised, or the look at the peers.
    """
    board.move(State.FETCHING, "the weights are checked", deadline_seconds=FETCH_SECONDS)
    moved = told = time.monotonic()

    def call(cancelled: threading.Event) -> None:
        def tick(done: int, total: int, name: str) -> None:
            nonlocal moved, told
            if cancelled.is_set():
                raise Cancelled
            moved = time.monotonic()
            if moved - told >= TOLD_SECONDS:
                told = moved
                share = done / total if total else 1.0
                board.amend(f"{name}: {share:.0%} of {total / 1e6:.1f} MB" if total else name)

        prepare(tick)

    with waiting.Question(call, LEAVE_SECONDS) as question:
        while waiting.wait(question, None, signals, TOLD_SECONDS, peers) != "answered":
            if time.monotonic() - moved > FETCH_SECONDS:
                raise Failed(
                    Finding(
                        f"the weights have not come any further for {FETCH_SECONDS:g} s",
                        f"the last that was heard: {board.status.reason}",
                        "see that the network and the disk answer; --fetch goes on where this one stopped",
                    )
                )
