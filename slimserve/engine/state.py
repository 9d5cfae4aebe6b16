"""Where an endpoint stands, for everybody who asks: the page, `--status`, the answers at the door, the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from slimserve.admission.replies import retry_seconds
from slimserve.shapes import Between
from slimserve.worded import Worded

# Least share of the usual way to ready, and least time, that a client is told to wait while the endpoint is not ready.
LEAST_SHARE = 0.1
LEAST_SECONDS = 2.0


class State(Worded):
    """The states of an endpoint, in the order in which a good life passes them; `text` says what happens there."""

    STARTING = "starting", "the place is checked, the port is taken"
    FETCHING = "fetching", "weights are downloaded or verified"
    LOADING = "loading", "the engine loads, until its `/health` answers"
    WARMING = "warming", "from there to the first token of a real completion"
    READY = "ready", "requests are answered by the engine"
    DRAINING = "draining", "told to stop: no new work, what runs may finish"
    RESTARTING = "restarting", "the engine crashed or froze; the next start is due"
    FAILED = "failed", "it crashed too often; the endpoint says so until it is stopped"
    STOPPED = "stopped", "nothing of it runs any more"

    @property
    def comes_back(self) -> bool:
        """Whether the endpoint is on its way to ready, or there, by itself."""
        return self not in (State.DRAINING, State.FAILED, State.STOPPED)


@dataclass(frozen=True, slots=True)
class Crash:
    """How an engine that was ready came to its end.

    Args:
        when: in seconds since the epoch.
        what, why: as the error says it.
        last_words: of its log: the first error, if there was one, and the end.
        log: the whole of it.
    """

    when: Annotated[float, Between(0, 1e12)]
    what: str
    why: str
    last_words: tuple[str, ...]
    log: str


@dataclass(frozen=True, slots=True)
class Status:
    """One moment of an endpoint.

    Args:
        state: where it stands.
        since: when it came there, in seconds since the epoch.
        reason: why, in one line.
        deadline_seconds: how long the state may last; None: for ever.
        restarts: starts of the engine after the first.
        crash: the last one; it stays to be read when the engine has long been ready again.
    """

    state: State
    since: Annotated[float, Between(0, 1e12)]
    reason: str
    deadline_seconds: float | None = None
    restarts: int = 0
    crash: Crash | None = None


def moment(seconds: float) -> str:
    """A time, given in seconds since the epoch, as people here read it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


class Board:
    """The current status, set by the supervisor's thread and read by any.

    Args:
        told: called with each new status, in the thread that set it.
        usual: how long states last as a rule, in seconds; each that is passed corrects its own.
    """

    def __init__(
        self, told: Callable[[Status], None] = lambda status: None, usual: Mapping[State, float] | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._told = told
        self._usual = dict(usual or {})
        self._passed: dict[State, float] = {}
        self._status = Status(State.STARTING, time.time(), "the program has just begun")

    @property
    def status(self) -> Status:
        """The current one."""
        with self._lock:
            return self._status

    def move(
        self,
        state: State,
        reason: str,
        *,
        deadline_seconds: float | None = None,
        crash: Crash | None = None,
    ) -> None:
        """Enter `state`, with the last crash that was told unless there is another."""
        with self._lock:
            old, now = self._status, time.time()
            if (old.state, state) in _PASSAGES:
                self._usual[old.state] = self._passed[old.state] = now - old.since
            restarts = old.restarts + ((old.state, state) == (State.RESTARTING, State.LOADING))
            status = self._status = Status(state, now, reason, deadline_seconds, restarts, crash or old.crash)
        self._told(status)

    def amend(self, reason: str) -> None:
        """Stay in the state, for another reason: what is under way has come further."""
        with self._lock:
            status = self._status = replace(self._status, reason=reason)
        self._told(status)

    @property
    def start_seconds(self) -> dict[State, float]:
        """How long the last start was in each of the states in which the engine is on its way; none of one to come."""
        with self._lock:
            return dict(self._passed)

    @property
    def usual_seconds(self) -> float:
        """From the start of an engine until it is ready, as a rule."""
        with self._lock:
            return sum(self._usual.values())

    def retry_seconds(self) -> int:
        """When a client should ask again, within bounds: the rest of this state and of those on the way to ready.

        A client that comes a moment too early has lost one of the few tries that it makes: while it is not ready the
        answer is never less than a tenth of the way. Where nothing is on its way, it is the whole way: who starts the
        endpoint again, and when, is not known here.
        """
        with self._lock:
            status, usual = self._status, dict(self._usual)
        if status.state is State.READY:
            return retry_seconds(0.0)
        spent, whole = max(0.0, time.time() - status.since), sum(usual.values())
        if status.state in _WAY:
            first, *others = _WAY[_WAY.index(status.state) :]
            rest = max(0.0, usual.get(first, 0.0) - spent) + sum(usual.get(state, 0.0) for state in others)
        elif status.state is State.RESTARTING:
            rest = max(0.0, (status.deadline_seconds or 0.0) - spent) + whole
        else:
            rest = whole
        return retry_seconds(max(rest, LEAST_SHARE * whole, LEAST_SECONDS))


# The way to ready, and the steps on it whose time is worth remembering: those that were gone to the end.
_WAY = (State.STARTING, State.FETCHING, State.LOADING, State.WARMING)
_PASSAGES = {(State.LOADING, State.WARMING), (State.WARMING, State.READY)}
