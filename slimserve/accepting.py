"""Taking connections off a listening socket that another process may take them off next."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

# Connections that are taken in one turn of the event loop; the loops' own servers take one or a whole backlog. In a
# flood turns are long: one at a time, newcomers would wait for seconds.
AT_ONCE = 128
# Before it is tried again when the process has no file descriptor left; what waits can wait until there is one.
SHORTAGE_SECONDS = 1.0

log = logging.getLogger(__name__)


class Acceptor:
    """Takes connections in the running event loop, when told to.

    A connection is taken and handed over in one go, so that a `stop` loses none in between.

    Args:
        listening: bound and listening; it stays the caller's.
        take: is given each connection, non-blocking, which is then its own.
    """

    def __init__(self, listening: socket.socket, take: Callable[[socket.socket], None]) -> None:
        self._listening = listening
        self._take = take
        self._accepting = False
        self.serving: set[asyncio.Task[None]] = set()
        """what has begun and is not over"""
        listening.setblocking(False)

    def start(self) -> None:
        """Take connections from now on; a second time does nothing."""
        self._accepting = True
        self._listen()

    def stop(self) -> None:
        """Take no more; those that were taken go on. A second time does nothing."""
        self._accepting = False
        asyncio.get_running_loop().remove_reader(self._listening)

    def begin(self, serving: Coroutine[Any, Any, None]) -> None:
        """Run what serves a connection as a task, which is among `serving` until it is over."""
        task = asyncio.get_running_loop().create_task(serving)
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)

    def _listen(self) -> None:
        if self._accepting:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return  # nobody waits, or the other process was faster
            except ConnectionError:
                continue  # it went away while it waited
            except OSError as error:
                log.error("connections cannot be accepted: %s", error)
                loop.remove_reader(self._listening)
                loop.call_later(SHORTAGE_SECONDS, self._listen)
                return
            connection.setblocking(False)
            self._take(connection)
