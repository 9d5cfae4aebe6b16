"""A small HTTP client of an OpenAI-compatible endpoint: one JSON answer, or a stream of server-sent events.

It stands on `http.client`, because the chat must start at once and needs nothing more. A read blocks without a
deadline, since a long prompt may take minutes before its first token; what ends it early is an exception out of a
signal handler (Ctrl-C), or a `Stop` from another thread. Either way the socket is shut down, which is how the
engine learns that nobody waits for the rest and gives the slot back. What goes wrong is named in `client_faults`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Generator, Iterator
from urllib.parse import urlsplit

from slimserve.client_faults import (
    ADVICE_BY_CODE,
    EXCERPT_CHARACTERS,
    BrokenStream,
    Endpoint,
    HttpError,
    NoListener,
    Silent,
    Stopped,
    Unreachable,
    cut_short,
    decode_json,
    error_message,
    excerpt,
    not_a_stream,
    status_finding,
)
from slimserve.errors import Finding, UsageError

CONNECT_SECONDS = 5.0
ERROR_BODY_SECONDS = 5.0
BODY_BYTES = 1 << 20
# Of one line, and of the lines of one event together: neither may grow until the memory is gone.
EVENT_BYTES = 1 << 22


class Stop:
    """Ends a blocked read from elsewhere: another thread, or a signal handler that does not raise.

    There is no lock, so that a handler may call `request` whatever the main thread holds: `attach` publishes the
    socket before it looks at the flag, and `request` sets the flag before it looks at the socket.
    """

    def __init__(self) -> None:
        self.requested = False
        self._socket: socket.socket | None = None

    def request(self) -> None:
        """Shut the attached socket down, now or as soon as there is one."""
        self.requested = True
        if self._socket is not None:
            _shut(self._socket)

    def attach(self, connected: socket.socket) -> None:
        """Take charge of a connected socket."""
        self._socket = connected
        if self.requested:
            _shut(connected)


def get_json(endpoint: Endpoint, path: str, *, deadline_seconds: float) -> object:
    """GET `path` under the endpoint's root and decode its JSON.

    Args:
        deadline_seconds: for the whole exchange, a server that trickles included.

    Raises:
        UsageError: the endpoint's address or key cannot be sent.
        Failed: one of `client_faults`, when there is no such answer.
    """
    stop = Stop()
    timer = threading.Timer(deadline_seconds, stop.request)
    timer.daemon = True
    timer.start()
    try:
        with _exchange(endpoint, "GET", path, None, deadline_seconds, stop) as response, _faults(endpoint, stop):
            return decode_json(response.read(BODY_BYTES))
    except Stopped as stopped:
        raise Silent(
            Finding(
                f"no answer from {endpoint.base_url} within {deadline_seconds:g} s",
                "something took the connection and kept silent",
                "check what listens there, or wait until it has loaded",
            )
        ) from stopped
    finally:
        timer.cancel()


def stream_events(
    endpoint: Endpoint, path: str, body: dict[str, object], *, stop: Stop | None = None
) -> Generator[dict[str, object], None, None]:
    """POST `body` and yield the decoded events up to `[DONE]`.

    Close the iterator (`contextlib.closing`) to leave early: that shuts the socket down.

    Raises:
        UsageError: the endpoint's address or key cannot be sent.
        Failed: one of `client_faults`, at any point of the stream.
    """
    stop = stop or Stop()
    with _exchange(endpoint, "POST", path, body, CONNECT_SECONDS, stop) as response:
        kind = response.headers.get_content_type()
        if kind != "text/event-stream":
            raise BrokenStream(not_a_stream(endpoint, f"an answer of type {kind}", "a stream is text/event-stream"))
        for data in _event_data(_pieces(response, endpoint, stop), endpoint):
            if data == "[DONE]":
                return
            yield _event(data, endpoint)
        raise BrokenStream(cut_short())


@contextlib.contextmanager
def _exchange(
    endpoint: Endpoint, method: str, path: str, body: dict[str, object] | None, connect_seconds: float, stop: Stop
) -> Iterator[http.client.HTTPResponse]:
    """Connect, send, and hand out the response once its status is 200; shut the socket down at the end."""
    connection, root = _connection(endpoint, connect_seconds)
    connected: socket.socket | None = None
    response: http.client.HTTPResponse | None = None
    try:
        with _faults(endpoint, stop):
            connection.connect()
            connected = connection.sock
            _prepare(connected)
            stop.attach(connected)
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, root + path, payload, _headers(endpoint))
            response = connection.getresponse()
            if response.status != 200:
                connected.settimeout(ERROR_BODY_SECONDS)
                raw = b""
                with contextlib.suppress(OSError, http.client.HTTPException):
                    raw = response.read(BODY_BYTES)
                raise HttpError(response.status, status_finding(endpoint, response.status, response.reason, raw))
        yield response
    finally:
        # The response holds the socket open by itself, so closing the connection alone would not tell the server.
        if connected is not None:
            _shut(connected)
        if response is not None:
            response.close()
        connection.close()


def _connection(endpoint: Endpoint, connect_seconds: float) -> tuple[http.client.HTTPConnection, str]:
    try:
        parts = urlsplit(endpoint.base_url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    sendable = endpoint.base_url.isascii() and endpoint.base_url.isprintable() and " " not in endpoint.base_url
    if parts.scheme not in ("http", "https") or not host or not sendable:
        raise UsageError(
            Finding(
                f"{endpoint.base_url!r} is no address of a server",
                "it must be an http or https URL with a host",
                "write it like http://127.0.0.1:8000/v1",
            )
        )
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(host, port, timeout=connect_seconds), parts.path.rstrip("/")


def _headers(endpoint: Endpoint) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
    if endpoint.api_key:
        # http.client would name the whole header, key included, in its own complaint.
        if not endpoint.api_key.isascii() or not endpoint.api_key.isprintable():
            raise UsageError(
                Finding(
                    "the API key cannot be sent",
                    "it holds a line break or another character that a header cannot carry",
                    "give the key in printable ASCII, without the line break at its end",
                )
            )
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    return headers


def _prepare(connected: socket.socket) -> None:
    """Take the deadline of connecting off, and have the kernel notice a host that vanished without a word."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _shut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _faults(endpoint: Endpoint, stop: Stop) -> Iterator[None]:
    """Give the faults of sockets and of HTTP their names."""
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError) as fault:
        if stop.requested:
            raise Stopped(
                Finding("the answer was stopped", "a stop was requested before it was complete", "ask again")
            ) from fault
        if isinstance(fault, OSError) and not isinstance(fault, ConnectionResetError | BrokenPipeError):
            raise _unreachable_kind(fault)(
                Finding(
                    f"nothing answers at {endpoint.base_url}",
                    fault.strerror or str(fault) or type(fault).__name__,
                    "start the server (slimserve PROFILE --serve), or check the address and the port",
                )
            ) from fault
        if isinstance(fault, OSError | http.client.IncompleteRead | http.client.RemoteDisconnected):
            raise BrokenStream(cut_short()) from fault
        raise BrokenStream(not_a_stream(endpoint, "an answer that cannot be read", excerpt(str(fault)))) from fault


