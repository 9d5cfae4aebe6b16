"""The page on a real uvicorn, in a thread of the test's process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn

from slimserve.operator.app import build
from slimserve.operator.source import Source

DEADLINE_SECONDS = 60.0


@contextlib.contextmanager
def page_of(source: Source, interval_seconds: float = 0.1, port: int = 0) -> Iterator[str]:
    """Its address; at the end the server is told to stop, and must."""
    app = build(source, interval_seconds)
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=1)
    )
    listener = socket.create_server(("127.0.0.1", port))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE_SECONDS)
        listener.close()
        assert not thread.is_alive(), "the page's server does not end"
