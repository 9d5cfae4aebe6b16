"""Bytes as no client library sends them, and what comes back for them."""

from __future__ import annotations

import json

from admission_support import Door, chat, receive_all, request

GOOD = json.dumps(chat()).encode()
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
LAST_GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def generate(**fake: object) -> bytes:
    """A chat request that tells the fake engine what to do."""
    return request(json.dumps(chat(**fake)).encode())


def in_chunks(*headers: bytes, coding: bytes = b"chunked", end: bytes = b"\r\n", version: bytes = b"1.1") -> bytes:
    """A good chat request in a transfer coding."""
    lines = [
        b"POST /v1/chat/completions HTTP/" + version,
        b"host: x",
        b"content-type: application/json",
        b"transfer-encoding: " + coding,
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n%x\r\n" % len(GOOD) + GOOD + b"\r\n0\r\n" + end


def status_of(raw: bytes) -> int:
    assert raw.startswith(b"HTTP/1.1 "), raw
    return int(raw[9:12])


def statuses_of(raw: bytes) -> list[int]:
    """Of all the answers."""
    return [int(part[:3]) for part in raw.split(b"HTTP/1.1 ")[1:]]


def error_of(raw: bytes) -> dict[str, str]:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    error: dict[str, str] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def raw_exchange(door: Door, *pieces: bytes) -> bytes:
    """All that comes back, until the door closes the connection."""
    sock = door.send(*pieces)
    try:
        return receive_all(sock)
    finally:
        sock.close()
