"""Connections that are too many, and clients that read slowly or not at all: the listener in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from admission_raw import GET, LAST_GET, error_of, generate, status_of
from admission_support import request

from slimserve.admission import protocol
from slimserve.admission.listener import Listener

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run(case: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await case()

    asyncio.run(within())


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr(protocol, "UNREAD_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


class Crowd:
    """Clients of an application that answers what is got, and never what is posted; four may be connected."""

    def __init__(self, listening: socket.socket) -> None:
        self.listener = Listener(self, listening.fileno(), most=4)
        self.listener.open()
        self._name = listening.getsockname()
        self._writers: list[asyncio.StreamWriter] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def meet(self, message: bytes) -> Client:
        reader, writer = await asyncio.open_connection(*self._name)
        self._writers.append(writer)
        writer.write(message)
        return reader, writer

    async def work(self, count: int) -> list[Client]:
        """So many that wait for an answer."""
        met = len(self.listener.connections)
        busy = [await self.meet(generate()) for _ in range(count)]
        await self.has(met + count)
        return busy

    async def has(self, count: int) -> None:
        while len(self.listener.connections) != count:
            await asyncio.sleep(0.01)

    async def leave(self) -> None:
        for writer in self._writers:
            writer.close()
        await self.has(0)
        self.listener.end()


def test_a_newcomer_takes_the_place_of_the_longest_idle(listening: socket.socket) -> None:
    async def case() -> None:
        crowd = Crowd(listening)
        await crowd.work(2)
        idle = [await crowd.meet(GET) for _ in range(2)]
        for reader, _ in idle:
            await reader.readuntil(b"ok")
        idle[0][1].write(GET)  # which makes it the other one
        await idle[0][0].readuntil(b"ok")
        reader, _ = await crowd.meet(LAST_GET)
        assert (await reader.read()).endswith(b"ok")
        assert await idle[1][0].read() == b""
        idle[0][1].write(LAST_GET)
        assert (await idle[0][0].read()).endswith(b"ok")
        await crowd.has(2)
        await crowd.leave()

    run(case)


def test_when_all_connections_are_at_work_it_is_503(listening: socket.socket) -> None:
    async def case() -> None:
        crowd = Crowd(listening)
        busy = await crowd.work(4)
        for message in (GET, generate(), b"", request(b"x" * (1 << 16))):
            reader, writer = await crowd.meet(message)
            raw = await reader.readuntil(b"}}")
            writer.close()
            assert status_of(raw) == 503
            assert error_of(raw)["code"] == "too_many_connections"
            assert b"retry-after: 5\r\n" in raw
        busy[0][1].close()
        await crowd.has(3)
        reader, _ = await crowd.meet(LAST_GET)
        assert (await reader.read()).endswith(b"ok")
        await crowd.leave()

    run(case)


class Talker:
    """An application that talks to whoever reads, or, when it is to end, until nothing more goes into the socket.

    Args:
        listening: where it is served.
        ends: it ends; `fails`: by an exception.
    """

    def __init__(self, listening: socket.socket, *, ends: bool = False, fails: bool = False) -> None:
        self.gone = asyncio.Event()
        self.over = asyncio.Event()
        self.listener = Listener(self, listening.fileno())
        self._name = listening.getsockname()
        self._ends = ends
        self._fails = fails

    @property
    def unwritten(self) -> int:
        """Bytes that the kernel did not take."""
        return max(connection.transport.get_write_buffer_size() for connection in self.listener.connections)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        hearing = asyncio.create_task(self._hear(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not (self.gone.is_set() or (self._ends and self.unwritten)):
            await send({"type": "http.response.body", "body": b"x" * 16384, "more_body": True})
            await asyncio.sleep(0)
        hearing.cancel()
        self.over.set()
        if self._fails:
            raise RuntimeError("in the middle")
        await send({"type": "http.response.body", "body": b""})

    async def _hear(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    async def meet(self, message: bytes = GET) -> socket.socket:
        """A client that has sent its request, and reads nothing so far."""
        self.listener.open()
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
        await asyncio.get_running_loop().sock_connect(sock, self._name)
        await asyncio.get_running_loop().sock_sendall(sock, message)
        return sock

    async def cut_off(self) -> None:
        """Return when no connection is left."""
        while self.listener.connections:
            await asyncio.sleep(0.01)
        self.listener.end()


def test_who_reads_slowly_is_served(listening: socket.socket) -> None:
    async def case() -> None:
        talker = Talker(listening)
        with await talker.meet() as sock:
            # From one look at the reader to the next it takes much less than what the kernel holds.
            for _ in range(100):
                await asyncio.get_running_loop().sock_recv(sock, 16384)
                await asyncio.sleep(0.02)
                assert not talker.gone.is_set()
        await talker.cut_off()

    run(case)


def test_who_reads_nothing_is_cut_off(listening: socket.socket) -> None:
    async def case() -> None:
        talker = Talker(listening)
        with await talker.meet():
            await talker.gone.wait()
            await talker.cut_off()

    run(case)


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
@pytest.mark.parametrize("message", [GET, LAST_GET], ids=["kept", "closing"])
def test_who_reads_nothing_of_an_answer_that_is_over_is_cut_off(
    listening: socket.socket, message: bytes, fails: bool
) -> None:
    """Else connection and descriptor would stay for as long as the client does."""

    async def case() -> None:
        talker = Talker(listening, ends=True, fails=fails)
        with await talker.meet(message):
            await talker.over.wait()
            assert talker.unwritten
            await talker.cut_off()

    run(case)
