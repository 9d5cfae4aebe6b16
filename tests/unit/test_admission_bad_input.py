"""What bad requests get: a 4xx with its reason in the dialect's error form, no slot lost, no traceback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from admission_raw import GOOD, error_of, raw_exchange, status_of
from admission_support import Door, nothing_lost, receive_all, request
from waiting import until


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    deadlines = {"bodies.BODY_SECONDS": 1.0, "protocol.REST_SECONDS": 1.0}
    door = Door(
        tmp_path_factory.mktemp("door") / "a", deadlines, max_in_flight=4, max_model_len=1 << 17, max_body_bytes=1 << 20
    )
    yield door
    door.stop()


@pytest.fixture(autouse=True)
def _nothing_lost(door: Door) -> Iterator[None]:
    with nothing_lost(door):
        yield


BROKEN_BODIES = {
    "empty": b"",
    "broken": b'{"model": "fake"',
    "trailing": GOOD + b"x",
    "a list": b"[]",
    "a word": b'"hello"',
    "null": b"null",
    "NaN": b'{"model": "fake", "temperature": NaN}',
    "infinity": b'{"model": "fake", "temperature": -Infinity}',
    "beyond a double": b'{"model": "fake", "temperature": 1e999}',
    "thousands of digits": b'{"model": "fake", "seed": 1' + b"0" * 5000 + b"}",
    "UTF-16": '{"model": "fake"}'.encode("utf-16"),
    "UTF-16 without a mark": '{"model": "fake"}'.encode("utf-16-le"),
    "UTF-32": '{"model": "fake"}'.encode("utf-32"),
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "Latin-1": '{"model": "fake", "user": "é"}'.encode("latin-1"),
    "overlong UTF-8": b'{"model": "\xc0\xaf"}',
    "a surrogate": b'{"model": "fake", "user": "\xed\xa0\x80"}',
    "half of an escaped pair": rb'{"model": "fake", "user": "\ud83d"}',
    "half of an escaped pair in capitals": rb'{"model": "fake", "user": "\uD83D!"}',
    "deep": b'{"a":' + b"[" * 101 + b"]" * 101 + b"}",
    "very deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 150 + b"1" + b"}" * 150,
    "a control character": b'{"model": "fa\x01ke"}',
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
}


@pytest.mark.parametrize("body", BROKEN_BODIES.values(), ids=BROKEN_BODIES.keys())
def test_a_body_that_is_no_json_object(door: Door, body: bytes) -> None:
    answer = door.ask(body)
    assert answer.status == 400
    error = answer.json["error"]
    assert error["code"] == "invalid_body"
    assert error["message"].startswith("the body cannot be read: ")


def test_what_is_deep_but_not_absurd_passes(door: Door) -> None:
    nested: object = 1
    for _ in range(60):
        nested = [nested]
    assert door.ask({"metadata": nested, "many": [[]] * 500}).status == 200


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/x-ndjson",
     "application/json; charset=latin-1", "application/json, text/plain", "", "x" * 500],
)  # fmt: skip
def test_a_wrong_content_type(door: Door, kind: str) -> None:
    answer = door.ask(headers={"Content-Type": kind})
    assert answer.status == 415
    assert "application/json" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"']
)
def test_a_right_content_type(door: Door, kind: str) -> None:
    assert door.ask(headers={"Content-Type": kind}).status == 200


def test_no_and_two_content_types(door: Door) -> None:
    none = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
    assert status_of(raw_exchange(door, none)) == 415
    twice = request(GOOD, b"content-type: application/json", b"connection: close")
    assert status_of(raw_exchange(door, twice)) == 415


def test_a_compressed_body(door: Door) -> None:
    assert door.ask(headers={"Content-Encoding": "gzip"}).status == 415


def test_a_large_body_is_refused_by_its_length_and_the_sender_reads_it(door: Door) -> None:
    # http.client sends all of it before it looks for an answer.
    answer = door.ask(b"x" * (100 << 20))
    assert answer.status == 413
    assert "1048576 bytes" in answer.json["error"]["message"]
    assert answer.headers["connection"] == "close"


def test_a_length_that_is_only_claimed_is_answered_at_once(door: Door) -> None:
    sock = door.send(request(b"{", length=1 << 40))
    assert status_of(sock.recv(65536)) == 413
    sock.close()


def test_a_large_chunked_body_is_counted(door: Door) -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    raw = raw_exchange(door, head, chunk * 40, b"0\r\n\r\n")
    assert status_of(raw) == 413
    assert error_of(raw)["code"] == "body_too_large"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_body_that_stalls(door: Door, path: str) -> None:
    raw = raw_exchange(door, request(b'{"model":', length=1000, path=path.encode()))
    assert status_of(raw) == 408
    assert error_of(raw)["code"] == "body_timeout"


def test_a_body_that_trickles(door: Door) -> None:
    sock = door.send(request(b"{", length=1000))
    raw = b""
    sock.settimeout(0.1)

    def answered() -> bool:
        nonlocal raw
        sock.send(b" ")
        try:
            raw += sock.recv(65536)
        except TimeoutError:
            return False
        return True

    until(answered)
    sock.close()
    assert status_of(raw) == 408


def test_header_injection_by_an_origin_and_a_path(door: Door) -> None:
    answer = door.ask(headers={"Origin": "http://x\x0bset-cookie: a=b"})
    assert "set-cookie" not in answer.headers
    answer = door.ask(path="/v1/models%0d%0aset-cookie:%20a=b", method="GET")
    assert answer.status == 404
    assert "set-cookie" not in answer.headers


def test_no_such_route(door: Door) -> None:
    for method, path in (
        ("GET", "/"), ("POST", "/invocations"), ("GET", "/metrics"), ("GET", "/slimserve/state"),
        ("GET", "/fake/state"), ("POST", "/slimserve/drain"), ("HEAD", "/docs"), ("HEAD", "/metrics"),
        ("POST", "/v1/chat/completions/"), ("POST", "//v1/chat/completions"),
    ):  # fmt: skip
        answer = door.ask(path=path, method=method)
        assert answer.status == 404, (method, path)
        assert method == "HEAD" or answer.json["error"]["type"] == "not_found_error"
    assert door.state.accepting


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "OPTIONS"])
def test_a_method_that_a_route_does_not_take(door: Door, method: str) -> None:
    answer = door.ask(path="/v1/chat/completions", method=method)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert method == "HEAD" or answer.json["error"]["code"] == "method_not_allowed"


def test_a_head_is_the_answer_to_a_get_without_its_body(door: Door) -> None:
    get, head = (door.ask(path="/v1/models", method=method) for method in ("GET", "HEAD"))
    assert (head.status, head.headers["content-length"]) == (200, get.headers["content-length"])
    assert (bool(get.body), head.body) == (True, b"")


@pytest.mark.parametrize(
    ("change", "param"),
    [({"n": 10**9}, "n"), ({"n": 5}, "n"), ({"max_tokens": 10**9}, "max_tokens"), ({"temperature": -1}, "temperature"),
     ({"top_p": "NaN"}, "top_p"), ({"top_k": -5.5}, "top_k")],
)  # fmt: skip
def test_values_that_no_model_can_serve(door: Door, change: dict[str, object], param: str) -> None:
    answer = door.ask(change)
    assert answer.status == 400
    assert answer.json["error"]["param"] == param


def test_errors_speak_the_dialect(door: Door) -> None:
    answer = door.ask(b"{", path="/v1/messages")
    assert answer.status == 400
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == "invalid_request_error"


def test_a_rest_of_a_body_that_never_comes_is_not_waited_for(door: Door) -> None:
    raw = raw_exchange(door, request(b"{", b"x-pad: y", length=50_000, path=b"/nowhere"))
    assert status_of(raw) == 404


def test_a_tcp_client_cannot_pass_for_the_supervisor(door: Door, tmp_path: Path) -> None:
    control = str(door.control.path).encode()
    for line in (b"GET " + control, b"GET http://" + control, b"GET /slimserve/state"):
        for header in (b"host: " + control, b"x-forwarded-for: unix", b"forwarded: for=unix"):
            raw = raw_exchange(door, line + b" HTTP/1.1\r\nconnection: close\r\n" + header + b"\r\n\r\n")
            assert status_of(raw) in (400, 404)
    with socket.create_connection(("127.0.0.1", door.bare)) as bare:  # such a path does exist inside
        bare.sendall(b"GET /fake/state HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert status_of(receive_all(bare)) == 200
