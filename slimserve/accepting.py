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

    A connection is taken and its task made in one go, so that a `stop` loses none in between.

    Args:
        listening: bound and listening; it stays the caller's.
        serve: is given each connection, non-blocking, which is then its own.
    """

    def __init__(self, listening: socket.socket, serve: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> None:
        self._listening = listening
        self._serve = serve
        self._accepting = False
        self.serving: set[asyncio.Task[None]] = set()
        """what `serve` does at the moment"""
        listening.setblocking(False)

    def start(self) -> None:
        """Take connections from now on; a second time does nothing."""
        self._accepting = True
        self._listen()

    def stop(self) -> None:
        """Take no more; those that were taken go on. A second time does nothing."""
        self._accepting = False
        asyncio.get_running_loop().remove_reader(self._listening)

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
            task = loop.create_task(self._serve(connection))
            self.serving.add(task)
            task.add_done_callback(self.serving.discard)
