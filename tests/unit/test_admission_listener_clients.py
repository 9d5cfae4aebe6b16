"""Clients that go away, whatever they sent before, and what waits behind a request: nothing is held for who is gone."""

from __future__ import annotations

import json
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from admission_raw import GET, GOOD, LAST_GET, generate, status_of, statuses_of
from admission_support import Door, chat, receive_all, receive_until, release, request
from waiting import until

from slimserve.admission.listener import SPARE_DESCRIPTORS

MakeDoor = Callable[..., Door]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeDoor]:
    doors: list[Door] = []

    def make(settings: dict[str, float] | None = None, **config: Any) -> Door:
        doors.append(Door(tmp_path / "door", settings, **config))
        return doors[-1]

    yield make
    for door in doors:
        log = door.log.read_text()
        door.stop()
        assert "Traceback" not in log


def reset(sock: socket.socket) -> None:
    """Close it as a process that dies does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


BEHIND = {
    "a request": GET,
    "requests": generate(freeze=True) + generate(),
    "half a head": GET[:20],
    "a blank line": b"\r\n",
    "much": b"x" * (1 << 20),
}


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_nothing_that_is_sent_behind_a_request_hides_that_its_client_is_gone(make: MakeDoor, loop: str) -> None:
    door = make({"exchange.LISTEN_SECONDS": 0.1, "exchange.GRACE_SECONDS": 0.3}, loop=loop)
    for behind in BEHIND.values():
        for leave in (reset, socket.socket.close):
            # Two have no answer coming; those of two others find nobody.
            fakes = {"freeze": True}, {"stay": True}, {"delay": 0.1}, {"delay": 0.3, "deaf": True}
            socks = [door.send(generate(**fake) + behind) for fake in fakes]
            until(lambda: door.state.in_flight >= 2)
            for sock in socks:
                leave(sock)
            door.empty()
    assert door.ask(delay=0.5).status == 200


def test_a_body_that_came_in_one_piece_does_not_hide_that_its_client_is_gone(make: MakeDoor) -> None:
    door = make({"exchange.LISTEN_SECONDS": 0.1, "exchange.GRACE_SECONDS": 0.5})
    body = json.dumps(chat(freeze=True, deaf=True) | {"user": "x" * 100_000}).encode()
    for behind in (b"", GET):
        sock = door.send(request(body) + behind)
        until(lambda: door.state.in_flight == 1)
        sock.close()
        door.empty()


def test_garbage_behind_a_request_leaves_it_its_answer(make: MakeDoor) -> None:
    door = make()
    for streamed in (b"true", b"false"):
        good = request(GOOD.replace(b"{", b'{"stream": ' + streamed + b", ", 1))
        sock = door.send(good + b"\x00\x01\x02 garbage\r\n\r\n")
        first, _, second = receive_all(sock).rpartition(b"HTTP/1.1 400")
        sock.close()
        assert status_of(first) == 200
        assert b"word" in first
        assert b"invalid_http" in second


def test_more_behind_a_request_than_is_kept_ends_the_connection_with_its_answer(make: MakeDoor) -> None:
    door = make()
    small, large = GET * 100, GET * 1000
    sock = door.send(generate(delay=0.5) + small + LAST_GET)
    assert statuses_of(receive_all(sock)) == [200] * 102
    sock.close()
    sock = door.send(generate(delay=0.5) + large + LAST_GET)
    raw = receive_all(sock)
    sock.close()
    assert statuses_of(raw) == [200]
    assert b"word" in raw


def test_half_a_request_behind_another_has_its_time_from_the_answer_on(make: MakeDoor) -> None:
    door = make({"protocol.HEADER_SECONDS": 3.0})
    sock = door.send(generate(delay=4) + LAST_GET[:20])
    receive_until(sock, b"word")
    sock.sendall(LAST_GET[20:])
    assert receive_all(sock).endswith(b'"path": "/v1/models"}')
    sock.close()
    sock = door.send(generate() + LAST_GET[:20])
    assert statuses_of(receive_all(sock)) == [200, 408]
    sock.close()


def test_connections_leave_descriptors_to_the_supervisor(make: MakeDoor) -> None:
    door = make()
    process = door.process.pid
    own = len(list(Path(f"/proc/{process}/fd").iterdir()))
    hard = resource.prlimit(process, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(process, resource.RLIMIT_NOFILE, (own + SPARE_DESCRIPTORS + 200, hard))
    door.control.accept()
    socks = [door.send() for _ in range(SPARE_DESCRIPTORS + 300)]
    until(lambda: door.ask(path="/v1/models", method="GET").status == 200)
    assert door.state.accepting
    assert len(list(Path(f"/proc/{process}/fd").iterdir())) < own + 200 + SPARE_DESCRIPTORS // 2
    assert "cannot be accepted" not in door.log.read_text()
    release(socks)
    assert door.ask().status == 200
