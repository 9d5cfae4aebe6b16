"""One request while the engine has it: what goes in and out is passed on, and its slot comes back once.

The engine sees for itself when a client goes away. Should it not, it is cancelled after a grace, and the slot comes
back even if that does not end it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from slimserve.admission.answers import Watch
from slimserve.admission.asgi import App, Message, Receive, Scope, Send
from slimserve.admission.bodies import dump
from slimserve.admission.metrics import Metrics
from slimserve.admission.notes import Note
from slimserve.admission.progress import Progress
from slimserve.admission.replies import answer, engine_refusal, error_body, status_of
from slimserve.admission.routes import Dialect
from slimserve.admission.slots import Slot

NOTE_HEADER = b"x-slimserve-note"
# How often it is seen to it that somebody listens for the client's going away: most requests are over by then, and
# cost no task of their own.
LISTEN_SECONDS = 1.0
# What the engine may take to end a request whose client is gone.
GRACE_SECONDS = 10.0

# An error of the engine is a line; what is longer is none.
MAX_ERROR_BYTES = 1 << 20

_DONE = b"data: [DONE]\n\n"
# How an error begins in a stream: no piece of an answer does.
_FAILED = (b'data: {"error":', b"event: error\n")

log = logging.getLogger(__name__)


class Exchange:
    """A request that is handed to the engine.

    Args:
        receive, send: ASGI's.
        body: of the request; None: it is still to be received.
        slot: held by it; None: it does not generate.
        progress: what the engine owes.
        metrics: where an exhausted answer is counted.
        notes: for the response's headers.
        watched: dialect and number of answers, if they are to be watched for thinking that ate the whole budget.
        path: of the request, which decides the form of errors.
        grammar: the field of the request that holds a grammar.
        stopping: whether the endpoint has been told to stop.
    """

    __slots__ = (
        "_complete",
        "_ended",
        "_error",
        "_gave_up",
        "_grammar",
        "_held_start",
        "_listener",
        "_listening",
        "_metrics",
        "_notes",
        "_path",
        "_progress",
        "_receive",
        "_send",
        "_slot",
        "_stopping",
        "_streamed",
        "_task",
        "_timer",
        "_watch",
        "_watched",
        "body",
        "gone",
        "since",
        "started",
        "status",
    )

    def __init__(
        self,
        receive: Receive,
        send: Send,
        body: bytes | None,
        slot: Slot | None,
        progress: Progress,
        metrics: Metrics,
        notes: tuple[Note, ...] = (),
        watched: tuple[Dialect, int] | None = None,
        path: str = "",
        grammar: str | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.status = 0
        self.started = False
        self.gone = False
        self.since: float | None = None
        self._receive = receive
        self._send = send
        self.body = body
        self._slot = slot
        self._progress = progress
        self._metrics = metrics
        self._notes = notes
        self._watched = watched
        self._path = path
        self._grammar = grammar
        self._stopping = stopping
        self._error: bytearray | None = None
        self._watch: Watch | None = None
        self._streamed = False
        self._held_start: Message | None = None
        self._complete = False
        self._ended = False
        self._gave_up = False
        self._listening = 0
        self._listener: asyncio.Task[Message] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None

    @property
    def outcome(self) -> str:
        """How it ended, in a word for the counters."""
        if self._complete:
            return "ok" if self.status < 400 else "refused by the engine" if self.status < 500 else "error"
        return "disconnected" if self.gone else "error"

    async def run(self, app: App, scope: Scope) -> None:
        """Let the engine answer."""
        if self._slot is not None:
            self._task = asyncio.current_task()
            self._timer = asyncio.get_running_loop().call_later(LISTEN_SECONDS, self._listen)
            self.since = self._progress.clock()
            self._progress.waiting.add(self)
        try:
            await app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            if not self._gave_up or self._task is None or self._task.uncancel():
                raise
        finally:
            self._end()

    async def receive(self) -> Message:
        """ASGI's receive, as the engine sees it."""
        if self.body is not None:
            body, self.body = self.body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._listener is not None:
            return await asyncio.shield(self._listener)
        self._listening += 1
        try:
            message = await self._receive()
        finally:
            self._listening -= 1
        if message["type"] == "http.disconnect":
            self._client_gone()
        return message

    async def send(self, message: Message) -> None:
        """ASGI's send, as the engine sees it."""
        if self._error is not None:
            await self._put_into_words(self._error, message)
            return
        if message["type"] == "http.response.body":
            more = message.get("more_body", False)
            if self._streamed and message.get("body", b"").startswith(_FAILED):
                message = self._mend_event(message)
            if self._watch is not None:
                message = self._look(self._watch, message, more)
            if not more:
                self._answer_is_whole()
            if self._held_start is not None:
                start, self._held_start = self._held_start, None
                self.started = True
                await self._send(start)
        else:
            message = self._begin(message)
            if self.status >= 400:
                self._error = bytearray()
                return
            if self._watch is not None and not self._streamed:
                # Whether there is a note to put in the header is known from the body.
                self._held_start = message
                return
            self.started = True
        # A client that is slow to read is not the engine's stall.
        self.since = None
        await self._send(message)
        if self._slot is not None:
            self.since = self._progress.last = self._progress.clock()

    async def pass_on(self, message: Message) -> None:
        """Send a message that is the door's own."""
        self.started = True
        if message["type"] == "http.response.body":
            self._answer_is_whole()
        await self._send(message)

    def _answer_is_whole(self) -> None:
        """The slot is free before the last byte is out: a client that then asks again at once must not be refused."""
        self._complete = True
        if self._slot is not None:
            self._slot.release()

    async def _put_into_words(self, body: bytearray, message: Message) -> None:
        """Pass on an error of the engine, once it is complete, in the words of this endpoint."""
        body += message.get("body", b"")[: MAX_ERROR_BYTES - len(body)]
        if message.get("more_body", False):
            return
        refusal = engine_refusal(self.status, bytes(body), self._grammar, stopping=self._stopping())
        self.status = refusal.status
        for part in answer(refusal.status, error_body(refusal, self._path), refusal.headers):
            await self.pass_on(part)

    def _mend_event(self, message: Message) -> Message:
        """An error within a stream, in the words of this endpoint."""
        event, _, rest = message["body"].partition(b"data: ")
        data, end, rest = rest.partition(b"\n\n")
        refusal = engine_refusal(status_of(data), data, self._grammar, stopping=self._stopping())
        self.status = refusal.status
        return {**message, "body": event + b"data: " + dump(error_body(refusal, self._path)) + end + rest}

    def _begin(self, message: Message) -> Message:
        self.status = message["status"]
        headers = list(message.get("headers", ()))
        self._streamed = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
        )
        if self._watched is not None and self.status == 200:
            self._watch = Watch(self._watched[0], self._streamed, self._watched[1])
        if not self._notes:
            return message
        return {**message, "headers": headers + [_header(note) for note in self._notes]}

    def _look(self, watch: Watch, message: Message, more: bool) -> Message:
        """Watch a piece of the answer pass; with the last one, say that there was nothing but thinking."""
        body = message.get("body", b"")
        watch.feed(body)
        done = body.endswith(_DONE) if self._streamed else False
        if (more and not done) or not watch.exhausted:
            return message
        self._watch = None
        note = Note.THINKING_EXHAUSTED
        self._metrics.note(note.value).inc()
        if self._held_start is not None:
            headers = [*self._held_start.get("headers", ()), _header(note)]
            self._held_start = {**self._held_start, "headers": headers}
            return message
        # A comment, which readers of event streams skip; ahead of the mark at which some stop reading.
        rest = _DONE if done else b""
        return {**message, "body": body[: len(body) - len(rest)] + b": " + note.text.encode() + b"\n\n" + rest}

    def _listen(self) -> None:
        """See to it that somebody listens, from now on."""
        if self._listening or self.body is not None:
            self._timer = asyncio.get_running_loop().call_later(LISTEN_SECONDS, self._listen)
        else:
            self._listener = asyncio.create_task(self._hear())

    async def _hear(self) -> Message:
        while (message := await self._receive())["type"] != "http.disconnect":
            pass
        self._client_gone()
        return message

    def _client_gone(self) -> None:
        if not (self.gone or self._complete or self._ended):
            self.gone = True
            if self._slot is not None:
                self._stop_timer()
                self._timer = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._give_up)

    def _give_up(self) -> None:
        log.warning("a request whose client is gone did not end within %g s: it is cancelled", GRACE_SECONDS)
        self._end()
        self._gave_up = True
        if self._task is not None:
            self._task.cancel()

    def _end(self) -> None:
        self._ended = True
        self._progress.waiting.discard(self)
        self._stop_timer()
        if self._listener is not None:
            self._listener.cancel()
        if self._slot is not None:
            self._slot.release()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _header(note: Note) -> tuple[bytes, bytes]:
    return NOTE_HEADER, note.text.encode()