def _unreachable_kind(fault: OSError) -> type[Unreachable]:
    if isinstance(fault, ConnectionRefusedError):
        return NoListener
    # A frozen server's queue of connections is full at some time, and then not even connecting gets an answer.
    return Silent if isinstance(fault, TimeoutError) else Unreachable


def _pieces(response: http.client.HTTPResponse, endpoint: Endpoint, stop: Stop) -> Iterator[bytes]:
    """The body as it arrives."""
    while True:
        with _faults(endpoint, stop):
            piece = response.read1(1 << 16)
            if not piece and stop.requested:
                raise ConnectionResetError
        if not piece:
            return
        yield piece


def _event_data(pieces: Iterator[bytes], endpoint: Endpoint) -> Iterator[str]:
    """The `data` of each event. Bytes are decoded a whole line at a time, so a character may span two pieces.

    Source: HTML Living Standard, section 9.2.6, Interpreting an event stream.
    """
    rest = b""
    data: list[str] = []
    data_bytes = 0
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > EVENT_BYTES:
            raise BrokenStream(_too_long(endpoint, "a line"))
        for raw in lines:
            try:
                line = raw.removesuffix(b"\r").decode()
            except UnicodeDecodeError:
                raise BrokenStream(
                    not_a_stream(
                        endpoint, f"bytes that are not UTF-8: {raw[:EXCERPT_CHARACTERS]!r}", "events are UTF-8"
                    )
                ) from None
            name, _, value = line.partition(":")
            if not line and data:
                yield "\n".join(data)
                data, data_bytes = [], 0
            elif name == "data":
                data_bytes += len(raw)
                if data_bytes > EVENT_BYTES:
                    raise BrokenStream(_too_long(endpoint, "an event"))
                data.append(value.removeprefix(" "))


def _too_long(endpoint: Endpoint, what: str) -> Finding:
    return not_a_stream(endpoint, f"{what} of more than {EVENT_BYTES} bytes", "an event is far shorter")


def _event(data: str, endpoint: Endpoint) -> dict[str, object]:
    try:
        event = decode_json(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise BrokenStream(
            not_a_stream(endpoint, f"an event that is no JSON object: {excerpt(data)}", "each event is one such object")
        )
    if event.get("error") is not None:
        message, code = error_message(event)
        why, do = ADVICE_BY_CODE.get(
            code,
            (
                "the error came in the stream, after the answer had been accepted",
                "look at the end of the engine's log, whose path is printed when it starts, and ask again",
            ),
        )
        raise BrokenStream(
            Finding(f"the server broke the answer off{f' with {code}' if code else ''}: {message}", why, do)
        )
    return event
