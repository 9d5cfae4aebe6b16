"""The operator's page and its data. Read-only: no route here changes anything.

It shows logs and settings to whoever can connect, so it listens on loopback only, and answers only requests that name
a loopback host: a page of the web whose name was made to point here (DNS rebinding) is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slimserve.engine.ending import tail
from slimserve.operator import exposition, receipts
from slimserve.operator.feed import Feed
from slimserve.operator.history import INTERVAL_SECONDS
from slimserve.operator.source import Source

HOSTS = ("localhost", "127.0.0.1", "[::1]")
STATIC = Path(__file__).parent / "static"
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/chart.js": ("chart.js", "text/javascript"),
    "/format.js": ("format.js", "text/javascript"),
    "/tables.js": ("tables.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOG_LINES = 300
# The doctor asks the driver and walks /proc; the answer changes slowly.
DOCTOR_SECONDS = 30.0
# A silent connection is dropped by some proxies and tunnels; a comment keeps it open.
HEARTBEAT_SECONDS = 15.0
# Each holds a connection of the process that guards the engine; a page that gets none asks every few seconds instead.
MAX_STREAMS = 32


class _Guard:
    """Sets the security headers on every answer, those of the middleware below it included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, guarded if scope["type"] == "http" else send)


class _Pages:
    """The answers. What asks the source runs in a thread: it may block."""

    def __init__(self, source: Source, feed: Feed) -> None:
        self._source = source
        self._feed = feed
        self._streams = 0
        self._doctor: dict[str, Any] = {}
        self._doctor_lock = asyncio.Lock()

    async def status(self, request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(self._feed.snapshot))

    async def history(self, request: Request) -> Response:
        return JSONResponse(self._feed.history.to_json())

    async def profile(self, request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(self._source.plan))

    async def log(self, request: Request) -> Response:
        try:
            lines = await asyncio.to_thread(tail, self._source.log_path, lines=LOG_LINES)
        except FileNotFoundError:
            return PlainTextResponse("")  # no engine has been started yet
        except OSError as error:
            return PlainTextResponse(f"{self._source.log_path}: {error.strerror}\n", status_code=503)
        return PlainTextResponse("".join(f"{line}\n" for line in lines))

    async def doctor(self, request: Request) -> Response:
        async with self._doctor_lock:  # of several pages at once, one asks
            if time.time() - self._doctor.get("checked", 0.0) > DOCTOR_SECONDS:
                findings = await asyncio.to_thread(self._source.doctor)
                self._doctor = {"checked": time.time(), "findings": [finding.to_json() for finding in findings]}
        return JSONResponse(self._doctor)

    async def receipts(self, request: Request) -> Response:
        profile = (await asyncio.to_thread(self._source.plan))["profile"]
        found = await asyncio.to_thread(receipts.recent, self._source.receipts_folder, profile)
        return JSONResponse({"profile": profile, "receipts": found})

    async def metrics(self, request: Request) -> Response:
        engine = await asyncio.to_thread(self._source.metrics)
        text = exposition.render(engine, self._source.status(), self._source.started)
        return Response(text, media_type=exposition.CONTENT_TYPE)

    async def events(self, request: Request) -> Response:
        if self._streams >= MAX_STREAMS:
            return PlainTextResponse("as many pages are open as there may be\n", 503, {"Retry-After": "30"})
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        self._streams += 1
        try:
            seen = -1
            yield "retry: 2000\n\n"
            while True:
                version = await self._feed.wait(seen, HEARTBEAT_SECONDS)
                if version > seen:
                    seen = version
                    snapshot = await asyncio.to_thread(self._feed.snapshot)
                    yield f"data: {json.dumps(snapshot)}\n\n"
                else:
                    yield ": still here\n\n"
        finally:
            self._streams -= 1


def _file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = (STATIC / name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return answer


def build(source: Source, interval_seconds: float = INTERVAL_SECONDS) -> Starlette:
    """The application. An open event stream never ends by itself: whoever serves this bounds its graceful end.

    Args:
        source: where its facts come from.
        interval_seconds: from one point of the history to the next.
    """
    feed = Feed(source, interval_seconds)
    pages = _Pages(source, feed)

    @contextlib.asynccontextmanager
    async def sampling(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(feed.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    return Starlette(
        routes=[
            *(Route(path, _file(*file)) for path, file in FILES.items()),
            Route("/status.json", pages.status),
            Route("/history.json", pages.history),
            Route("/profile.json", pages.profile),
            Route("/doctor.json", pages.doctor),
            Route("/receipts.json", pages.receipts),
            Route("/log", pages.log),
            Route("/metrics", pages.metrics),
            Route("/events", pages.events),
        ],
        middleware=[
            Middleware(_Guard),
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
        ],
        lifespan=sampling,
    )
