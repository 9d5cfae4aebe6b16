"""What is answered while no engine is there."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from slimserve.engine.front import Front
from slimserve.engine.state import Board, State


@pytest.fixture
def port() -> Iterator[int]:
    board = Board()
    board.move(State.LOADING, "the weights are read")
    with socket.create_server(("127.0.0.1", 0)) as public:
        front = Front(public, board)
        front.accept()
        yield public.getsockname()[1]
        front.close()


def ask(port: int, method: str, path: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, b"{}" if method == "POST" else None)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_each_client_is_told_in_its_own_form(port: int, path: str) -> None:
    response, body = ask(port, "POST", path)
    assert response.status == 503
    assert 1 <= int(response.headers["Retry-After"]) <= 60
    assert response.headers["Cache-Control"] == "no-store"
    assert response.headers["Content-Type"] == "application/json"
    answer: dict[str, Any] = json.loads(body)
    message = answer["error"].pop("message")
    assert message.startswith("the endpoint is loading: the weights are read; ask again in ")
    if path == "/v1/messages":
        assert answer == {"type": "error", "error": {"type": "overloaded_error"}}
    else:
        assert answer == {"error": {"type": "server_error", "param": None, "code": "endpoint_loading"}}


@pytest.mark.parametrize(("usual", "retry_after"), [(34, "34"), (69, "60")])
def test_who_stops_says_that_it_does_not_come_back_by_itself(usual: int, retry_after: str) -> None:
    board = Board(usual={State.LOADING: usual - 4.0, State.WARMING: 4.0})
    board.move(State.DRAINING, "told to stop; what runs may finish", deadline_seconds=300.0)
    with socket.create_server(("127.0.0.1", 0)) as public:
        front = Front(public, board)
        front.accept()
        response, body = ask(public.getsockname()[1], "POST", "/v1/chat/completions")
        front.close()
    assert response.headers["Retry-After"] == retry_after
    message = json.loads(body)["error"]["message"]
    assert message.startswith("the endpoint is draining: told to stop; what runs may finish; it does not come back by ")
    assert message.endswith(f"that takes about {usual} s, and to ask sooner is in vain")


def test_where_anybody_may_ask_the_reason_is_left_out() -> None:
    board = Board()
    board.move(State.RESTARTING, "its process 12 (VLLM::EngineCore) died first")
    with socket.create_server(("0.0.0.0", 0)) as public:
        front = Front(public, board)
        front.accept()
        response, body = ask(public.getsockname()[1], "GET", "/health")
        front.close()
    assert response.status == 503
    message = json.loads(body)["error"]["message"]
    assert message == f"the endpoint is restarting; ask again in {response.headers['Retry-After']} s"


def test_a_head_has_no_body(port: int) -> None:
    response, body = ask(port, "HEAD", "/health")
    assert (response.status, body) == (503, b"")
    assert int(response.headers["Content-Length"]) > 0


@pytest.mark.parametrize("head", [b"", b"nonsense", b"\xff\xfe\x00 \x00", b"GET", b"x" * (64 << 10)])
def test_whatever_comes_is_answered(port: int, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        sock.sendall(head + b"\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
