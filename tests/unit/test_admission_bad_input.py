"""What bad input gets: a 4xx with its reason in the dialect's error form, no slot lost, no traceback."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from admission_support import Door, chat, receive_all, request
from waiting import until


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    deadlines = {"listener.HEADER_SECONDS": 1.0, "bodies.BODY_SECONDS": 1.0, "listener.REST_SECONDS": 1.0}
    door = Door(tmp_path_factory.mktemp("door") / "a", deadlines, max_in_flight=4, max_body_bytes=1 << 20)
    yield door
    door.stop()


@pytest.fixture(autouse=True)
def _nothing_lost(door: Door) -> Iterator[None]:
    before = door.log.stat().st_size
    yield
    door.empty()
    assert "Traceback" not in door.log.read_text()[before:]
    assert door.ask().status == 200


def status_of(raw: bytes) -> int:
    assert raw.startswith(b"HTTP/1.1 "), raw
    return int(raw[9:12])


def error_of(raw: bytes) -> dict[str, str]:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    error: dict[str, str] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def raw_exchange(door: Door, *pieces: bytes) -> bytes:
    sock = door.send(*pieces)
    try:
        return receive_all(sock)
    finally:
        sock.close()


GOOD = json.dumps(chat()).encode()

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


def test_headers_that_trickle(door: Door) -> None:
    sock = door.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
    sock.settimeout(0.1)
    raw = b""

    def closed() -> bool:
        nonlocal raw
        try:
            sock.send(b"x-a: b\r\n")
            piece = sock.recv(65536)
        except TimeoutError:
            return False
        except OSError:
            return True
        raw += piece
        return not piece

    until(closed)
    sock.close()
    assert not raw or status_of(raw) == 408


def test_a_connection_that_says_nothing_is_closed(door: Door) -> None:
    assert raw_exchange(door) == b""


def test_blank_lines_for_ever(door: Door) -> None:
    sock = door.send(request(GOOD))
    assert status_of(sock.recv(65536)) == 200
    sock.settimeout(0.1)

    def closed() -> bool:
        try:
            sock.send(b"\r\n")
            return not sock.recv(65536)
        except TimeoutError:
            return False
        except OSError:
            return True

    until(closed)
    sock.close()


BROKEN_FRAMES = {
    "no HTTP": b"hello there\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 100,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "two lengths": request(GOOD, b"content-length: 5"),
    "length and chunks": request(GOOD, b"transfer-encoding: chunked"),
    "a negative length": request(GOOD, length=-1),
    "a length that is a word": b"POST / HTTP/1.1\r\ncontent-length: many\r\n\r\n",
    "a header without a colon": b"GET / HTTP/1.1\r\nhost\r\n\r\n",
    "a folded header": b"GET / HTTP/1.1\r\nhost: x\r\n folded\r\n\r\n",
    "a control character in a header": b"GET / HTTP/1.1\r\nhost: x\x00y\r\n\r\n",
    "a bare line feed in a header": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-a: b\nx-slimserve-note: forged\r\n\r\nx",
    "a broken chunk": b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\nnot hex\r\n",
}


@pytest.mark.parametrize("frame", BROKEN_FRAMES.values(), ids=BROKEN_FRAMES.keys())
def test_a_broken_frame(door: Door, frame: bytes) -> None:
    raw = raw_exchange(door, frame)
    assert status_of(raw) == 400
    assert error_of(raw)["code"] == "invalid_http"
    assert b"forged" not in raw


def test_too_many_headers(door: Door) -> None:
    raw = raw_exchange(door, request(GOOD, *[b"x-%d: y" % number for number in range(200)]))
    assert status_of(raw) == 431
    assert error_of(raw)["code"] == "too_many_headers"


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""], ids=["complete", "without end"])
@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nx-a: "], ids=["request line", "header"])
def test_a_head_that_is_too_large(door: Door, start: bytes, end: bytes) -> None:
    sock = door.send(start)
    raw = b""
    try:
        for _ in range(100):
            sock.sendall(b"a" * 4096)
        sock.sendall(end)
        raw = receive_all(sock)
    except OSError:
        pass  # closed while we still sent
    sock.close()
    if raw and not raw.startswith(b"<reset>"):
        assert status_of(raw) == 431


def test_header_injection_by_an_origin_and_a_path(door: Door) -> None:
    answer = door.ask(headers={"Origin": "http://x\x0bset-cookie: a=b"})
    assert "set-cookie" not in answer.headers
    answer = door.ask(path="/v1/models%0d%0aset-cookie:%20a=b", method="GET")
    assert answer.status == 404
    assert "set-cookie" not in answer.headers


def test_no_such_route(door: Door) -> None:
    for method, path in (
        ("GET", "/"), ("POST", "/invocations"), ("GET", "/metrics"), ("GET", "/slimserve/state"),
        ("GET", "/fake/state"), ("POST", "/slimserve/drain"), ("GET", "/v1/chat/completions"),
        ("PUT", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/"), ("OPTIONS", "/v1/chat/completions"), ("POST", "//v1/chat/completions"),
    ):  # fmt: skip
        answer = door.ask(path=path, method=method)
        assert answer.status == 404, (method, path)
        assert answer.json["error"]["type"] == "not_found_error"
    assert door.state.accepting


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


def test_an_upgrade_is_not_made(door: Door) -> None:
    for wanted in (b"websocket", b"h2c"):
        raw = raw_exchange(
            door,
            b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: " + wanted + b"\r\n\r\n",
        )
        assert status_of(raw) == 200


def test_pipelined_requests_are_answered_in_order(door: Door) -> None:
    get = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    raw = raw_exchange(door, request(GOOD) + get + last)
    assert [int(part[:3]) for part in raw.split(b"HTTP/1.1 ")[1:]] == [200, 200, 404]


def test_garbage_behind_a_running_request_does_not_break_into_its_answer(door: Door) -> None:
    body = json.dumps(chat(chunks=5, interval=0.1) | {"stream": True}).encode()
    sock = door.send(request(body))
    seen = sock.recv(65536)
    sock.sendall(b"\x00\x01\x02 garbage\r\n\r\n")
    seen += receive_all(sock)
    sock.close()
    assert seen.count(b"HTTP/1.1 ") == 1


def test_a_rest_of_a_body_that_never_comes_is_not_waited_for(door: Door) -> None:
    raw = raw_exchange(door, request(b"{", b"x-pad: y", length=50_000, path=b"/nowhere"))
    assert status_of(raw) == 404


def test_a_body_is_not_asked_for_when_the_answer_is_known(door: Door) -> None:
    raw = raw_exchange(door, request(b"", b"expect: 100-continue", length=10, path=b"/nowhere"))
    assert status_of(raw) == 404
    assert b"100 Continue" not in raw
    sock = door.send(request(b"", b"expect: 100-continue", b"connection: close", length=len(GOOD)))
    assert b"100 Continue" in sock.recv(65536)
    sock.sendall(GOOD)
    assert status_of(receive_all(sock)) == 200
    sock.close()


def test_a_tcp_client_cannot_pass_for_the_supervisor(door: Door, tmp_path: Path) -> None:
    control = str(door.control.path).encode()
    for line in (b"GET " + control, b"GET http://" + control, b"GET /slimserve/state"):
        for header in (b"host: " + control, b"x-forwarded-for: unix", b"forwarded: for=unix"):
            raw = raw_exchange(door, line + b" HTTP/1.1\r\nconnection: close\r\n" + header + b"\r\n\r\n")
            assert status_of(raw) in (400, 404)
    with socket.create_connection(("127.0.0.1", door.bare)) as bare:  # such a path does exist inside
        bare.sendall(b"GET /fake/state HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert status_of(receive_all(bare)) == 200
