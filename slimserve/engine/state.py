"""Where an endpoint stands, for everybody who asks: the page, `--status`, the answers at the door, the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum


class State(StrEnum):
    """The states of an endpoint, in the order in which a good life passes them."""

    STARTING = "starting"
    """the place is checked and the port taken"""
    FETCHING = "fetching"
    """weights are downloaded or verified"""
    LOADING = "loading"
    """the engine loads, until its `/health` answers"""
    WARMING = "warming"
    """from there to the first token of a real completion"""
    READY = "ready"
    """requests are answered"""
    DRAINING = "draining"
    """no new work; what runs may finish"""
    RESTARTING = "restarting"
    """the engine ended or froze; the next start waits out its backoff"""
    FAILED = "failed"
    """it crashed too often; the endpoint says so until it is stopped"""
    STOPPED = "stopped"
    """nothing of it runs any more"""


@dataclass(frozen=True, slots=True)
class Status:
    """One moment of an endpoint.

    Args:
        state: where it stands.
        since: when it came there, in seconds since the epoch.
        reason: why, in one line.
        deadline_seconds: how long the state may last; None: for ever.
        restarts: starts of the engine after the first.
        last_words: the end of the engine's log, when it died.
    """

    state: State
    since: float
    reason: str
    deadline_seconds: float | None = None
    restarts: int = 0
    last_words: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """As JSON data."""
        return {
            "state": str(self.state),
            "since": self.since,
            "reason": self.reason,
            "deadline_seconds": self.deadline_seconds,
            "restarts": self.restarts,
            "last_words": list(self.last_words),
        }


class Board:
    """The current status, set by the supervisor's thread and read by any.

    Args:
        told: called with each new status, in the thread that set it.
    """

    def __init__(self, told: Callable[[Status], None] = lambda status: None) -> None:
        self._lock = threading.Lock()
        self._told = told
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
        restarts: int | None = None,
        last_words: tuple[str, ...] = (),
    ) -> None:
        """Enter `state`; `restarts` stays what it was unless given."""
        with self._lock:
            kept = self._status.restarts if restarts is None else restarts
            self._status = Status(state, time.time(), reason, deadline_seconds, kept, last_words)
            status = replace(self._status)
        self._told(status)
