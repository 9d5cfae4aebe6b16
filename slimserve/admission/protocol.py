"""HTTP/1.1 on one connection, with the deadlines and limits that ASGI never sees.

The parser is given one request at a time. What a client sends behind it waits unread until the answer is out, within a
bound: so nothing that is sent early can be taken for part of another request, break into an answer, or hide that the
client is gone. Broken frames, heads that trickle and heads without end get a 4xx and a closed connection.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slimserve.admission.asgi import Scope
from slimserve.admission.rejection import Rejected
from slimserve.admission.replies import raw_answer

HEADER_SECONDS = 10.0
HEADER_BYTES = 32 << 10
HEADER_COUNT = 100
KEEP_ALIVE_SECONDS = 75
# After an answer that did not wait for the body, the rest of it is read and dropped for so long.
REST_SECONDS = 30.0
# A client that takes nothing of its answer for so long is gone: its slot is wanted.
UNREAD_SECONDS = 60.0

_BLANK_LINE = b"\r\n\r\n"
_UPGRADE = (b"upgrade", b"http2-settings")


class Protocol(HttpToolsProtocol):
    """One connection.

    Args:
        idle: this one is in it while no request of its own is under way; the longest idle one comes first.
        turn_away: gives the refusal of a request by its head alone, when it can.
        args, kwargs: uvicorn's.
    """

    def __init__(
        self,
        idle: OrderedDict[Protocol, None],
        turn_away: Callable[[Scope], Rejected | None],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        # The door logs what it refuses and counts the rest.
        self.access_log = False
        self._idle = idle
        self._turn_away = turn_away
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._in_message = False
        # Bytes of the body that are still to come; None: its coding says where it ends.
        self._body_left: int | None = None
        # Bytes since the last that were of a body: the head, or what surrounds chunks.
        self._overhead = 0
        self._last_bytes = b""
        self._behind = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the first request's head its deadline."""
        super().connection_made(transport)
        self._idle[self] = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever answers, and forget the deadlines."""
        self._idle.pop(self, None)
        self._stop_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse up to the request's end; what is behind it waits, for as long as it is little."""
        data, self._behind = self._behind + data, b""
        self._parse(data)
        if len(self._behind) > HEADER_BYTES:
            self._behind = b""
            self.cycle.keep_alive = False

    # What the parser tells

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._is_answering:
            # No frame that the parser takes ends elsewhere than where it was cut; if one did, it would be smuggling.
            raise _invalid()
        super().on_message_begin()
        self._in_message = self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; what comes behind a body is none, and may not add to those that were judged."""
        if self._in_head:
            if len(self.headers) >= HEADER_COUNT:
                raise Rejected(431, f"more than {HEADER_COUNT} headers", code="too_many_headers")
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: its deadline is off, and the application may answer."""
        self._check_overhead()
        if self.parser.get_method() == b"CONNECT" or self.parser.get_http_version() not in ("1.0", "1.1"):
            raise _invalid()
        if self.parser.should_upgrade():
            return
        self._body_left = self._declared_length()
        self._in_head = False
        self._overhead = 0
        self._idle.pop(self, None)
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body."""
        self._overhead = 0
        if self._body_left is not None:
            self._body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self.parser.should_upgrade():
            return
        self._in_message = False
        self._overhead = 0
        self._stop_timer()
        super().on_message_complete()
        # Only who reads sees the client go away.
        self.flow.resume_reading()
        if self.cycle.response_complete:
            # The answer came first, and the rest of the body has unset what it set to wait for the next request.
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_SECONDS, self.timeout_keep_alive_handler)
            self._idle[self] = None

    # What the answer brings about

    def on_response_complete(self) -> None:
        """The answer is out: on with what waits behind, or with the rest of the body, which has its own deadline."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._in_message:
            self._stop_timer()
            self._timer = self.loop.call_later(REST_SECONDS, self.hang_up)
            return
        self._idle[self] = None
        behind, self._behind = self._behind, b""
        self._parse(behind)

    def pause_writing(self) -> None:
        """The client is slow to read."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._watch_reader()

    def hang_up(self) -> None:
        """Close the connection, once what was written is read; whoever still answers is told."""
        self._stop_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self.transport.is_closing():
            self.transport.close()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        refusal = self._turn_away(cycle.scope) if cycle.keep_alive else None
        if refusal is not None:
            path, date = cycle.scope["path"], self.server_state.default_headers
            self.transport.write(raw_answer(refusal, path, more=date))
            cycle.response_started = cycle.response_complete = True
            self.on_response_complete()
            return
        task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(task)
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._watch_reader()

    # One request after the other

    @property
    def _is_answering(self) -> bool:
        """Whether a request is complete and its answer is not."""
        return self.cycle is not None and not (self._in_message or self.cycle.response_complete)

    def _parse(self, data: bytes) -> None:
        start = 0
        while start < len(data) and not self.transport.is_closing():
            if self._is_answering:
                self._behind = data[start:]
                return
            end = self._end_of_piece(data, start)
            self._feed(data[start:end])
            start = end
        # A head that is under way may take so long. Most come whole, and need no timer. Blank lines between requests
        # are as little progress as half a head.
        if data and self._timer is None and not self.transport.is_closing():
            between = not (self._in_message or self._is_answering or self.timeout_keep_alive_task)
            if self._in_head or between:
                self._expect_head()

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """How far the parser may be fed in one go: never beyond a request's end."""
        if self._in_message and not self._in_head and self._body_left:
            return min(len(data), start + self._body_left)
        # A head, a chunked body and its trailers all end with a blank line, which may come in two parts.
        seam = self._last_bytes + data[start : start + 3]
        if (at := seam.find(_BLANK_LINE)) >= 0:
            end = start + at + len(_BLANK_LINE) - len(self._last_bytes)
        elif (at := data.find(_BLANK_LINE, start)) >= 0:
            end = at + len(_BLANK_LINE)
        else:
            end = len(data)
        self._last_bytes = (self._last_bytes + data[max(start, end - 3) : end])[-3:]
        return end

    def _feed(self, piece: bytes) -> None:
        self._unset_keepalive_if_required()
        self._overhead += len(piece)
        try:
            self.parser.feed_data(piece)
            # The parser tells of a header when it is complete: one that never ends is seen only here.
            self._check_overhead()
        except httptools.HttpParserUpgrade:
            self._read_without_upgrade()
        except httptools.HttpParserError as error:
            self._refuse(error.__context__ if isinstance(error.__context__, Rejected) else _invalid())
        except Rejected as rejected:
            self._refuse(rejected)

    def _read_without_upgrade(self) -> None:
        """Another protocol is asked for, which a server may ignore; the parser would take the body for that one's."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] not in _UPGRADE]
        self.parser = httptools.HttpRequestParser(self)
        self._overhead = 0
        self._feed(b"\r\n".join(lines) + _BLANK_LINE)

    def _declared_length(self) -> int | None:
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or self.parser.get_http_version() == "1.0"):
            raise Rejected(
                400,
                "this transfer coding is not understood: send the body plain, with its length or chunked",
                code="unsupported_transfer_coding",
            )
        return next((int(value) for name, value in self.headers if name == b"content-length"), None)

    def _check_overhead(self) -> None:
        if self._overhead > HEADER_BYTES:
            raise Rejected(431, f"request line and headers take more than {HEADER_BYTES} bytes", code="head_too_large")

    def _refuse(self, fault: Rejected) -> None:
        """Answer a broken frame, unless an answer has begun already: two would be one broken one."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(raw_answer(fault))
        self.hang_up()

    # Deadlines

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self._head_late)

    def _head_late(self) -> None:
        if self._overhead:
            late = Rejected(408, f"no complete request came within {HEADER_SECONDS:g} s", code="head_timeout")
            self.transport.write(raw_answer(late))
        self.hang_up()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_reader(self) -> None:
        """See to it that what is written is read, from now on."""
        self._stop_unread_timer()
        if self.transport.get_write_buffer_size():
            self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self._look_at_reader, self._unread)

    def _look_at_reader(self, before: int) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        more = answering and not (self.flow.write_paused or self.transport.is_closing())
        if more or self._unread < before:
            self._watch_reader()
        else:
            self.hang_up()
            self.transport.abort()

    @property
    def _unread(self) -> int:
        """Bytes that the client has not taken: the kernel holds megabytes of them, and frees them by the heap."""
        queue = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return int(self.transport.get_write_buffer_size() + struct.unpack("i", queue)[0])

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


def _invalid() -> Rejected:
    return Rejected(400, "this is not a valid HTTP request", code="invalid_http")
