"""The door: what stands between every client and the engine, on its way in and on its way out.

In order: is there such a route, whose key is it, are we accepting, is there room, is the body readable, may it ask for
that. Then the engine. What comes over the supervisor's own socket skips all of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from pathlib import Path

from slimserve.admission import bodies, logs
from slimserve.admission.asgi import App, Message, Receive, Scope, Send
from slimserve.admission.bodies import Gone
from slimserve.admission.config import ACCEPT_PATH, DRAIN_PATH, STATE_PATH, Config, from_environment
from slimserve.admission.cors import with_cors
from slimserve.admission.exchange import Exchange
from slimserve.admission.keys import Keyring
from slimserve.admission.listener import Listener
from slimserve.admission.metrics import shared
from slimserve.admission.names import check_names
from slimserve.admission.progress import ENGINE
from slimserve.admission.rejection import Rejected
from slimserve.admission.replies import STOPPED, answer, error_body
from slimserve.admission.requests import judge
from slimserve.admission.routes import Access, Dialect, find, no_such_route
from slimserve.admission.slots import SLOT, Slot, Slots

DRAIN_RETRY_SECONDS = 5
# Requests that only count or convert tokens, at once: they share the threads in which prompts become tokens.
MAX_BESIDE = 2
BESIDE_RETRY_SECONDS = 1
# Before a connection is closed, as much of a large body is read and dropped as lets its client come to read the answer.
DROP_BYTES = 128 << 20
DROP_SECONDS = 30.0

log = logging.getLogger(__name__)


class Ahead:
    """ASGI's receive, which may be listened to before anybody wants the body.

    Args:
        receive: ASGI's.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()

    async def __call__(self) -> Message:
        """The next message."""
        return self._kept.popleft() if self._kept else await self._receive()

    async def gone(self) -> None:
        """Return when the client goes away, for as long as what it sends meanwhile is little."""
        size = 0
        while size < bodies.SMALL_BODY_BYTES:
            message = await self._receive()
            self._kept.append(message)
            if message["type"] == "http.disconnect":
                return
            size += len(message.get("body", b""))
        await asyncio.get_running_loop().create_future()


