"""What node 0 wants of another node, as it comes over the link: each order ends whatever the node is waiting for."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from slimserve.engine.waiting import POLL_SECONDS
from slimserve.errors import Finding
from slimserve.nodes import wire
from slimserve.nodes.agreement import Claim
from slimserve.nodes.head import read_findings
from slimserve.nodes.seat import Seat
from slimserve.nodes.wire import Broken, Link, Message
from slimserve.shapes import plain

# Between two tries to reach a node 0 that is not there yet.
TRY_SECONDS = 1.0


class Order(Exception):
    """Node 0 wants something."""


class Welcomed(Order):
    """All nodes are there, and agree."""


class Started(Order):
    """The engine is to be started, for the `round`-th time."""

    def __init__(self, round_: int) -> None:
        super().__init__()
        self.round = round_


class Halted(Order):
    """The engine is to be ended, and to be started anew when that is said."""


class Left(Order):
    """Everything is to be ended: it was told to stop, or cannot go on, or this node cannot take part."""

    def __init__(self, status: int, findings: list[Finding]) -> None:
        super().__init__()
        self.status, self.findings = status, findings


class Lost(Order):
    """The link to node 0 is at its end."""


class Orders:
    """The link to node 0, kept.

    Args:
        link: to it.
        words: what this node is doing, for the beat.
        ready: called when the endpoint is ready.
    """

    def __init__(self, link: Link, words: Callable[[], str], ready: Callable[[], None]) -> None:
        self._link, self._ready = link, ready
        self._lock = threading.Lock()
        self._inbox: deque[Message] = deque()
        self._alarm, self._alarmer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        link.keep(lambda: {"words": words()}, self._put, lambda reason: self._put({"lost": reason}))

    def fileno(self) -> int:
        """A descriptor that is readable while an order waits."""
        return self._alarm

    def check(self) -> None:
        """Raise the next order.

        Raises:
            Order: one of its kinds.
        """
        while (message := self._next()) is not None:
            if "lost" in message:
                raise Lost(str(message["lost"]))
            match message.get("do"):
                case "welcome":
                    raise Welcomed
                case "start":
                    raise Started(_number(message.get("round")))
                case "halt":
                    raise Halted(str(message.get("reason", ""))[:1000])
                case "leave":
                    raise Left(_number(message.get("status")), read_findings(message))
                case "ready":
                    self._ready()

    def say(self, message: Message) -> None:
        """Tell node 0 something; that it is gone is an order of its own."""
        with contextlib.suppress(Broken):
            self._link.send(message)

    def close(self) -> None:
        """Hang up."""
        self._link.close()
        with self._lock:
            for handle in (self._alarm, self._alarmer):
                os.close(handle)
            self._alarmer = -1

    def _put(self, message: Message) -> None:
        if not {"do", "lost"} & message.keys():
            return  # a beat
        with self._lock:
            self._inbox.append(message)
            if self._alarmer >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._alarmer, b".")

    def _next(self) -> Message | None:
        with self._lock:
            if self._inbox:
                return self._inbox.popleft()
            with contextlib.suppress(BlockingIOError):
                os.read(self._alarm, 1 << 12)
            return None


def _number(value: Any) -> int:
    return value if type(value) is int else 1


def connect(seat: Seat, claim: Claim, secret: bytes, tell: Callable[[str], None], cancelled: threading.Event) -> Link:
    """Reach node 0 and claim a place; tried again until it is there.

    Args:
        tell: called with each other reason why it is not.
        cancelled: ends the tries.

    Raises:
        Broken: it was cancelled.
    """
    said = ""
    while not cancelled.is_set():
        try:
            connection = socket.create_connection((seat.head, seat.port), wire.HELLO_SECONDS)
            link = wire.offer(connection, secret)
            try:
                link.send({"claim": plain(claim)})
            except Broken:
                link.close()
                raise
            return link
        except OSError as error:
            reason = f"node 0 is not at {seat.head}:{seat.port} yet: {error.strerror or error}"
        except Broken as error:
            reason = f"what is at {seat.head}:{seat.port} is no node 0 of ours: {error}"
        if reason != said:
            said = reason
            tell(reason)
        end = time.monotonic() + TRY_SECONDS
        while time.monotonic() < end and not cancelled.wait(POLL_SECONDS):
            pass
    raise Broken(said or "it was not tried")
