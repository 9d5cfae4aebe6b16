"""What bad frames get, below ASGI: a 4xx and a closed connection; and what is merely odd is served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from admission_raw import GET, GOOD, LAST_GET, error_of, in_chunks, raw_exchange, status_of, statuses_of
from admission_support import Door, nothing_lost, receive_all, receive_until, request
from waiting import until


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    deadlines = {"protocol.HEADER_SECONDS": 2.0, "bodies.BODY_SECONDS": 10.0}
    door = Door(tmp_path_factory.mktemp("door") / "a", deadlines, max_in_flight=4, max_body_bytes=1 << 20)
    yield door
    door.stop()


@pytest.fixture(autouse=True)
def _nothing_lost(door: Door) -> Iterator[None]:
    with nothing_lost(door):
        yield


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
    "a bare line feed behind the request line": LAST_GET.replace(b"1.1\r\n", b"1.1\n"),
    "a bare line feed behind the head": LAST_GET[:-2] + b"\n" + GET,
    "bare line feeds": LAST_GET.replace(b"\r\n", b"\n"),
    "a bare carriage return": b"GET / HTTP/1.1\r\nhost: x\r\r\n\r\n",
    "a length twice": request(GOOD, b"content-length: %d" % len(GOOD)),
    "a length that is folded": b"POST / HTTP/1.1\r\ncontent-length:\r\n 2\r\n\r\n{}",
    "a length with a sign": b"POST / HTTP/1.1\r\ncontent-length: +2\r\n\r\n{}",
    "lengths in a list": b"POST / HTTP/1.1\r\ncontent-length: 2, 2\r\n\r\n{}",
    "chunks and length": in_chunks(b"content-length: 5"),
    "chunks that end in bare line feeds": in_chunks(end=b"\n" + GET),
    "a length behind chunks": in_chunks(end=b"content-length: 5\r\n\r\n"),
    "a space before a colon": b"GET / HTTP/1.1\r\nhost : x\r\n\r\n",
    "a tunnel": b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    "a tunnel to a route": b"CONNECT /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    "a host and no path": b"GET http://x HTTP/1.1\r\nhost: x\r\n\r\n",
    "another version": GET.replace(b"1.1", b"1.9"),
    "a version that speaks in frames": LAST_GET.replace(b"1.1", b"2.0"),
    "no version": b"GET /v1/models\r\n\r\n",
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


@pytest.mark.parametrize(
    "coding", [b"gzip, chunked", b"chunked, chunked", b"identity", b"gzip", b"xchunked", b"\x0bchunked"]
)
def test_a_transfer_coding_that_is_not_understood(door: Door, coding: bytes) -> None:
    """Taken for plain chunks, it would be read otherwise than whoever stands before us reads it."""
    raw = raw_exchange(door, in_chunks(coding=coding) + GET)
    assert statuses_of(raw) == [400]
    assert error_of(raw)["code"] in ("unsupported_transfer_coding", "invalid_http")


def test_codings_in_two_headers_and_in_an_old_version(door: Door) -> None:
    assert statuses_of(raw_exchange(door, in_chunks(b"transfer-encoding: chunked") + GET)) == [400]
    assert statuses_of(raw_exchange(door, in_chunks(version=b"1.0") + GET)) == [400]
    assert statuses_of(raw_exchange(door, in_chunks(coding=b"Chunked") + LAST_GET)) == [200, 200]


def test_trailers_are_no_headers(door: Door) -> None:
    end = b"authorization: Bearer sk-slim-x\r\nX-Trailer: y\r\n\r\n"
    raw = raw_exchange(door, in_chunks(end=end) + LAST_GET)
    assert statuses_of(raw) == [200, 200]
    assert door.seen["last"]["headers"].keys() == {"host", "content-type", "transfer-encoding"}


@pytest.mark.parametrize(
    "rest", [b"\r\n0\r\nx-a: ", b"\r\n0\r\n", b"\r\n1;"], ids=["one trailer", "trailers", "an extension of a chunk"]
)
def test_what_surrounds_chunks_is_bounded(door: Door, rest: bytes) -> None:
    """It brings no body, so that no limit on bodies holds for it."""
    start, _, _ = in_chunks().rpartition(b"\r\n0\r\n")
    more = b"x-a: b\r\n" * (64 << 10) if rest.endswith(b"\n") else b"a" * (512 << 10)
    raw = raw_exchange(door, start + rest, more)
    assert status_of(raw) == 431


UPGRADES = {
    "h2c": [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"],
    "websocket": [b"connection: upgrade", b"upgrade: websocket"],
    "many": [b"connection: keep-alive, upgrade", b"upgrade: foo/1, h2c"],
}


@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
@pytest.mark.parametrize("headers", UPGRADES.values(), ids=UPGRADES.keys())
def test_an_upgrade_is_not_made_and_loses_no_body(door: Door, headers: list[bytes], together: bool) -> None:
    for message in (request(GOOD, *headers), in_chunks(*headers)):
        head, _, body = message.partition(b"\r\n\r\n")
        pieces = [message + LAST_GET] if together else [head + b"\r\n\r", b"\n", body, LAST_GET]
        assert statuses_of(raw_exchange(door, *pieces)) == [200, 200]
        assert not {"upgrade", "http2-settings"} & door.seen["last"]["headers"].keys()
        sock = door.send(head.replace(b"POST /v1/chat/completions", b"GET /v1/models") + b"\r\n\r\n" + body)
        assert status_of(receive_until(sock, b"\r\n\r\n")) == 200
        sock.close()


@pytest.mark.parametrize("headers", UPGRADES.values(), ids=UPGRADES.keys())
def test_no_request_is_smuggled_in_the_body_of_one_that_asks_for_an_upgrade(door: Door, headers: list[bytes]) -> None:
    sock = door.send(request(b"", *headers, length=len(GET)))
    sock.sendall(GET)
    sock.sendall(LAST_GET)
    raw = receive_all(sock)
    sock.close()
    assert statuses_of(raw) == [400, 200]
    assert b"cannot be read" in raw


def test_pipelined_requests_are_answered_in_order(door: Door) -> None:
    get = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    raw = raw_exchange(door, request(GOOD) + get + last)
    assert [int(part[:3]) for part in raw.split(b"HTTP/1.1 ")[1:]] == [200, 200, 404]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_requests_are_told_apart_however_they_are_cut(door: Door, size: int) -> None:
    end = b"x-trailer: a\r\n\r\n"
    blank = request(b'{"messages": [], "a":\r\n\r\n\r\n\r\n1}')
    raw = b"\r\n".join([GET, in_chunks(), request(GOOD), in_chunks(end=end), blank, LAST_GET])
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    assert statuses_of(raw_exchange(door, *pieces)) == [200] * 6


def test_an_absolute_form_means_its_path(door: Door) -> None:
    raw = raw_exchange(door, LAST_GET.replace(b" /v1", b" http://elsewhere.example/v1"))
    assert status_of(raw) == 200
    assert raw.endswith(b'"path": "/v1/models"}')
    assert status_of(raw_exchange(door, LAST_GET.replace(b" /v1/models", b" http://x/fake/state"))) == 404


def test_an_old_version_is_answered_and_closed(door: Door) -> None:
    for header in (b"x-a: b", b"connection: keep-alive"):
        raw = raw_exchange(door, request(GOOD, header).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert status_of(raw) == 200
        assert b"connection: close" in raw


def test_an_answer_to_head_has_no_body(door: Door) -> None:
    raw = raw_exchange(door, GET.replace(b"GET /v1", b"HEAD /v1") + b"HEAD /nowhere HTTP/1.1\r\n\r\n" + LAST_GET)
    assert statuses_of(raw)[1:] == [404, 200]
    assert raw.count(b"\r\n\r\n") == 3
    assert raw.count(b"{") == raw.rpartition(b"\r\n\r\n")[2].count(b"{")


def test_a_body_is_not_asked_for_when_the_answer_is_known(door: Door) -> None:
    raw = raw_exchange(door, request(b"", b"expect: 100-continue", length=10, path=b"/nowhere"))
    assert status_of(raw) == 404
    assert b"100 Continue" not in raw
    sock = door.send(request(b"", b"expect: 100-continue", b"connection: close", length=len(GOOD)))
    assert b"100 Continue" in sock.recv(65536)
    sock.sendall(GOOD)
    assert status_of(receive_all(sock)) == 200
    sock.close()


@pytest.mark.parametrize(("header", "status"), [(b"content-encoding: gzip", 415), (b"x-a: b", 413)])
def test_leave_to_send_a_body_is_not_given_with_a_refusal(door: Door, header: bytes, status: int) -> None:
    raw = raw_exchange(door, request(b"", b"expect: 100-continue", header, length=2 << 20) + GET)
    assert statuses_of(raw) == [status]
    assert b"connection: close" in raw