class Admission:
    """The middleware.

    Args:
        app: the engine's application, inside of this.
        config: what the door is told; None: read from the environment.

    Raises:
        ValueError: the environment holds no valid configuration.
    """

    def __init__(self, app: App, config: Config | None = None) -> None:
        self.config = config = config or from_environment(os.environ)
        self.slots = Slots(config.max_in_flight, fair_share=config.fair_share, queue=config.queue)
        self.accepting = config.listen_fd is None
        self._beside = 0
        self._app = app
        keys_file = Path(config.keys_file) if config.keys_file else None
        awaited, origins = config.keys_file_awaited, config.origins
        self._keyring = Keyring(keys_file, config.key_hashes, awaited=awaited, origins=origins)
        self._metrics = shared()
        self._metrics.show(self.slots, ENGINE)
        self._listener: Listener | None = None
        self._public: App = with_cors(self._admit, config.origins) if config.origins else self._admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif self.config.control is not None and scope.get("server") == (self.config.control, None):
            await self._control(scope, receive, send)
        elif scope["type"] == "http":
            await self._public(scope, receive, send)
        else:
            # No route of ours speaks through a websocket.
            await send({"type": "websocket.close", "code": 1008})

    @property
    def state(self) -> dict[str, object]:
        """What the supervisor asks for."""
        return {
            "accepting": self.accepting,
            "in_flight": self.slots.in_flight,
            "waiting": self.slots.waiting,
            "cap": self.slots.cap,
            "stalled_seconds": round(ENGINE.stalled_seconds, 3),
        }

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the public socket, when told to, for as long as the application lives."""
        logs.install()
        state = getattr(scope.get("app"), "state", None)
        if state is not None:
            ENGINE.has_work = state.engine_client.output_processor.has_unfinished_requests
        if self.config.listen_fd is not None:
            self._listener = Listener(scope.get("app", self), self.config.listen_fd, judge_head=self.judge_head)
        try:
            await self._app(scope, receive, send)
        finally:
            if self._listener is not None:
                self._listener.end()

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = (scope.get("method"), scope["path"])
        if request == ("POST", ACCEPT_PATH):
            if self._listener is not None:
                self._listener.open()
            self.accepting = True
        elif request == ("POST", DRAIN_PATH):
            self.accepting = False
            if self._listener is not None:
                self._listener.close()
        elif request != ("GET", STATE_PATH):
            await self._app(scope, receive, send)
            return
        for message in answer(200, self.state):
            await send(message)

    def judge_head(self, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> Rejected | Slot | None:
        """What the head of a request decides alone: that there is no room for it, or its slot; None: `_admit` decides.

        It is asked while heads are read, before any task of theirs runs. So of a thousand that come at once as many
        are let in as there is room for, and the others cost neither a task nor a body: a flood that comes to nothing
        should cost those that are served as little as can be. Whatever is less plain takes the way through `_admit`,
        and comes to the same.
        """
        if not self.accepting or self.config.origins:
            return None
        route = find(method, path)
        if route is None or route.dialect is None:
            return None
        try:
            holder = self._keyring.holder(headers) or ""
        except Rejected:
            return None
        if slot := self.slots.take_now(holder):
            return slot
        full = self.slots.turn_away(holder) if bodies.is_small(headers) else None
        if full is not None:
            self._metrics.request(route.dialect.value, f"rejected: {full.code}").inc()
        return full

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        dialect = None
        ahead = Ahead(receive)
        try:
            # A prefix that the router would cut off first would let a path mean something else to it than to us.
            if scope["method"] == "HEAD":  # the answer to GET; who speaks HTTP for us leaves its body out
                scope = {**scope, "method": "GET"}
            route = find(scope["method"], scope["path"]) if not scope.get("root_path") else None
            if route is None or route.access is Access.CLOSED:
                raise no_such_route(scope["method"], scope["path"])
            holder = self._keyring.holder(headers) if route.access is Access.KEYED else None
            dialect = route.dialect
            if dialect is None:
                await self._convert(scope, ahead, send)
            else:
                await self._generate(began, dialect, holder or "", scope, ahead, send)
        except Gone:
            if dialect is not None:
                self._metrics.request(dialect.value, "disconnected").inc()
        except Rejected as rejected:
            if dialect is None:
                self._metrics.denied(rejected.code).inc()
            else:
                self._metrics.request(dialect.value, f"rejected: {rejected.code}").inc()
            await _refuse(rejected, scope, ahead, send)

    async def _convert(self, scope: Scope, receive: Ahead, send: Send) -> None:
        """Serve a request that generates nothing."""
        exchange = Exchange(receive, send, None, None, ENGINE, self._metrics, path=scope["path"])
        if scope["method"] == "GET":
            await self._hand_over(exchange, scope)
            return
        bodies.check_type(scope["headers"])
        exchange.body = await bodies.read(receive, scope["headers"], self.config.body_bytes())
        check_names(bodies.parse(exchange.body))
        if self._beside >= MAX_BESIDE:
            raise Rejected(
                429,
                f"{MAX_BESIDE} requests that count or convert tokens are under way, which is the most at once; "
                f"come back in {BESIDE_RETRY_SECONDS} s",
                code="too_many_beside",
                headers={"Retry-After": str(BESIDE_RETRY_SECONDS)},
            )
        self._beside += 1
        try:
            await self._hand_over(exchange, scope)
        finally:
            self._beside -= 1

    async def _generate(
        self, began: float, dialect: Dialect, holder: str, scope: Scope, receive: Ahead, send: Send
    ) -> None:
        """Serve a request that generates."""
        if not self.accepting:
            raise Rejected(
                503,
                "this endpoint has been told to stop and takes no new work; it does not come back by itself, and when"
                f" it is started again is not known here; ask again in {DRAIN_RETRY_SECONDS} s at the earliest",
                code="draining",
                headers={"Retry-After": str(DRAIN_RETRY_SECONDS)},
            )
        asked = time.perf_counter()
        slot = scope.pop(SLOT, None) or await self._take(holder, receive)
        taken = time.perf_counter()
        try:
            bodies.check_type(scope["headers"])
            prompts = self.config.max_in_flight if dialect in (Dialect.COMPLETIONS, Dialect.BATCH_CHAT) else 1
            body = await bodies.read(receive, scope["headers"], self.config.body_bytes(prompts))
            complete = time.perf_counter()
            judged = judge(dialect, bodies.parse(body), self.config)
            await slot.grow(judged.count)
            if judged.changed:
                body = bodies.dump(judged.body)
                scope = {**scope, "headers": bodies.with_length(scope["headers"], len(body))}
            if judged.notes:
                log.info("%s of %s: %s", dialect.value, holder or "anybody", ", ".join(judged.notes))
            for note in judged.notes:
                self._metrics.note(note.value).inc()
            watched = None if self.config.thinking is None else (dialect, judged.count)
            exchange = Exchange(
                receive,
                send,
                body,
                slot,
                ENGINE,
                self._metrics,
                judged.notes,
                watched,
                path=scope["path"],
                grammar=judged.grammar,
                stopping=lambda: not self.accepting,
            )
            self._metrics.waited.observe(taken - asked)
            self._metrics.own.observe(asked - began + time.perf_counter() - complete)
            try:
                await self._hand_over(exchange, scope)
            finally:
                self._metrics.request(dialect.value, exchange.outcome).inc()
        finally:
            slot.release()

    async def _take(self, holder: str, receive: Ahead) -> Slot:
        """A slot, now or after a wait; a client that goes away leaves the line."""
        if self.config.queue is None:
            return await self.slots.take(holder)
        if slot := self.slots.take_now(holder):
            return slot
        taking = asyncio.ensure_future(self.slots.take(holder))
        leaving = asyncio.ensure_future(receive.gone())
        try:
            await asyncio.wait({taking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                raise Gone
            return taking.result()
        except BaseException:
            # It may have come by a slot all the same, in this very turn.
            taking.add_done_callback(_return_slot)
            taking.cancel()
            raise
        finally:
            leaving.cancel()

    async def _hand_over(self, exchange: Exchange, scope: Scope) -> None:
        """Let the engine answer; what it throws before it began to is a 500 that tells nobody how it is built."""
        try:
            await exchange.run(self._app, scope)
        except Exception:
            if exchange.started:
                raise
            log.exception("the engine failed at %s %s", scope["method"], ascii(scope["path"]))
            failed = Rejected(500, "the engine failed at this request; its log says why", code="engine_error")
            if not self.accepting:
                failed = STOPPED
            exchange.status = failed.status
            for message in answer(failed.status, error_body(failed, scope["path"]), failed.headers):
                await exchange.pass_on(message)


def _return_slot(taking: asyncio.Future[Slot]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        taking.result().release()


async def _refuse(rejected: Rejected, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request that the engine does not see, in such a way that the answer arrives."""
    start, body = answer(rejected.status, error_body(rejected, scope["path"]), rejected.headers)
    # A client that waits for leave to send its body may send it or not; one that stalls is not waited for.
    unsure = rejected.status == 408 or any(name == b"expect" for name, _ in scope["headers"])
    if not unsure and bodies.is_small(scope["headers"]):
        await send(start)
        await send(body)
        return
    # Closed with bytes unread, the connection would be reset, and the answer lost with it: first read, then close.
    await send({**start, "headers": [*start["headers"], (b"connection", b"close")]})
    await send({**body, "more_body": True})
    if not unsure:
        await bodies.drop(receive, DROP_BYTES, DROP_SECONDS)
    await send({**body, "body": b""})
