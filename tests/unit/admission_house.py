"""A door on a socket of its own, in this process: what many connections at once do to it."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

import uvloop
from admission_raw import generate, status_of

from slimserve.admission.config import Config
from slimserve.admission.listener import Listener
from slimserve.admission.middleware import Admission
from slimserve.admission.rejection import Rejected
from slimserve.admission.slots import Slot
from slimserve.shapes import build

CAP = 4


class House:
    """A door on a socket of its own, before an engine that answers when `let_go` is set."""

    def __init__(self, listening: socket.socket) -> None:
        self.door = Admission(self._engine, build(Config, {"max_in_flight": CAP, "max_model_len": 4096}))
        self.door.accepting = True
        self.let_go = asyncio.Event()
        self.tasks = 0
        self.on_slot: Callable[[], object] = lambda: None
        self.listener = Listener(self, listening.fileno(), judge_head=self._judge_head)
        self.listener.open()
        self._name = listening.getsockname()

    def _judge_head(self, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> Rejected | Slot | None:
        judged = self.door.judge_head(method, path, headers)
        if isinstance(judged, Slot):
            self.on_slot()
        return judged

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.tasks += 1
        await self.door(scope, receive, send)

    async def _engine(self, scope: Any, receive: Any, send: Any) -> None:
        await self.let_go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def connect(self, count: int) -> list[socket.socket]:
        """New connections, until the door knows so many in all."""
        made: list[socket.socket] = []
        for _ in range(count - len(self.listener.connections)):
            made.append(sock := socket.create_connection(self._name))
            sock.setblocking(False)
        while len(self.listener.connections) < count:
            await asyncio.sleep(0)
        return made

    async def empty(self) -> None:
        while self.door.slots.in_flight:
            await asyncio.sleep(0.01)

    async def leave(self, socks: list[socket.socket]) -> None:
        for sock in socks:
            sock.close()
        while self.listener.connections:
            await asyncio.sleep(0.01)
        self.listener.end()


def within(case: Callable[[House], Any]) -> None:
    """Run a case, in a minute at most: in the engine's loop, and in the other one, which must do as well."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            async with asyncio.timeout(60):
                await case(House(listening))

    for loop_factory in (uvloop.new_event_loop, asyncio.new_event_loop):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(run())


async def answer_to(sock: socket.socket, end: bytes) -> bytes:
    raw = b""
    while not raw.endswith(end):
        piece = await asyncio.get_running_loop().sock_recv(sock, 65536)
        assert piece, raw
        raw += piece
    return raw


async def full(house: House) -> list[socket.socket]:
    """A house without room, and whom it is full of."""
    socks = await house.connect(CAP)
    for sock in socks:
        sock.send(generate())
    while house.tasks < CAP:
        await asyncio.sleep(0)
    return socks


async def known(house: House) -> socket.socket:
    """One of many who ask in the same words: what it asked was refused, and its head is known."""
    sock = (await house.connect(len(house.listener.connections) + 1))[0]
    sock.send(generate())
    assert status_of(await answer_to(sock, b"}}")) == 429
    return sock


def come(house: House, *sent: bytes) -> socket.socket:
    """Someone new, all of whose words are there when the door looks."""
    sock = socket.create_connection(house._name)
    sock.setblocking(False)
    for data in sent:
        sock.send(data)
    while _not_arrived(sock):  # a busy machine delivers later, to this machine too
        time.sleep(0.0001)
    return sock


def _not_arrived(sock: socket.socket) -> int:
    """Bytes that the other side's kernel has not acknowledged."""
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
