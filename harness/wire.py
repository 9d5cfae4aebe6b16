"""One HTTP request on a connection of its own, its answer stamped as it arrives.

A client library would be the usual choice here. What it costs for each chunk is what a fast server's latency is then
measured with (`harness/client_bench.py` compares), and its pool is one more place where a request can wait unseen. So
each request has a connection of its own, that is open before the request's clock starts; and whatever the sockets hold
is stamped first, for all connections, before any of it is looked at: a burst of hundreds of streams ages little.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools

from harness.address import Address

# (time, bytes of the body) -> why no more of this answer is wanted; empty while more is
Reader = Callable[[float, bytes], str]


@dataclass
class Reply:
    """What came for one request.

    Args:
        sent, ended: on `time.perf_counter`: the request went to the kernel, the answer was over.
        status: None if there was no answer.
        headers: by their names in lower case.
        broken: why the answer was not whole; empty if it was.
    """

    sent: float
    ended: float = 0.0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    broken: str = ""


class Wire:
    """Connections of one event loop to one server."""

    def __init__(self, address: Address, *, connect_s: float, silence_s: float) -> None:
        self._address = address
        self._connect_s = connect_s
        self.silence_s = silence_s
        self.loop = asyncio.get_running_loop()
        self._tls = ssl.create_default_context() if address.tls else None
        self._arrived: list[tuple[_Exchange, float, bytes]] = []

    async def post(self, path: str, headers: dict[str, str], body: bytes, reader: Reader) -> Reply:
        """Ask, and give what is answered to `reader` as it comes. Returns when the answer is over or broken off.

        Args:
            path: below the server's own.
            headers: beside those of the exchange itself.
            body: JSON.
            reader: gets each part of the answer's body with the time of its arrival.
        """
        exchange = _Exchange(self, reader)
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(self._connect_s):
                await self.loop.create_connection(
                    lambda: exchange, self._address.host, self._address.port, ssl=self._tls
                )
        except TimeoutError:
            broken = f"no connection to {self._address.authority} within {self._connect_s:g} s"
            return Reply(begun, time.perf_counter(), broken=broken)
        except OSError as error:
            broken = f"no connection to {self._address.authority}: {error}"
            return Reply(begun, time.perf_counter(), broken=broken)
        every = {"Host": self._address.authority, "Content-Type": "application/json", "Connection": "close"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**every, **headers}.items())
        top = f"POST {self._address.path}{path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
        return await exchange.run(top.encode("latin-1") + body)

    def arrived(self, exchange: _Exchange, data: bytes) -> None:
        """Stamp it, and look at it when all that had arrived by now is stamped."""
        if not self._arrived:
            self.loop.call_soon(self._read)
        self._arrived.append((exchange, time.perf_counter(), data))

    def _read(self) -> None:
        arrived, self._arrived = self._arrived, []
        for exchange, moment, data in arrived:
            exchange.read(moment, data)


class _Exchange(asyncio.Protocol):
    """A request and its answer; the callbacks `on_...` are the parser's."""

    def __init__(self, wire: Wire, reader: Reader) -> None:
        self._wire = wire
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._over: asyncio.Future[None] = wire.loop.create_future()
        self._now = 0.0
        self.reply = Reply(0.0)

    async def run(self, request: bytes) -> Reply:
        self.reply.sent = self._now = time.perf_counter()
        self._transport.write(request)
        watch = self._wire.loop.call_later(self._wire.silence_s, self._watch)
        self._watching = watch
        try:
            await self._over
        finally:
            self._watching.cancel()
            self._transport.abort()
        return self.reply

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport  # of asyncio or uvloop, which share no class
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._wire.arrived(self, data)

    def connection_lost(self, error: Exception | None) -> None:
        # After what has been stamped and not yet read.
        self._wire.loop.call_soon(self._lost, error)

    def read(self, moment: float, data: bytes) -> None:
        if self._over.done():
            return
        self._now = moment
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._over.set_exception(error.__context__ or error)  # ours, and no fault of the server
        except httptools.HttpParserError as error:
            self._end(f"no HTTP: {error}")
        except httptools.HttpParserUpgrade:
            self._end("an upgrade of the connection in the place of an answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.reply.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        # The parser goes on to the end of what it was given.
        if not self._over.done() and (enough := self._reader(self._now, data)):
            self._end(enough)

    def on_message_complete(self) -> None:
        self._end("")

    def _lost(self, error: Exception | None) -> None:
        if self._over.done():
            return
        headers = self.reply.headers
        unmeasured = "content-length" not in headers and "transfer-encoding" not in headers
        self._now = time.perf_counter()
        if self.reply.status is not None and unmeasured and error is None:
            self._end("")  # such a body ends with its connection
        else:
            what = "the answer" if self.reply.status is not None else "an answer"
            when = "in the middle of" if self.reply.status is not None else "before"
            self._end(f"the connection ended {when} {what}" + (f": {error}" if error else ""))

    def _watch(self) -> None:
        left = self._now + self._wire.silence_s - time.perf_counter()
        if left <= 0:
            what = "no answer" if self.reply.status is None else "nothing more"
            self._end(f"{what} within {self._wire.silence_s:g} s")
        else:
            self._watching = self._wire.loop.call_later(left, self._watch)

    def _end(self, broken: str) -> None:
        if not self._over.done():
            self.reply.broken = broken
            self.reply.ended = self._now if not broken else time.perf_counter()
            self._over.set_result(None)
