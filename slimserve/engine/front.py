"""The endpoint while no engine answers: every request gets 503, the reason, and when to ask again.

The listening socket is the endpoint's for its whole life. Either the front or the engine accepts on it; while neither
does, connections wait in the kernel. The event loop of the thread beside serves the operator page too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from slimserve.engine.state import Board

if TYPE_CHECKING:
    import uvicorn

# A client gets so long to say what it wants, and again so long to finish sending and to take the answer.
HEAD_SECONDS = 10.0
LINGER_SECONDS = 5.0
HEAD_BYTES = 32 << 10
# What is still being sent is read and dropped: closing with unread data would take the answer from the client.
LINGER_BYTES = 16 << 20
# Beyond these nobody's request is waited for: descriptors are for watching the engine.
MOST_CONNECTIONS = 512
TAKEN_AT_ONCE = 100
SHORTAGE_SECONDS = 0.2
CALL_SECONDS = 10.0

T = TypeVar("T")


class Front:
    """A thread with an event loop that answers on the public socket when told to.

    Args:
        listening: the public socket, bound and listening. It stays the caller's.
        board: where the reason and the time to wait come from.
    """

    def __init__(self, listening: socket.socket, board: Board) -> None:
        self._listening = listening
        self._board = board
        self._listening.setblocking(False)
        self._accepting = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._page: tuple[uvicorn.Server, asyncio.Task[None]] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="slimserve-front")
        self._thread.start()

    def accept(self) -> None:
        """Answer connections; does nothing when that is so already."""
        self._call(self._accept())

    def pause(self) -> None:
        """Take no further connection; those that were taken get their answer."""
        self._call(self._pause())

    def serve(self, app: Any, listening: socket.socket) -> None:
        """Serve an ASGI application, with uvicorn, on another listening socket, which becomes ours."""
        self._call(self._serve(app, listening))

    def close(self) -> None:
        """End the thread and whatever it answers."""
        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                self._call(self._finish())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_SECONDS)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_SECONDS)

    async def _accept(self) -> None:
        self._accepting = True
        self._loop.add_reader(self._listening, self._take)

    async def _pause(self) -> None:
        self._accepting = False
        self._loop.remove_reader(self._listening)

    def _take(self) -> None:
        """Accept what waits. In one go with its answer begun, so that a `pause` loses no connection in between."""
        for _ in range(TAKEN_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # the engine, or nobody, has it
            except OSError:  # no descriptor is left; what waits can wait until some are
                self._loop.remove_reader(self._listening)
                self._loop.call_later(SHORTAGE_SECONDS, self._resume)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._answer(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _resume(self) -> None:
        if self._accepting:
            self._loop.add_reader(self._listening, self._take)

    async def _finish(self) -> None:
        await self._pause()
        if self._page is not None:
            server, task = self._page
            server.should_exit = True
            await asyncio.wait([task], timeout=CALL_SECONDS / 2)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CALL_SECONDS / 2)

    async def _serve(self, app: Any, listening: socket.socket) -> None:
        import uvicorn

        config = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_graceful_shutdown=1, server_header=False
        )
        server = uvicorn.Server(config)
        self._page = (server, asyncio.ensure_future(server.serve(sockets=[listening])))

    async def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(sock=connection, limit=HEAD_BYTES)
            try:
                await self._exchange(reader, writer)
            finally:
                writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b""
        if len(self._tasks) <= MOST_CONNECTIONS:
            try:
                async with asyncio.timeout(HEAD_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return  # it went away, and nobody is there to read
            except asyncio.LimitOverrunError:
                pass
        writer.write(self._unavailable(with_body=not head.startswith(b"HEAD ")))
        async with asyncio.timeout(LINGER_SECONDS):
            await writer.drain()
            writer.write_eof()
            left = LINGER_BYTES if head else 0
            while left > 0 and (data := await reader.read(1 << 16)):
                left -= len(data)

    def _unavailable(self, with_body: bool) -> bytes:
        status, seconds = self._board.status, self._board.retry_seconds()
        message = f"the endpoint is {status.state}: {status.reason}; ask again in {seconds} s"
        error = {"message": message, "type": "server_error", "param": None, "code": f"endpoint_{status.state}"}
        body = json.dumps({"error": error}).encode()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
            f"Retry-After: {seconds}\r\n"
            "Cache-Control: no-store\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (body if with_body else b"")
