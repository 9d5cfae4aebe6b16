"""Connections of which each request was refused wait as bare sockets, and leave when anything else comes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct

import pytest
from admission_house import CAP, House, answer_to, come, full, known, within
from admission_raw import LAST_GET, generate, status_of, statuses_of

from slimserve.admission import listener, protocol


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


def test_of_two_that_are_silent_for_as_long_the_idle_one_makes_room() -> None:
    """The engine's loop counts whole milliseconds: both may well have come in one."""

    async def case(house: House) -> None:
        held = await full(house)
        first = await known(house)
        waiting = come(house, generate())
        assert status_of(await answer_to(waiting, b"}}")) == 429
        while not house.listener._idle:
            await asyncio.sleep(0)
        (idle,) = house.listener._idle
        house.listener._idle[idle] = house.listener._lobby.silent_since
        assert house.listener._make_room()
        assert await asyncio.get_running_loop().sock_recv(first, 10) == b""
        assert len(house.listener._lobby) == 1
        await house.leave([*held, first, waiting])

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


def test_who_was_refused_before_there_was_a_protocol_may_rest_as_long_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.1)

    async def case(house: House) -> None:
        held = await full(house)
        first = await known(house)
        late = come(house, generate())
        assert status_of(await answer_to(late, b"}}")) == 429
        await asyncio.sleep(0.3)
        late.send(generate())
        assert status_of(await answer_to(late, b"}}")) == 429
        await house.leave([*held, first, late])

    within(case)
