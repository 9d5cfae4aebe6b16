"""Taking connections: together, when told to, and again after a shortage."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from slimserve import accepting
from slimserve.accepting import Acceptor


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as sock:
        yield sock


class Served:
    """Greets whom it is given, and counts."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, connection: socket.socket) -> None:
        self.count += 1
        with connection:
            await asyncio.get_running_loop().sock_sendall(connection, b"hello")


def run(case: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await case()

    asyncio.run(within())


async def greeting(address: tuple[str, int]) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    try:
        return await reader.read()
    finally:
        writer.close()


def accepting_for(listening: socket.socket, served: Served) -> Acceptor:
    acceptor = Acceptor(listening, lambda connection: acceptor.begin(served(connection)))
    return acceptor


def test_newcomers_are_let_in_together(listening: socket.socket) -> None:
    """Not one in each turn of the loop, which in a flood is long."""

    async def case() -> None:
        served = Served()
        acceptor = accepting_for(listening, served)
        socks = [socket.create_connection(listening.getsockname()) for _ in range(50)]
        acceptor.start()
        turns = 0
        while served.count < 50:
            await asyncio.sleep(0)
            turns += 1
        assert turns < 40
        for sock in socks:
            sock.close()
        acceptor.stop()

    run(case)


def test_it_starts_and_stops_as_often_as_it_is_told(listening: socket.socket) -> None:
    async def case() -> None:
        served = Served()
        acceptor = accepting_for(listening, served)
        for number in range(1, 4):
            acceptor.start()
            acceptor.start()
            assert await greeting(listening.getsockname()) == b"hello"
            acceptor.stop()
            acceptor.stop()
            waits = asyncio.create_task(greeting(listening.getsockname()))
            await asyncio.wait([waits], timeout=0.05)
            assert (waits.done(), served.count) == (False, 2 * number - 1)
            acceptor.start()
            assert await waits == b"hello"
        acceptor.stop()

    run(case)


def test_who_was_taken_before_it_stops_is_served(listening: socket.socket) -> None:
    async def case() -> None:
        acceptor = accepting_for(listening, Served())
        acceptor.start()
        with socket.create_connection(listening.getsockname()) as sock:
            while not acceptor.serving:
                await asyncio.sleep(0)
            acceptor.stop()
            sock.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(sock, 10) == b"hello"
        while acceptor.serving:
            await asyncio.sleep(0)

    run(case)


@pytest.mark.parametrize("stopped", [False, True])
def test_no_descriptor_left_is_waited_out(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setattr(accepting, "SHORTAGE_SECONDS", 0.01)
    failures = [OSError(24, "Too many open files")] * 3
    real = socket.socket.accept

    def accept(self: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)

    async def case() -> None:
        acceptor = accepting_for(listening, Served())
        acceptor.start()
        waits = asyncio.create_task(greeting(listening.getsockname()))
        if stopped:
            while len(failures) == 3:
                await asyncio.sleep(0)
            acceptor.stop()
            await asyncio.wait([waits], timeout=0.05)
            assert (waits.done(), len(failures)) == (False, 2)
            acceptor.start()
        assert await waits == b"hello"
        assert not failures
        acceptor.stop()

    run(case)
