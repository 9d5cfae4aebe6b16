"""Who comes to node 0's port: each proves itself and claims a place, or is cut off, and keeps nobody else waiting."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from slimserve.engine import ports
from slimserve.engine.descriptors import wait_readable
from slimserve.nodes import wire
from slimserve.nodes.agreement import Claim
from slimserve.nodes.seat import Seat
from slimserve.nodes.wire import Broken, Link
from slimserve.shapes import ShapeError, build

# What has not proved itself yet. A right node needs a moment: who is in its way is the address that has most of them,
# and of those the oldest.
MOST_STRANGERS = 32
_MOST_TOLD = 100
_PAUSE_SECONDS = 0.05


class Arrivals:
    """Node 0's listening socket, from now on until `close`.

    Args:
        seat: of node 0.
        secret: of the nodes.
        join: called with each that has proved itself, and what it says of itself; in a thread of its own.
        report: called with one line for each thing worth telling.

    Raises:
        Refused: the port cannot be had.
    """

    def __init__(
        self, seat: Seat, secret: bytes, join: Callable[[Link, Claim], None], report: Callable[[str], None]
    ) -> None:
        self._secret, self._join, self._report = secret, join, report
        self._lock = threading.Lock()
        self._told: dict[str, None] = {}  # the oldest first
        self._strangers: list[tuple[socket.socket, str]] = []
        self._listening = ports.listen(seat.head, seat.port)
        self._end, self._ender = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._accept, daemon=True, name="slimserve-nodes")
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and cut off whoever has not proved itself."""
        os.write(self._ender, b".")
        self._thread.join()
        for handle in (self._end, self._ender):
            os.close(handle)
        self._listening.close()
        with self._lock:
            for connection, _ in self._strangers:
                _cut(connection)

    def say_once(self, line: str) -> None:
        """Report what strangers can cause as often as they like; again only when a hundred other lines came since."""
        with self._lock:
            if line in self._told:
                return
            if len(self._told) >= _MOST_TOLD:
                del self._told[next(iter(self._told))]
            self._told[line] = None
        self._report(line)

    def _accept(self) -> None:
        while True:
            wait_readable([self._listening, self._end], None)
            if wait_readable([self._end], 0):
                return
            try:
                connection, address = self._listening.accept()
                self._take(connection, address[0])
            except (OSError, RuntimeError) as error:  # it went away again, or no descriptor or thread is to be had
                self.say_once(f"a connection cannot be taken: {getattr(error, 'strerror', None) or error}")
                wait_readable([self._end], _PAUSE_SECONDS)

    def _take(self, connection: socket.socket, address: str) -> None:
        """Have a stranger greeted in a thread of its own; RuntimeError when none is to be had."""
        with self._lock:
            self._strangers.append((connection, address))
            if len(self._strangers) > MOST_STRANGERS:
                crowd = Counter(address for _, address in self._strangers).most_common(1)[0][0]
                oldest = next(one for one in self._strangers if one[1] == crowd)
                self._strangers.remove(oldest)
                _cut(oldest[0])
        try:
            threading.Thread(target=self._greet, args=(connection, address), daemon=True).start()
        except RuntimeError:
            self._forget(connection)
            connection.close()
            raise

    def _forget(self, connection: socket.socket) -> None:
        """It is no stranger any more, or gone."""
        with self._lock:
            self._strangers = [one for one in self._strangers if one[0] is not connection]

    def _greet(self, connection: socket.socket, address: str) -> None:
        """See who has come."""
        deadline = time.monotonic() + wire.HELLO_SECONDS
        try:
            link = wire.accept(connection, self._secret, deadline)
            try:
                claim = build(Claim, link.receive(deadline).get("claim"))
            except (Broken, ShapeError):
                link.close()
                raise
        except (Broken, ShapeError) as error:
            self.say_once(f"somebody at {address} is turned away: {error}")
            return
        finally:
            self._forget(connection)
        self._join(link, claim)


def _cut(connection: socket.socket) -> None:
    """Wake whoever reads from it, and closes it then."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
