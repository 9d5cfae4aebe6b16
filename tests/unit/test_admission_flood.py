"""Many requests at once: heads are judged as they are read, and nobody keeps the loop from others."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from admission_house import CAP, House, answer_to, full, within
from admission_raw import GET, LAST_GET, error_of, generate, status_of, statuses_of

from slimserve.admission.rejection import Rejected
from slimserve.admission.replies import raw_answer, raw_refusal


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
