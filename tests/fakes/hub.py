"""A Hugging Face Hub that serves one repository over real HTTP, and misbehaves on demand.

Switches are attributes, so that a test turns them while a client is in the middle of something.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote

REPO = "someone/something"
REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class Request:
    method: str
    name: str
    start: int
    token: str


@dataclass
class Switches:
    drop_after: int | None = None
    """close the connection after so many bytes of each body"""
    drops: int = 1 << 30
    """how many bodies are cut like this"""
    wrong_bytes: bool = False
    """serve other bytes of the same length under the right headers"""
    status: int | None = None
    """answer everything with this status"""
    error_code: str = ""
    commit: str = REVISION
    etag: str | None = None
    ignore_range: bool = False
    bytes_per_second: int | None = None
    token: str = ""
    """what the Authorization header must carry; anything does when empty"""
    stall_after: int | None = None
    """send so many bytes of a body, then wait for `go`"""
    go: threading.Event = field(default_factory=threading.Event)


class Hub:
    """The server, in threads of this process."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.switches = Switches()
        self.requests: list[Request] = []
        self.sent: dict[str, int] = {}
        self.stalled = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def do_GET(self) -> None:
                hub._answer(self, body=True)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def gets(self, name: str) -> list[Request]:
        return [request for request in self.requests if request.method == "GET" and request.name == name]

    def __enter__(self) -> Hub:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.switches.go.set()
        self.server.shutdown()
        self.server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler, body: bool) -> None:
        switches = self.switches
        prefix = f"/{REPO}/resolve/{REVISION}/"
        name = unquote(handler.path).removeprefix(prefix)
        token = (handler.headers.get("Authorization") or "").removeprefix("Bearer ")
        wanted = handler.headers.get("Range", "")
        start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted and not switches.ignore_range else 0
        self.requests.append(Request(handler.command, name, start, token))
        status, code = switches.status, switches.error_code
        if status is None and switches.token and token != switches.token:
            status, code = 401, ""
        if status is None and name not in self.files:
            status, code = 404, "EntryNotFound"
        if status is not None:
            handler.send_response(status)
            if code:
                handler.send_header("X-Error-Code", code)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        content = self.files[name]
        # The Hub's ETag is the sha256 of a large file and git's blob hash of a small one.
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        etag = switches.etag or (hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else blob)
        rest = (bytes(byte ^ 1 for byte in content) if switches.wrong_bytes else content)[start:]
        handler.send_response(206 if start else 200)
        handler.send_header("X-Repo-Commit", switches.commit)
        handler.send_header("ETag", f'"{etag}"')
        handler.send_header("Accept-Ranges", "bytes")
        handler.send_header("Content-Length", str(len(rest)))
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.end_headers()
        if body:
            self._send(handler, name, rest)

    def _send(self, handler: BaseHTTPRequestHandler, name: str, rest: bytes) -> None:
        switches = self.switches
        cut = switches.drop_after if switches.drops > 0 else None
        limit = len(rest) if cut is None else min(cut, len(rest))
        step = 1 << 16 if switches.bytes_per_second is None else max(1, switches.bytes_per_second // 10)
        sent = 0
        try:
            while sent < limit:
                if switches.stall_after is not None and sent >= switches.stall_after:
                    self.stalled.set()
                    switches.go.wait(60)
                chunk = rest[sent : min(sent + step, limit)]
                handler.wfile.write(chunk)
                sent += len(chunk)
                self.sent[name] = self.sent.get(name, 0) + len(chunk)
                if switches.bytes_per_second is not None:
                    time.sleep(0.1)
        except OSError:
            pass  # the client is gone, as it is when it was killed
        if limit < len(rest):
            switches.drops -= 1
            handler.close_connection = True
