"""HTTP/1.1 on one connection, with the deadlines and limits that ASGI never sees.

The parser is given one request at a time. What a client sends behind it waits unread until the answer is out, within a
bound: so nothing that is sent early can be taken for part of another request, break into an answer, or hide that the
client is gone. Broken frames, heads that trickle and heads without end get a 4xx and a closed connection.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slimserve.admission.deadline import Deadline
from slimserve.admission.frames import BLANK_LINE, Cutter, declared_length, invalid
from slimserve.admission.heads import Head, Heads
from slimserve.admission.rejection import Rejected
from slimserve.admission.replies import raw_answer, raw_refusal
from slimserve.admission.slots import SLOT, JudgeHead, Slot
from slimserve.admission.turns import Turns
from slimserve.admission.unread import Unread

HEADER_SECONDS = 10.0
HEADER_BYTES = 32 << 10
HEADER_COUNT = 100
KEEP_ALIVE_SECONDS = 75
# Of a chunked body, in one turn of the event loop: a read brings up to 256 KiB, which are 40,000 of the least chunks.
CHUNKED_BYTES = 8 << 10
# After an answer that did not wait for the body, the rest of it is read and dropped for so long.
REST_SECONDS = 30.0
# A client that takes nothing of its answer for so long is gone: its slot is wanted.
UNREAD_SECONDS = 60.0

Name = tuple[str, int]

# What stands for the request whose refusal is out.
_ANSWERED: Any = SimpleNamespace(response_started=True, response_complete=True, message_event=asyncio.Event())

_UPGRADE = (b"upgrade", b"http2-settings")


class Protocol(HttpToolsProtocol):
    """One connection.

    Args:
        idle: since when no request is under way on them, of those of which it is so, this one among them; the longest
            idle one comes first.
        judge_head: what a request's head alone decides.
        heads: those of requests that were refused.
        names: address and port of this end and of the client's.
        turns: when requests that are let in begin.
        first: what has been read already.
        slot: of the request that it begins with, if that has one.
        args, kwargs: uvicorn's.
    """

    def __init__(
        self,
        idle: OrderedDict[Protocol, float],
        judge_head: JudgeHead,
        heads: Heads,
        names: tuple[Name, Name],
        turns: Turns,
        first: bytes,
        slot: Slot | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        # The door logs what it refuses and counts the rest.
        self.access_log = False
        self._idle = idle
        self._judge_head = judge_head
        self._heads = heads
        self._names = names
        self._turns = turns
        self._first = first
        # Of the head, of the rest of a body that nobody waits for, or of the time between requests.
        self._deadline = Deadline(self.loop)
        self._rests = False
        self._method = self._path = ""
        self._slot = slot
        self._in_head = False
        self._in_message = False
        # Bytes of the body that are still to come; None: its coding says where it ends.
        self._length: int | None = None
        self._body_left: int | None = None
        # Bytes since the last that were of a body: the head, or what surrounds chunks.
        self._overhead = 0
        self._cutter = Cutter()
        self._behind = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the first request's head its deadline."""
        # As uvicorn has it, but for the names: to ask the loop for them takes as long as several refusals.
        self.connections.add(self)
        self.transport = transport
        self.flow = FlowControl(transport)
        self.server, self.client = self._names
        self.scheme = "http"
        self._unread = Unread(transport, UNREAD_SECONDS, self._has_more, self.cut_off)
        self._idle[self] = self.loop.time()
        self._expect_head()
        first, self._first = self._first, b""
        if first:
            self.data_received(first)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever answers, and forget the deadlines."""
        self._idle.pop(self, None)
        self._deadline.end()
        self._unread.end()
        if self._slot is not None:
            self._slot.release()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse up to the request's end; what is behind it waits, for as long as it is little."""
        if self.transport.is_closing():
            return
        begins = self._rests or not (self._in_message or self._overhead or self._behind or self._is_answering)
        if begins and self._slot is None and (known := self._heads.of(data)) is not None and self._is_refused(known):
            return
        data, self._behind = self._behind + data, b""
        self._parse(data)
        if self._is_answering and len(self._behind) > HEADER_BYTES:
            self._behind = b""
            self.cycle.keep_alive = False
        if begins and self._rests and self.cycle is _ANSWERED and self._length is not None:
            self._heads.learn(data, Head(self._method, self._path, self.headers, self._length))

    # What the parser tells

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._is_answering:
            # No frame that the parser takes ends elsewhere than where it was cut; if one did, it would be smuggling.
            raise invalid()
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
            raise invalid()
        if self.parser.should_upgrade():
            return
        self._body_left = self._length = declared_length(self.headers, self.parser.get_http_version())
        self._in_head = False
        self._overhead = 0
        self._idle.pop(self, None)
        self._deadline.lift()
        judged = self._slot or self._judge()
        if isinstance(judged, Rejected):
            self.cycle = _ANSWERED
            self._tell(judged)
            self.on_response_complete()
            return
        self._slot = judged
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
        self._deadline.lift()
        super().on_message_complete()
        # Only who reads sees the client go away.
        self.flow.resume_reading()
        if self.cycle.response_complete:
            # The answer came first.
            self._expect_another()

    # What the answer brings about

    def on_response_complete(self) -> None:
        """The answer is out: on with what waits behind, or with the rest of the body, which has its own deadline."""
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self._in_message:
            self._deadline.set(REST_SECONDS, self.hang_up)
            return
        self._expect_another()
        behind, self._behind = self._behind, b""
        self._parse(behind)

    def pause_writing(self) -> None:
        """The client is slow to read."""
        super().pause_writing()
        self._unread.watch()

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._unread.watch()

    def hang_up(self) -> None:
        """Close the connection, once what was written is read; whoever still answers is told."""
        self._deadline.end()
        self._idle.pop(self, None)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self.transport.is_closing():
            self.transport.close()
            self._unread.watch()

    def cut_off(self) -> None:
        """End the connection at once, whatever of its answers is unread."""
        self.hang_up()
        self.transport.abort()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            cycle.scope[SLOT] = slot
        self._turns.begin(functools.partial(self._begin, slot, cycle, app))

    def _begin(self, slot: Slot | None, cycle: Any, app: Any) -> None:
        task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(task)
        task.add_done_callback(functools.partial(self._answered, slot))

    def _answered(self, slot: Slot | None, task: asyncio.Task[None]) -> None:
        if slot is not None:
            # The task has released it, unless it was ended before it came to that.
            slot.release()
        self.tasks.discard(task)
        self._unread.watch()

    def _judge(self) -> Rejected | Slot | None:
        """What the head decides alone; a connection that is to be closed behind the answer takes the long way."""
        if self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive():
            return None
        path = httptools.parse_url(self.url).path
        if path is None or b"%" in path:
            return None
        self._path = path.decode("ascii")
        self._method = self.parser.get_method().decode("ascii")
        return self._judge_head(self._method, self._path, self.headers)

    def _is_refused(self, head: Head) -> bool:
        """Refuse a request that came whole and need not be parsed, if it is to be refused by its head."""
        if self.transport.is_closing():
            return False
        judged = self._judge_head(head.method, head.path, head.headers)
        if not isinstance(judged, Rejected):
            self._slot = judged
            return False
        self._path = head.path
        self._tell(judged)
        self._idle.pop(self, None)
        self._expect_another()
        return True

    def _tell(self, refusal: Rejected) -> None:
        self.transport.write(raw_refusal(refusal, self._path, tuple(self.server_state.default_headers)))
        if self.flow.write_paused:
            # Who asks and asks and reads nothing would have us keep all of its refusals, and the connection.
            self.cut_off()
        else:
            self._unread.watch()

    # One request after the other

    @property
    def _is_answering(self) -> bool:
        """Whether a request is complete and its answer is not."""
        return self.cycle is not None and not (self._in_message or self.cycle.response_complete)

    def _parse(self, data: bytes) -> None:
        start, fed = 0, False
        while start < len(data) and not self.transport.is_closing():
            if self._is_answering:
                self._behind = data[start:]
                return
            in_body = self._in_message and not self._in_head
            chunked = in_body and self._body_left is None
            if fed and (self._rests or chunked):
                # In a turn of the loop one request that is refused, or so much of a chunked body: others wait as well.
                self._behind = data[start:]
                self.flow.pause_reading()
                self.loop.call_soon(self._go_on)
                return
            seen = data[: start + CHUNKED_BYTES] if chunked else data
            end = self._cutter.end_of_piece(seen, start, self._body_left if in_body else None)
            self._feed(data[start:end])
            start, fed = end, True
        # A head that is under way may take so long. Most come whole, and need no timer. Blank lines between requests
        # are as little progress as half a head.
        incomplete = self._in_head or not (self._in_message or self._is_answering)
        if data and incomplete and not (self._deadline.is_set or self.transport.is_closing()):
            self._expect_head()

    def _go_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()
            behind, self._behind = self._behind, b""
            self._parse(behind)

    def _feed(self, piece: bytes) -> None:
        if self._rests:
            self._rests = False
            self._deadline.lift()
        self._overhead += len(piece)
        try:
            self.parser.feed_data(piece)
            # The parser tells of a header when it is complete: one that never ends is seen only here.
            self._check_overhead()
        except httptools.HttpParserUpgrade:
            self._read_without_upgrade()
        except httptools.HttpParserError as error:
            self._refuse(error.__context__ if isinstance(error.__context__, Rejected) else invalid())
        except Rejected as rejected:
            self._refuse(rejected)

    def _read_without_upgrade(self) -> None:
        """Another protocol is asked for, which a server may ignore; the parser would take the body for that one's."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] not in _UPGRADE]
        self.parser = httptools.HttpRequestParser(self)
        self._overhead = 0
        self._feed(b"\r\n".join(lines) + BLANK_LINE)

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
        self._deadline.set(HEADER_SECONDS, self._head_late)

    def _expect_another(self) -> None:
        if self.transport.is_closing():
            return
        self._rests = True
        self._deadline.set(KEEP_ALIVE_SECONDS, self.hang_up)
        self._idle[self] = self.loop.time()

    def _head_late(self) -> None:
        if self._overhead:
            late = Rejected(408, f"no complete request came within {HEADER_SECONDS:g} s", code="head_timeout")
            self.transport.write(raw_answer(late))
        self.hang_up()

    def _has_more(self) -> bool:
        answering = self.cycle is not None and not self.cycle.response_complete
        return answering and not (self.flow.write_paused or self.transport.is_closing())
