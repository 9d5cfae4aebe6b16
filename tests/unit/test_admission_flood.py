"""Many requests at once: heads are judged as they are read, and the deadlines of connections cost no timers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from admission_raw import GET, LAST_GET, error_of, generate, status_of, statuses_of

from slimserve.admission import listener, protocol
from slimserve.admission.config import Config
from slimserve.admission.deadline import Deadline
from slimserve.admission.listener import Listener
from slimserve.admission.middleware import Admission
from slimserve.admission.rejection import Rejected
from slimserve.admission.replies import raw_answer, raw_refusal
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


# The engine's loop is the first; the other one must do as well.
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [uvloop.new_event_loop, asyncio.new_event_loop]


@pytest.fixture(autouse=True, params=LOOPS, ids=["uvloop", "asyncio"])
def _loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LOOPS", [request.param])


def within(case: Callable[[House], Any]) -> None:
    """Run a case, in a minute at most."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            async with asyncio.timeout(60):
                await case(House(listening))

    with asyncio.Runner(loop_factory=LOOPS[0]) as runner:
        runner.run(run())


async def answer_to(sock: socket.socket, end: bytes) -> bytes:
    raw = b""
    while not raw.endswith(end):
        piece = await asyncio.get_running_loop().sock_recv(sock, 65536)
        assert piece, raw
        raw += piece
    return raw


def test_of_those_that_come_together_no_more_become_tasks_than_there_is_room_for() -> None:
    async def case(house: House) -> None:
        socks = await house.connect(3 * CAP)
        for sock in socks:
            sock.send(generate())  # nothing is read before all have sent
        refused = [await answer_to(sock, b"}}") for sock in socks[CAP:]]
        assert {status_of(raw) for raw in refused} == {429}
        assert f"{CAP} of {CAP} sequences are in flight" in error_of(refused[0])["message"]
        assert (house.tasks, house.door.slots.in_flight) == (CAP, CAP)
        house.let_go.set()
        for sock in socks[:CAP]:
            assert status_of(await answer_to(sock, b"ok")) == 200
        await house.empty()
        await house.leave(socks)

    within(case)


def test_a_slot_comes_back_from_a_task_that_never_began() -> None:
    async def case(house: House) -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def end_it() -> None:
            for task in asyncio.all_tasks() - known:
                task.cancel()
            ended.set()

        socks = await house.connect(1)
        known = asyncio.all_tasks()
        house.on_slot = lambda: loop.call_soon(end_it)  # which is before the task's first step
        socks[0].send(generate())
        await ended.wait()
        await house.empty()
        assert house.tasks == 0
        await house.leave(socks)

    within(case)


def test_a_slot_comes_back_from_a_request_that_is_refused_later() -> None:
    async def case(house: House) -> None:
        socks = await house.connect(1)
        house.on_slot = lambda: setattr(house.door, "accepting", False)
        socks[0].send(generate())
        assert status_of(await answer_to(socks[0], b"}}")) == 503
        await house.empty()
        await house.leave(socks)

    within(case)


async def full(house: House) -> list[socket.socket]:
    """A house without room, and whom it is full of."""
    socks = await house.connect(CAP)
    for sock in socks:
        sock.send(generate())
    while house.tasks < CAP:
        await asyncio.sleep(0)
    return socks


def test_who_is_refused_and_asks_again_in_the_same_words() -> None:
    async def case(house: House) -> None:
        held = await full(house)
        (sock,) = socks = await house.connect(CAP + 1)
        for _ in range(3):
            sock.send(generate())
            assert status_of(await answer_to(sock, b"}}")) == 429
        sock.send(generate().replace(b"hello", b"world"))  # another body as long is another's business
        assert status_of(await answer_to(sock, b"}}")) == 429
        house.door.accepting = False
        sock.send(generate())
        assert status_of(await answer_to(sock, b"}}")) == 503
        house.door.accepting = True
        sock.send(generate())
        assert status_of(await answer_to(sock, b"}}")) == 429
        house.let_go.set()
        for each in held:
            assert status_of(await answer_to(each, b"ok")) == 200
        await house.empty()
        tasks = house.tasks
        sock.send(generate())
        assert status_of(await answer_to(sock, b"ok")) == 200
        await house.empty()
        assert house.tasks == tasks + 1
        await house.leave([*held, *socks])

    within(case)


def test_who_is_refused_and_asks_for_more_at_once() -> None:
    async def case(house: House) -> None:
        held = await full(house)
        (sock,) = socks = await house.connect(CAP + 1)
        data, get = generate(), LAST_GET.replace(b"/v1/models", b"/nowhere")
        for sent, statuses in ((data, [429]), (2 * data, [429, 429]), (data, [429]), (data + get, [429, 404])):
            sock.send(sent)
            raw = b""
            while statuses_of(raw) != statuses or not raw.endswith(b"}}"):
                raw += await asyncio.get_running_loop().sock_recv(sock, 65536)
        await house.leave([*held, *socks])

    within(case)


