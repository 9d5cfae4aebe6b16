"""The public socket, served inside the engine's API server: opened and closed at will, never to the last descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import socket
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any

import uvicorn

from slimserve.accepting import AT_ONCE, Acceptor
from slimserve.admission.heads import Heads
from slimserve.admission.lobby import Lobby
from slimserve.admission.metrics import shared
from slimserve.admission.protocol import KEEP_ALIVE_SECONDS, Protocol
from slimserve.admission.rejection import Rejected
from slimserve.admission.replies import raw_answer
from slimserve.admission.slots import JudgeHead, Slot
from slimserve.admission.turns import Turns

MOST_CONNECTIONS = 4096
# Descriptors that connections leave to the engine and to the supervisor's questions; one turn of the loop may take
# AT_ONCE of them before any is turned away, and as many may linger.
SPARE_DESCRIPTORS = 128 + 2 * AT_ONCE
FULL_RETRY_SECONDS = 5
# Who is turned away has so long to send its request: closed with bytes unread, the answer could be lost.
LINGER_SECONDS = 1.0

log = logging.getLogger(__name__)


class Listener:
    """Serves an application on a listening socket, when told to.

    Args:
        app: the ASGI application.
        fd: the listening socket; it is borrowed, and stays open.
        most: connections at once, as far as there are descriptors for them.
        judge_head: what a request's head alone decides.
    """

    def __init__(
        self,
        app: Any,
        fd: int,
        most: int = MOST_CONNECTIONS,
        judge_head: JudgeHead = lambda method, path, headers: None,
    ) -> None:
        self._fd, self._at_most = fd, most
        self._judge_head = judge_head
        # The protocol is ours for TCP alone: nothing a client says changes who it seems to be (proxy_headers), and
        # `scope["server"]` is the socket's own name, a pair of address and port, so never the control socket's path.
        self._config = uvicorn.Config(
            app,
            http=Protocol,  # for its loading alone; connections are made here
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self._server = uvicorn.Server(self._config)
        self._ticking: asyncio.Task[None] | None = None
        self._acceptor: Acceptor | None = None
        self._socket: socket.socket | None = None
        self._idle: OrderedDict[Protocol, float] = OrderedDict()
        self._heads = Heads()
        self._lobby = Lobby(KEEP_ALIVE_SECONDS, self._heads, judge_head, self._headers, self._let_in)
        self._turns = Turns()
        self._most = 0
        self._lingering = 0

    def open(self) -> None:
        """Accept connections; a second time does nothing.

        Raises:
            OSError: the descriptor is no listening socket.
        """
        if self._acceptor is None:
            self._socket = socket.socket(fileno=os.dup(self._fd))
            self._acceptor = Acceptor(self._socket, self._connect)
            self._config.load()
            # Not `serve`: signals are the engine's, and the application has its lifespan from its own server. The loop
            # keeps the Date header current.
            self._ticking = asyncio.create_task(self._server.main_loop())
        self._most = self._room()
        self._acceptor.start()
        log.info("the door is open to %d connections", self._most)

    def close(self) -> None:
        """Accept no more; connections that are there go on."""
        if self._acceptor is not None:
            self._acceptor.stop()
            log.info("the door is closed")

    def end(self) -> None:
        """Close for good; what runs is left to the loop's end."""
        self.close()
        self._lobby.end()
        if self._ticking is not None:
            self._ticking.cancel()
        if self._socket is not None:
            self._socket.close()

    @property
    def connections(self) -> set[Any]:
        """Those that are served, each a `Protocol`; those in the lobby are none."""
        return self._server.server_state.connections

    def _room(self) -> int:
        """How many connections may be open together."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            return self._at_most
        others = len(os.listdir("/proc/self/fd")) - len(self.connections) - len(self._lobby)
        return max(1, min(self._at_most, limit - others - SPARE_DESCRIPTORS))

    def _connect(self, connection: socket.socket) -> None:
        if self._count < self._most or self._make_room():
            self._lobby.enter(connection)
        else:
            self._begin(self._send_off(connection))

    def _make_room(self) -> bool:
        """Close the one that has been silent for longest; False when all are at work."""
        idle_since = next(iter(self._idle.values()), math.inf)
        if idle_since == self._lobby.silent_since == math.inf:
            return False
        if idle_since <= self._lobby.silent_since:  # the engine's loop counts whole milliseconds
            longest, _ = self._idle.popitem(last=False)
            longest.cut_off()
        else:
            self._lobby.close_one()
        return True

    @property
    def _count(self) -> int:
        """Connections that are there, and those that are being let in."""
        coming = len(self._acceptor.serving) - self._lingering if self._acceptor is not None else 0
        return len(self.connections) + len(self._lobby) + coming

    def _begin(self, serving: Coroutine[Any, Any, None]) -> None:
        assert self._acceptor is not None  # it took the connection
        self._acceptor.begin(serving)

    def _let_in(self, connection: socket.socket, data: bytes, slot: Slot | None) -> None:
        self._begin(self._serve(connection, data, slot))

    async def _serve(self, connection: socket.socket, data: bytes, slot: Slot | None) -> None:
        def protocol() -> Protocol:
            state = self._server.server_state
            ours = (self._idle, self._judge_head, self._heads, names, self._turns, data, slot)
            return Protocol(*ours, config=self._config, server_state=state, app_state={})

        try:
            names = connection.getsockname()[:2], connection.getpeername()[:2]
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError:
            connection.close()
            if slot is not None:
                slot.release()

    def _headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return tuple(self._server.server_state.default_headers)

    async def _send_off(self, connection: socket.socket) -> None:
        full = Rejected(
            503,
            f"all of the {self._most} connections that this endpoint has are at work; "
            f"come back in {FULL_RETRY_SECONDS} s",
            code="too_many_connections",
            headers={"Retry-After": str(FULL_RETRY_SECONDS)},
        )
        shared().denied(full.code).inc()
        seconds = LINGER_SECONDS if self._lingering < AT_ONCE else 0
        self._lingering += 1
        try:
            with connection, contextlib.suppress(OSError, TimeoutError):
                connection.send(raw_answer(full))
                connection.shutdown(socket.SHUT_WR)
                async with asyncio.timeout(seconds):
                    while await asyncio.get_running_loop().sock_recv(connection, 1 << 16):
                        pass
        finally:
            self._lingering -= 1
