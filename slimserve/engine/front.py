"""The endpoint while no engine answers: every request gets 503, the reason, and when to ask again.

The listening socket is the endpoint's for its whole life. Either the front or the engine accepts on it; while neither
does, connections wait in the kernel. The event loop of the thread beside serves the operator page too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from slimserve.accepting import Acceptor
from slimserve.admission.rejection import Rejected
from slimserve.admission.replies import raw_answer
from slimserve.engine.state import Board
from slimserve.exposure import is_loopback

if TYPE_CHECKING:
    from slimserve.admission.listener import Listener

# A client gets so long to say what it wants, and again so long to finish sending and to take the answer.
HEAD_SECONDS = 10.0
LINGER_SECONDS = 5.0
HEAD_BYTES = 32 << 10
# What is still being sent is read and dropped: closing with unread data would take the answer from the client.
LINGER_BYTES = 16 << 20
# Beyond these nobody's request is waited for: descriptors are for watching the engine.
MOST_CONNECTIONS = 512
# As many for the page, of which 32 may be streams; the longest idle one makes room for the next.
PAGE_CONNECTIONS = 128
CALL_SECONDS = 10.0
LEAVE_SECONDS = 0.5

T = TypeVar("T")


class Front:
    """A thread with an event loop that answers on the public socket when told to.

    Args:
        listening: the public socket, bound and listening. It stays the caller's.
        board: where the reason and the time to wait come from.
    """

    def __init__(self, listening: socket.socket, board: Board) -> None:
        # Whoever asks has shown no key: beyond loopback that may be anybody, and the reason names processes.
        self._discreet = not is_loopback(listening.getsockname()[0])
        self._acceptor = Acceptor(listening, lambda connection: self._acceptor.begin(self._answer(connection)))
        self._board = board
        self._page: tuple[Listener, Any] | None = None
        self._page_socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="slimserve-front")
        self._thread.start()

    def accept(self) -> None:
        """Answer connections; does nothing when that is so already."""
        self._call(self._accept())

    def pause(self) -> None:
        """Take no further connection; those that were taken get their answer."""
        self._call(self._pause())

    def serve(self, make: Callable[[], Any], listening: socket.socket) -> Future[None]:
        """Serve an ASGI application on another listening socket, which becomes ours; returns at once.

        By the door's own listener: silent and half-open connections must not take the descriptors by which the engine
        is watched.

        Args:
            make: makes the application, in a thread of its own: until it is made, connections wait in the kernel.
            listening: bound and listening.

        Returns:
            Done when it is served, or cannot be.
        """
        self._page_socket = listening
        return asyncio.run_coroutine_threadsafe(self._serve(make, listening), self._loop)

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
        self._acceptor.start()

    async def _pause(self) -> None:
        self._acceptor.stop()

    async def _finish(self) -> None:
        await self._pause()
        if self._serving is not None:
            self._serving.cancel()  # where the page is still being made: it must not open after this
            await asyncio.wait([self._serving], timeout=CALL_SECONDS / 2)
        if self._page is not None:
            listener, lifespan = self._page
            listener.end()
            for connection in list(listener.connections):
                connection.hang_up()
            await lifespan.shutdown()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:  # most end by themselves, now that nobody listens to them
            await asyncio.wait(tasks, timeout=LEAVE_SECONDS)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CALL_SECONDS / 2)
        if self._page_socket is not None:
            self._page_socket.close()

    async def _serve(self, make: Callable[[], Any], listening: socket.socket) -> None:
        self._serving = asyncio.create_task(self._open(make, listening))
        try:
            await asyncio.shield(self._serving)
        except Exception:
            listening.close()  # rather refused than never answered
            raise

    async def _open(self, make: Callable[[], Any], listening: socket.socket) -> None:
        fd = listening.fileno()

        def made() -> tuple[Listener, Any]:
            import uvicorn

            from slimserve.admission.listener import Listener

            app = make()
            config = uvicorn.Config(app, log_config=None)
            config.load()
            return Listener(app, fd, PAGE_CONNECTIONS), config.lifespan_class(config)

        listener, lifespan = await asyncio.to_thread(made)
        await lifespan.startup()
        listener.open()
        self._page = (listener, lifespan)

    async def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(sock=connection, limit=HEAD_BYTES)
            try:
                await self._exchange(reader, writer)
            finally:
                writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b""
        if len(self._acceptor.serving) <= MOST_CONNECTIONS:
            try:
                async with asyncio.timeout(HEAD_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return  # it went away, and nobody is there to read
            except asyncio.LimitOverrunError:
                pass
        writer.write(self._unavailable(head))
        async with asyncio.timeout(LINGER_SECONDS):
            await writer.drain()
            writer.write_eof()
            left = LINGER_BYTES if head else 0
            while left > 0 and (data := await reader.read(1 << 16)):
                left -= len(data)

    def _unavailable(self, head: bytes) -> bytes:
        status, seconds = self._board.status, self._board.retry_seconds()
        method, path, *_ = [*head.decode("latin-1").split(" ", 2), "", ""]
        ahead = f"ask again in {seconds} s"
        if not status.state.comes_back:  # the header has a bound, and a start may take longer: one figure is told
            ahead = (
                "it does not come back by itself, and when it is started again is not known here; that takes about "
                f"{self._board.usual_seconds:.0f} s, and to ask sooner is in vain"
            )
        unavailable = Rejected(
            503,
            f"the endpoint is {status.state}{'' if self._discreet else f': {status.reason}'}; {ahead}",
            code=f"endpoint_{status.state}",
            headers={"Retry-After": str(seconds), "Cache-Control": "no-store"},
        )
        return raw_answer(unavailable, path, with_body=method != "HEAD")