def test_the_end_of_a_refused_request_is_none() -> None:
    async def case(house: House) -> None:
        held = await full(house)
        known = set(house.listener.connections)
        (sock,) = socks = await house.connect(CAP + 1)
        (connection,) = house.listener.connections - known
        data = generate()
        sock.send(data[:20])
        while not connection._in_message:
            await asyncio.sleep(0)
        sock.send(data[20:])
        assert status_of(await answer_to(sock, b"}}")) == 429
        sock.send(data[20:])
        assert status_of(await answer_to(sock, b"}}")) == 400
        await house.leave([*held, *socks])

    within(case)


def test_what_is_said_to_many_is_said_as_to_one() -> None:
    refusal = Rejected(429, "no room", code="full", headers={"Retry-After": "3"})
    other = Rejected(429, "no room", code="full", headers={"Retry-After": "4"})
    for each in (refusal, other, refusal):
        for path in ("/v1/chat/completions", "/v1/messages"):
            for date in (b"now", b"later"):
                more = ((b"date", date),)
                assert raw_refusal(each, path, more) == raw_answer(each, path, more=more)


class Clock:
    """A loop's clock and timers, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, then: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, then))
        return self.timers[-1]

    def move(self, now: float) -> None:
        while due := [timer for timer in self.timers if timer.when <= now and not timer.over]:
            first = min(due, key=lambda timer: timer.when)
            self.now, first.over = first.when, True
            first.then()
        self.now = now


class Timer:
    def __init__(self, when: float, then: Callable[[], None]) -> None:
        self.when, self.then, self.over = when, then, False

    def cancel(self) -> None:
        self.over = True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_deadline_that_is_moved_on_costs_no_timer(clock: Clock) -> None:
    called: list[float] = []
    deadline = Deadline(clock)  # type: ignore[arg-type]  # what it uses of a loop
    for now in range(9):
        clock.move(float(now))
        deadline.set(10, lambda: called.append(clock.now))
    assert len(clock.timers) == 1
    clock.move(17.9)
    assert not called
    assert deadline.is_set
    clock.move(100.0)
    assert called == [18.0]
    assert not deadline.is_set


def test_a_deadline_that_comes_nearer_is_kept(clock: Clock) -> None:
    called: list[str] = []
    deadline = Deadline(clock)  # type: ignore[arg-type]
    deadline.set(75, lambda: called.append("far"))
    deadline.set(10, lambda: called.append("near"))
    clock.move(10.0)
    assert called == ["near"]
    clock.move(100.0)
    assert called == ["near"]


def test_a_deadline_that_is_lifted_or_over(clock: Clock) -> None:
    called: list[str] = []
    deadline = Deadline(clock)  # type: ignore[arg-type]
    deadline.set(10, lambda: called.append("lifted"))
    deadline.lift()
    assert not deadline.is_set
    clock.move(20.0)
    deadline.set(10, lambda: called.append("again"))
    clock.move(30.0)
    assert called == ["again"]
    deadline.set(10, lambda: called.append("over"))
    deadline.end()
    assert all(timer.over for timer in clock.timers)
    clock.move(50.0)
    assert called == ["again"]


async def known(house: House) -> socket.socket:
    """One of many who ask in the same words: what it asked was refused, and its head is known."""
    sock = (await house.connect(len(house.listener.connections) + 1))[0]
    sock.send(generate())
    assert status_of(await answer_to(sock, b"}}")) == 429
    return sock


def come(house: House, *sent: bytes) -> socket.socket:
    sock = socket.create_connection(house._name)
    sock.setblocking(False)
    for data in sent:
        sock.send(data)
    return sock


def test_who_comes_with_a_known_head_is_refused_in_the_lobby_and_served_when_there_is_room() -> None:
    async def case(house: House) -> None:
        held = await full(house)
        first = await known(house)
        served = len(house.listener.connections)
        one, other = come(house, generate()), come(house, generate())
        for sock in (one, other, one):
            assert status_of(await answer_to(sock, b"}}")) == 429
            sock.send(generate())
        assert status_of(await answer_to(one, b"}}")) == 429
        assert status_of(await answer_to(other, b"}}")) == 429
        assert (len(house.listener._lobby), len(house.listener.connections)) == (2, served)
        house.let_go.set()
        for each in held:
            assert status_of(await answer_to(each, b"ok")) == 200
        await house.empty()
        for sock in (one, other, late := come(house, generate())):
            if sock is not late:
                sock.send(generate())
            assert status_of(await answer_to(sock, b"ok")) == 200
        assert len(house.listener._lobby) == 0
        await house.empty()
        await house.leave([*held, first, one, other, late])

    within(case)


@pytest.mark.parametrize("at", [1, 20, -1])
@pytest.mark.parametrize("rest", [False, True])
def test_what_comes_in_pieces_leaves_the_lobby_whole(at: int, rest: bool) -> None:
    async def case(house: House) -> None:
        held = await full(house)
        first = await known(house)
        sock = come(house, *([generate()] if rest else []))
        if rest:
            assert status_of(await answer_to(sock, b"}}")) == 429
            assert len(house.listener._lobby) == 1
        served = len(house.listener.connections)
        sock.send(generate()[:at])
        while len(house.listener.connections) == served:
            await asyncio.sleep(0)
        sock.send(generate()[at:])
        assert status_of(await answer_to(sock, b"}}")) == 429
        sock.send(2 * generate())
        raw = b""
        while statuses_of(raw) != [429, 429]:
            raw += await asyncio.get_running_loop().sock_recv(sock, 65536)
        await house.leave([*held, first, sock])

    within(case)


def test_several_requests_at_once_are_answered_in_the_lobby_s_stead() -> None:
    async def case(house: House) -> None:
        held = await full(house)
        first = await known(house)
        get = LAST_GET.replace(b"/v1/models", b"/nowhere")
        for sent, statuses in ((2 * generate(), [429, 429]), (generate() + get, [429, 404])):
            sock, raw = come(house, sent), b""
            while statuses_of(raw) != statuses or not raw.endswith(b"}}"):
                raw += await asyncio.get_running_loop().sock_recv(sock, 65536)
            sock.close()
        await house.leave([*held, first])

    within(case)


@pytest.mark.parametrize("abruptly", [False, True])
def test_who_goes_from_the_lobby_leaves_nothing(abruptly: bool) -> None:
    async def case(house: House) -> None:
        held = await full(house)
        first = await known(house)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(20):
            sock = come(house, generate())
            if number % 2:
                assert status_of(await answer_to(sock, b"}}")) == 429
            if abruptly:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        while len(house.listener._lobby) or len(os.listdir("/proc/self/fd")) > before:
            await asyncio.sleep(0.01)
        await house.leave([*held, first])

    within(case)


def test_a_silent_one_is_sent_out_of_the_lobby(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "KEEP_ALIVE_SECONDS", 0.4)

    async def case(house: House) -> None:
        loop = asyncio.get_running_loop()
        held = await full(house)
        first = await known(house)
        silent, other = come(house, generate()), come(house, generate())
        for sock in (silent, other):
            assert status_of(await answer_to(sock, b"}}")) == 429
        until = loop.time() + 0.8
        gone = asyncio.create_task(loop.sock_recv(silent, 10))
        while loop.time() < until:
            other.send(generate())
            assert status_of(await answer_to(other, b"}}")) == 429
            await asyncio.sleep(0.02)
        assert await gone == b""
        assert len(house.listener._lobby) == 1
        assert await loop.sock_recv(other, 10) == b""
        await house.leave([*held, first, silent, other])

    within(case)


def test_a_newcomer_takes_the_place_of_the_longest_silent_in_the_lobby() -> None:
    async def case(house: House) -> None:
        held = await full(house)
        (await known(house)).close()
        while len(house.listener.connections) > CAP:
            await asyncio.sleep(0)
        socks = [come(house, generate()) for _ in range(3)]
        for sock in socks:
            assert status_of(await answer_to(sock, b"}}")) == 429
        socks[0].send(generate())
        assert status_of(await answer_to(socks[0], b"}}")) == 429
        house.listener._most = CAP + 3
        late = come(house, generate())
        assert status_of(await answer_to(late, b"}}")) == 429
        assert await asyncio.get_running_loop().sock_recv(socks[1], 10) == b""
        assert len(house.listener._lobby) == 3
        await house.leave(held)
        for sock in (socks[0], socks[2], late):
            assert await asyncio.get_running_loop().sock_recv(sock, 10) == b""
            sock.close()

    within(case)


def test_who_was_idle_for_longer_makes_room_before_anyone_in_the_lobby() -> None:
    async def case(house: House) -> None:
        held = await full(house)
        first = await known(house)
        idle = await house.connect(CAP + 1 + 3)
        assert house.listener._acceptor is not None
        while house.listener._acceptor.serving:  # which counts too, until it is over
            await asyncio.sleep(0)
        house.listener._most = CAP + 1 + 3
        newcomers = [come(house, generate()) for _ in range(4)]  # taken in one turn
        for sock in newcomers:
            assert status_of(await answer_to(sock, b"}}")) == 429
        assert len(house.listener._lobby) == 4
        for sock in (first, *idle):
            assert await asyncio.get_running_loop().sock_recv(sock, 10) == b""
        await house.leave([*held, first, *idle, *newcomers])

    within(case)


@pytest.mark.parametrize("room", [0, 10])
def test_who_does_not_take_a_refusal_is_sent_out_of_the_lobby(room: int) -> None:
    """Whole or not at all: what does not fit into the socket is not kept for a client that reads nothing."""

    async def case(house: House) -> None:
        held = await full(house)
        first = await known(house)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(bytes(1 << 12))
        theirs.recv(room)
        theirs.send(generate())
        house.listener._lobby.enter(ours)
        assert ours.fileno() == -1
        assert len(house.listener._lobby) == 0
        theirs.close()
        await house.leave([*held, first])

    within(case)


def test_a_slot_comes_back_from_a_client_that_is_gone_before_it_is_let_in() -> None:
    async def case(house: House) -> None:
        held = await full(house)
        first = await known(house)
        house.let_go.set()
        for each in held:
            assert status_of(await answer_to(each, b"ok")) == 200
        await house.empty()
        for _ in range(CAP * 3):
            sock = socket.create_connection(house._name)
            sock.send(generate())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            await asyncio.sleep(0)
        await house.empty()
        await house.leave([*held, first])

    within(case)


def test_a_line_of_refused_requests_lets_others_have_their_turn() -> None:
    """However many of them came at once: one connection must not keep the loop from all others."""

    async def case(house: House) -> None:
        held = await full(house)
        greedy, other = socks = await house.connect(CAP + 2)
        loop, count = asyncio.get_running_loop(), 3000
        line = asyncio.create_task(loop.sock_sendall(greedy, count * generate()))
        raw = await loop.sock_recv(greedy, 1 << 20)
        other.send(GET.replace(b"/v1/models", b"/nowhere"))
        answered = asyncio.create_task(answer_to(other, b"}}"))
        while not answered.done():
            raw += await loop.sock_recv(greedy, 1 << 20)
        assert raw.count(b"HTTP/1.1 429") < count // 2
        while raw.count(b"HTTP/1.1 429") < count or not raw.endswith(b"}}"):
            raw += await loop.sock_recv(greedy, 1 << 20)
        assert statuses_of(raw) == [429] * count
        await line
        await house.leave([*held, *socks])

    within(case)


def test_a_body_of_the_smallest_chunks_lets_others_have_their_turn() -> None:
    async def case(house: House) -> None:
        slow, other = socks = await house.connect(2)
        (connection,) = [one for one in house.listener.connections if one.client == slow.getsockname()]
        slow.send(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        chunks = asyncio.create_task(asyncio.get_running_loop().sock_sendall(slow, 200_000 * b"1\r\nx\r\n"))
        while not connection._behind:
            await asyncio.sleep(0)
        other.send(GET.replace(b"/v1/models", b"/nowhere"))
        answered = asyncio.create_task(answer_to(other, b"}}"))
        turns = 0
        while not answered.done():
            assert len(connection._behind) <= 1 << 18
            turns += 1
            await asyncio.sleep(0)
        assert turns < 40
        chunks.cancel()
        await house.leave(socks)

    within(case)


def test_who_asks_and_asks_and_reads_no_refusal_is_cut_off() -> None:
    """At once: what is written and not read would hold the connection for as long as a byte is read now and then."""

    async def case(house: House) -> None:
        held = await full(house)
        known = set(house.listener.connections)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(house._name)
        sock.setblocking(False)
        while not (new := house.listener.connections - known):
            await asyncio.sleep(0)
        (connection,) = new
        asked, most = 100 * generate(), 0
        while connection in house.listener.connections:
            most = max(most, connection.transport.get_write_buffer_size())
            with contextlib.suppress(BlockingIOError, ConnectionError):
                sock.send(asked)
            await asyncio.sleep(0)
        assert 0 < most < 1 << 17
        assert connection not in house.listener._idle
        sock.close()
        await house.leave(held)

    within(case)


def test_who_was_refused_before_there_was_a_protocol_may_rest_as_long_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.1)

    async def case(house: House) -> None:
        held = await full(house)
        first = await known(house)
        late = socket.create_connection(house._name)
        late.setblocking(False)
        late.send(generate())
        assert status_of(await answer_to(late, b"}}")) == 429
        await asyncio.sleep(0.3)
        late.send(generate())
        assert status_of(await answer_to(late, b"}}")) == 429
        await house.leave([*held, first, late])

    within(case)
