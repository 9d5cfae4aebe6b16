"""Connections of which nothing is known but that each request on them was refused by a known head.

In a flood most newcomers are told to come back, and many never do. A connection that is served takes a parser, a
protocol, a transport and three rounds of the event loop to make; here it is a socket that is read when there is
something to read. It leaves as soon as anything else comes on it than a request that can be refused the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections import OrderedDict
from collections.abc import Callable

from slimserve.admission.heads import Heads
from slimserve.admission.rejection import Rejected
from slimserve.admission.replies import raw_refusal
from slimserve.admission.slots import JudgeHead, Slot

_READ_BYTES = 1 << 16


class Lobby:
    """Those connections, in the order in which they were last heard of.

    Args:
        seconds: after which one that says nothing is closed.
        heads: of requests that were refused.
        judge_head: what a request's head alone decides.
        more: headers of every answer, as they are at the moment.
        let_in: takes a connection, what was read of it, and its slot.
    """

    def __init__(
        self,
        seconds: float,
        heads: Heads,
        judge_head: JudgeHead,
        more: Callable[[], tuple[tuple[bytes, bytes], ...]],
        let_in: Callable[[socket.socket, bytes, Slot | None], None],
    ) -> None:
        self._seconds = seconds
        self._heads = heads
        self._judge_head = judge_head
        self._more = more
        self._let_in = let_in
        # When each was last heard of, the longest silent first.
        self._heard: OrderedDict[socket.socket, float] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._heard)

    @property
    def silent_since(self) -> float:
        """When the longest silent one was last heard of, by the loop's clock; infinity when there is none."""
        return next(iter(self._heard.values()), math.inf)

    def enter(self, connection: socket.socket) -> None:
        """Read a connection, non-blocking and fresh from the line: it stays, goes on, or is gone already."""
        try:
            self._take(connection, connection.recv(_READ_BYTES))
        except BlockingIOError:  # nothing has come, and for that there is a deadline
            self._let_in(connection, b"", None)
        except OSError:
            self._close(connection)

    def close_one(self) -> None:
        """Close the one that was silent for longest."""
        self._close(next(iter(self._heard)))

    def end(self) -> None:
        """Close all of them."""
        while self._heard:
            self.close_one()
        if self._timer is not None:
            self._timer.cancel()

    def _read(self, connection: socket.socket) -> None:
        try:
            self._take(connection, connection.recv(_READ_BYTES))
        except BlockingIOError:
            return
        except OSError:
            self._close(connection)

    def _take(self, connection: socket.socket, data: bytes) -> None:
        if not data:
            self._close(connection)
            return
        known = self._heads.of(data)
        judged = self._judge_head(known.method, known.path, known.headers) if known else None
        if known is None or not isinstance(judged, Rejected):
            self._leave(connection)
            self._let_in(connection, data, judged if isinstance(judged, Slot) else None)
            return
        answer = raw_refusal(judged, known.path, self._more())
        sent = 0
        with contextlib.suppress(OSError):
            sent = connection.send(answer)
        if sent < len(answer):  # gone, or it asks and asks and reads nothing
            self._close(connection)
            return
        self._stay(connection)

    def _stay(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if connection not in self._heard:
            loop.add_reader(connection, self._read, connection)
        self._heard[connection] = loop.time()
        self._heard.move_to_end(connection)
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._close_silent)

    def _leave(self, connection: socket.socket) -> None:
        if self._heard.pop(connection, None) is not None:
            asyncio.get_running_loop().remove_reader(connection)

    def _close(self, connection: socket.socket) -> None:
        self._leave(connection)
        connection.close()

    def _close_silent(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._heard:
            due = next(iter(self._heard.values())) + self._seconds
            if due > loop.time():
                self._timer = loop.call_at(due, self._close_silent)
                return
            self.close_one()
