"""The public socket, served inside the engine's API server: opened and closed at will, below it the limits of HTTP.

What ASGI never sees is dealt with here: headers that trickle, headers without end, frames that are none. Each gets a
4xx and a closed connection within a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Any

import httptools  # noqa: F401 - without it uvicorn would fall back to a parser that these limits do not hold for
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slimserve.accepting import Acceptor
from slimserve.admission.rejection import Rejected
from slimserve.admission.replies import closing_answer

HEADER_SECONDS = 10.0
HEADER_BYTES = 32 << 10
HEADER_COUNT = 100
KEEP_ALIVE_SECONDS = 75
# After an answer that did not wait for the body, the rest of it is read and dropped for so long.
REST_SECONDS = 30.0
# A client that takes nothing of its answer for so long is gone: its slot is wanted.
UNREAD_SECONDS = 60.0

log = logging.getLogger(__name__)


class Protocol(HttpToolsProtocol):
    """One connection, with deadlines and limits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The door logs what it refuses and counts the rest.
        self.access_log = False
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._in_message = False
        self._moved = False
        self._head_bytes = 0
        self._head_seen = 0
        self._fault: Rejected | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the first request's head its deadline."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines."""
        self._stop_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; a head that is under way may take so long and grow so far, and no further."""
        if self.transport.is_closing():
            return
        only_head = self._in_head or not self._in_message
        self._moved = False
        super().data_received(data)
        # Most heads come whole, and need no timer. Blank lines between requests are as little progress as half a head.
        if self._in_head or not (self._in_message or self._moved):
            if self._timer is None:
                self._expect_head()
            # The parser tells of a header when it is complete: one that never ends is seen only here.
            self._head_seen += len(data) if only_head else 0
            if self._head_seen > HEADER_BYTES and not self.transport.is_closing():
                self._fault = _head_too_large()
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._in_message = self._in_head = True
        self._head_bytes = self._head_seen = 0

    def on_url(self, url: bytes) -> None:
        """Count the request line in."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header in."""
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= HEADER_COUNT:
            self._fault = Rejected(431, f"more than {HEADER_COUNT} headers", code="too_many_headers")
            raise ValueError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: its deadline is off."""
        self._in_head = False
        self._moved = True
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._in_message = False
        self._moved = True
        self._stop_timer()
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:
            # The answer came first, and the rest of the body has unset what it set to wait for the next request.
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_SECONDS, self.timeout_keep_alive_handler)

    def on_response_complete(self) -> None:
        """The answer is out; if the body is not in yet, the rest has its own deadline."""
        super().on_response_complete()
        if self._in_message and not self._in_head:
            self._stop_timer()
            self._timer = self.loop.call_later(REST_SECONDS, self._close)

    def pause_writing(self) -> None:
        """The client is slow to read."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._stop_unread_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer a broken frame, unless an answer is under way already: two would be one broken one."""
        fault, self._fault = self._fault, None
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not (cycle.response_started or self.pipeline):
            fault = fault or Rejected(400, "this is not a valid HTTP request", code="invalid_http")
            self.transport.write(closing_answer(fault))
            if cycle is not None:
                # Whoever still waits for its body is told, and can send nothing more.
                cycle.disconnected = True
                cycle.message_event.set()
        self._close()

    def _unsupported_upgrade_warning(self) -> None:
        """No upgrade is offered; the request is served as it is, and needs no line in the log."""

    def _expect_head(self) -> None:
        self._head_seen = 0
        self._timer = self.loop.call_later(HEADER_SECONDS, self._head_late)

    def _head_late(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            # A half request behind one that is being answered: the answer may end, the connection with it.
            self.cycle.keep_alive = False
            return
        if self._head_seen:
            late = Rejected(408, f"no complete request came within {HEADER_SECONDS:g} s", code="head_timeout")
            self.transport.write(closing_answer(late))
        self._close()

    def _await_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self._unread_late, unread)

    def _unread_late(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() < unread:
            self._await_reader()
        else:
            self.transport.abort()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _close(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEADER_BYTES:
            self._fault = _head_too_large()
            raise ValueError


def _head_too_large() -> Rejected:
    return Rejected(
        431,
        f"request line and headers take more than {HEADER_BYTES} bytes",
        code="head_too_large",
    )


class Listener:
    """Serves an application on a listening socket, when told to.

    Args:
        app: the ASGI application.
        fd: the listening socket; it is borrowed, and stays open.
    """

    def __init__(self, app: Any, fd: int) -> None:
        self._fd = fd
        # The protocol is ours for TCP alone: nothing a client says changes who it seems to be (proxy_headers), and
        # `scope["server"]` is the socket's own name, a pair of address and port, so never the control socket's path.
        self._config = uvicorn.Config(
            app,
            http=Protocol,
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
        self._acceptor.start()
        log.info("the door is open")

    def close(self) -> None:
        """Accept no more; connections that are there go on."""
        if self._acceptor is not None:
            self._acceptor.stop()
            log.info("the door is closed")

    def end(self) -> None:
        """Close for good; what runs is left to the loop's end."""
        self.close()
        if self._ticking is not None:
            self._ticking.cancel()
        if self._socket is not None:
            self._socket.close()

    async def _connect(self, connection: socket.socket) -> None:
        state = self._server.server_state

        def protocol() -> Protocol:
            return Protocol(config=self._config, server_state=state, app_state={})

        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError:
            connection.close()
