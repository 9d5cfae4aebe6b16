"""Parts of the door by themselves: what counts as a stall, errors, bodies, and a connection's deadlines."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from slimserve.admission import bodies, exchange, protocol
from slimserve.admission.config import Config
from slimserve.admission.exchange import Exchange
from slimserve.admission.listener import Listener
from slimserve.admission.metrics import Metrics
from slimserve.admission.middleware import Admission
from slimserve.admission.progress import Progress
from slimserve.admission.rejection import Rejected
from slimserve.admission.replies import error_body
from slimserve.admission.slots import Slots

Message = dict[str, Any]
START: Message = {"type": "http.response.start", "status": 200, "headers": []}
END: Message = {"type": "http.response.body", "body": b"", "more_body": False}


def run(case: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await case()

    asyncio.run(within())


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Waits:
    def __init__(self, since: float | None) -> None:
        self.since = since


def test_a_stall_is_the_engine_s_alone() -> None:
    clock = Clock()
    progress = Progress(clock)
    clock.now += 500
    assert progress.stalled_seconds == 0  # idle
    waits = Waits(clock.now)
    progress.waiting.add(waits)
    assert progress.stalled_seconds == 0
    clock.now += 7
    assert progress.stalled_seconds == 7
    progress.mark()
    clock.now += 2
    assert progress.stalled_seconds == 2
    waits.since = None  # its client does not read
    assert progress.stalled_seconds == 0
    progress.waiting.add(Waits(clock.now))
    clock.now += 3
    assert progress.stalled_seconds == 3


def one_slot() -> Slots:
    return Slots(1, fair_share=False, queue=None)


def exchange_of(progress: Progress, slots: Slots, receive: Any, send: Any) -> Awaitable[Exchange]:
    async def made() -> Exchange:
        return Exchange(receive, send, b"{}", await slots.take("a"), progress, Metrics(CollectorRegistry()))

    return made()


async def never(*_: Any) -> Message:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


def test_a_client_that_does_not_read_is_no_stall() -> None:
    async def case() -> None:
        clock = Clock()
        progress, slots = Progress(clock), one_slot()
        reads, blocked = asyncio.Event(), asyncio.Event()
        more = asyncio.Event()

        async def send(message: Message) -> None:
            blocked.set()
            await reads.wait()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await more.wait()
            await send(START)
            more.clear()
            await more.wait()
            await send(END)

        under_way = await exchange_of(progress, slots, never, send)
        task = asyncio.create_task(under_way.run(app, {}))
        await asyncio.sleep(0)
        clock.now += 100
        assert progress.stalled_seconds == 100  # the engine owes the beginning
        more.set()
        await blocked.wait()
        clock.now += 100
        assert progress.stalled_seconds == 0  # the client owes the reading
        reads.set()
        while more.is_set():
            await asyncio.sleep(0)
        clock.now += 30
        assert progress.stalled_seconds == 30  # and now the engine the end
        more.set()
        await task
        assert (progress.stalled_seconds, slots.in_flight, under_way.outcome) == (0, 0, "ok")

    run(case)


def test_what_is_no_generation_is_no_sign_of_the_engine_s_life() -> None:
    async def case() -> None:
        clock = Clock()
        progress = Progress(clock)
        before = progress.last

        async def send(message: Message) -> None:
            clock.now += 1

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            await send(END)

        await Exchange(never, send, None, None, progress, Metrics(CollectorRegistry())).run(app, {})
        assert progress.last == before

    run(case)


def test_an_engine_that_ignores_everything_loses_the_slot_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LISTEN_SECONDS", 0)
    monkeypatch.setattr(exchange, "GRACE_SECONDS", 0)

    async def case() -> None:
        progress, slots = Progress(), one_slot()
        let_go, cancelled = asyncio.Event(), asyncio.Event()

        async def gone() -> Message:
            return {"type": "http.disconnect"}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            while not let_go.is_set():
                try:
                    await let_go.wait()
                except asyncio.CancelledError:
                    cancelled.set()

        under_way = await exchange_of(progress, slots, gone, never)
        task = asyncio.create_task(under_way.run(app, {}))
        await cancelled.wait()
        assert slots.in_flight == 0
        assert not progress.waiting
        assert not task.done()
        let_go.set()
        await task
        assert (slots.in_flight, under_way.outcome) == (0, "disconnected")

    run(case)


def test_a_websocket_is_closed() -> None:
    async def case() -> None:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        door = Admission(never, Config(max_in_flight=1, max_model_len=10))
        await door({"type": "websocket", "path": "/v1/realtime", "server": ("127.0.0.1", 1)}, never, send)
        assert sent == [{"type": "websocket.close", "code": 1008}]

    run(case)


def test_a_prefix_of_the_path_is_denied() -> None:
    async def case() -> None:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        door = Admission(never, Config(max_in_flight=1, max_model_len=10))
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "root_path": "/v1", "headers": []}
        await door(scope, never, send)
        assert sent[0]["status"] == 404

    run(case)


def test_the_configuration_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIMSERVE_ADMISSION", raising=False)
    with pytest.raises(ValueError, match="SLIMSERVE_ADMISSION is not set"):
        Admission(never)
    monkeypatch.setenv("SLIMSERVE_ADMISSION", '{"max_in_flight": 7, "max_model_len": 10}')
    assert Admission(never).state["cap"] == 7


KINDS = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
}


@pytest.mark.parametrize(("status", "kinds"), KINDS.items())
def test_the_forms_of_an_error(status: int, kinds: tuple[str, str]) -> None:
    rejected = Rejected(status, "what and why", param="n", code="word")
    openai = error_body(rejected, "/v1/chat/completions")
    assert openai == {"error": {"message": "what and why", "type": kinds[0], "param": "n", "code": "word"}}
    anthropic = error_body(rejected, "/v1/messages/count_tokens")
    assert anthropic == {"type": "error", "error": {"type": kinds[1], "message": "what and why"}}


def test_the_body_is_what_json_says() -> None:
    data = {"a": [1, 2.5, "ü\u2028\U0001f600", None, True], "b": {}}
    assert bodies.parse(json.dumps(data).encode()) == data
    assert bodies.parse(json.dumps(data, ensure_ascii=False).encode()) == data
    assert json.loads(bodies.dump(data)) == data


@pytest.fixture
def listening() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


async def ok(scope: Any, receive: Any, send: Any) -> None:
    await send({**START, "headers": [(b"content-length", b"0")]})
    await send(END)


def test_a_listener_opens_and_closes_and_keeps_the_socket(listening: socket.socket) -> None:
    async def case() -> None:
        door = Listener(ok, listening.fileno())
        for _ in range(3):
            door.open()
            door.open()
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            door.close()
            door.close()
            # Who was there stays there; who comes now waits.
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            writer.close()
        waiting_reader, waiting = await asyncio.open_connection(*listening.getsockname())
        waiting.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        door.open()
        assert b"200 OK" in await waiting_reader.readuntil(b"\r\n\r\n")
        waiting.close()
        door.end()

    run(case)


def test_a_descriptor_that_is_no_socket() -> None:
    async def case() -> None:
        with open("/dev/null") as file, pytest.raises(OSError, match="socket"):
            Listener(ok, file.fileno()).open()

    run(case)


def test_the_next_request_is_waited_for_after_a_body_that_came_late(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "KEEP_ALIVE_SECONDS", 0.05)

    async def case() -> None:
        door = Listener(ok, listening.fileno())
        door.open()
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n12")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"34")
        assert await reader.read() == b""  # and then it is closed, not kept for ever
        writer.close()
        door.end()

    run(case)
