"""Questions that are asked until an answer comes, in threads of their own, and the wait for whichever end is first."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Literal, Protocol, TypeVar

from slimserve.engine.control import Control, Line, is_our_own
from slimserve.engine.descriptors import Handle, wait_readable
from slimserve.engine.process import EngineProcess
from slimserve.engine.stop_signals import Counter, Stopped

POLL_SECONDS = 0.05
WATCH_SECONDS = 1.0
# An engine that was asleep as we were gets so long to wake.
LEAST_SECONDS = 5.0

T = TypeVar("T")


class Peers(Handle, Protocol):
    """The other nodes of an endpoint; `fileno()` is readable while `check` has something to say."""

    def check(self) -> None:
        """Raise what ends the wait, if there is something."""


def until_healthy(control: Control, look: Callable[[], None], cancelled: threading.Event) -> bool:
    """Ask `/health` until it answers 200; False when it was cancelled first.

    Args:
        look: called before each question; what it raises ends the wait.
    """
    while True:
        look()
        if control.is_healthy():
            return True
        if cancelled.wait(POLL_SECONDS):
            return False


def until_token(control: Control, model: str, seconds: float, cancelled: threading.Event) -> bool:
    """Ask for one token until it comes; False when it was cancelled first.

    An answer without a token, and an error of the server (5xx), are asked again.

    Args:
        model: the name that the engine serves the model under.
        seconds: how long one answer may take.

    Raises:
        Unanswerable: the request itself is wrong.
    """
    while not control.gives_token(model, seconds):
        if cancelled.wait(POLL_SECONDS):
            return False
    return True


def until_idle(control: Control, cancelled: threading.Event) -> bool:
    """Ask the door until no sequence is in flight; False when it was cancelled first."""
    while not cancelled.is_set():
        try:
            if control.door().in_flight == 0:
                return True
        except OSError:
            pass  # as long as it lives it may still be sending; the deadline is the caller's
        cancelled.wait(POLL_SECONDS)
    return False


def until_frozen(
    control: Control,
    seconds: float,
    report: Callable[[str], None],
    cancelled: threading.Event,
    pause: float = WATCH_SECONDS,
    least: float = LEAST_SECONDS,
) -> str:
    """Watch the door until the engine is frozen: it lives and does nothing.

    What keeps us from asking is not held against it, nor is time in which we slept ourselves: a pause of the whole
    machine is over for the engine when it is over for us, and then it has at least `least` to show that.

    Args:
        seconds: how long work may be under way without a step, and how long the door may keep silent.
        report: told once when the engine cannot be asked.
        pause: seconds between two looks.
        least: seconds that one question gets, and that a stall is looked at.

    Returns:
        How that shows; empty when it was cancelled first.
    """
    silent, failures, looks, told = 0.0, 0, 0, False
    with contextlib.closing(Line(control)) as line:
        while not cancelled.is_set():
            given = max(least, seconds - silent)
            try:
                door = line.door(given)
            except OSError as error:
                if is_our_own(error):
                    if not told:
                        report(f"the engine cannot be watched: {error}; it goes on unwatched until it can be")
                    told = True
                else:
                    failures += 1
                    silent += given if isinstance(error, TimeoutError) else pause
                    if failures >= 2 and silent >= seconds:
                        return f"its API server has not answered for {silent:g} s"
            else:
                silent, failures, told = 0.0, 0, False
                looks = looks + 1 if door.stalled_seconds > seconds else 0
                if looks >= 2 and (looks - 1) * pause >= least:
                    return (
                        f"{door.in_flight} sequences are under way, "
                        f"and for {door.stalled_seconds:.0f} s there was no step"
                    )
            cancelled.wait(pause)
    return ""


class Question(Generic[T]):
    """A call in a thread of its own; its end can be waited for beside other things. Use it inside `with`.

    Args:
        call: is given an event, and returns soon after that is set.
        leave_seconds: how long the end of the block waits for the call to return.
    """

    def __init__(self, call: Callable[[threading.Event], T], leave_seconds: float = 0.0) -> None:
        self._call = call
        self._leave_seconds = leave_seconds
        self.result: T | None = None  # of the call, once it has returned
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC)
        # A daemon: one that waits for an answer ends with the engine's socket, and must not keep us until then.
        self._thread = threading.Thread(target=self._run, daemon=True, name="slimserve-question")

    def __enter__(self) -> Question[T]:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._cancelled.set()
        self._thread.join(self._leave_seconds)
        os.close(self._reader)

    def _run(self) -> None:
        try:
            self.result = self._call(self._cancelled)
        except BaseException as error:  # handed to whoever waits
            self._error = error
        finally:
            os.close(self._writer)

    def fileno(self) -> int:
        """A descriptor that becomes readable when the call is over, to wait for."""
        return self._reader

    def is_over(self) -> bool:
        """Whether the call has returned; raises what it raised."""
        if not wait_readable([self._reader], 0):
            return False
        if self._error is not None:
            raise self._error
        return True


def wait(
    question: Question[Any] | None,
    process: EngineProcess | None,
    signals: Counter | None,
    seconds: float | None,
    peers: Peers | None = None,
) -> Literal["answered", "died", "late"]:
    """Wait for the first of: a signal, word of other nodes, the engine's death, the answer, the deadline.

    What is None never comes.

    Raises:
        Stopped: a signal came.
        BaseException: whatever the question's call raised, or the look at the peers.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    handles = [handle for handle in (process, question, signals, peers) if handle is not None]
    while True:
        if signals is not None and signals.pending:
            raise Stopped
        if peers is not None:
            peers.check()
        if process is not None and process.status() is not None:
            return "died"
        if question is not None and question.is_over():
            return "answered"
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return "late"
        wait_readable([*handles, *(process.workers.handles if process is not None else ())], left)
        if process is not None:
            process.workers.look(process.leader_lives())
