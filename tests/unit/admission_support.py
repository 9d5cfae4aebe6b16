"""The door with a fake engine behind it, as a real process; and plain sockets to knock with."""

from __future__ import annotations

import contextlib
import http.client
import json
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from waiting import until

from slimserve.engine.control import Control
from slimserve.engine.control import Door as State

UPSTREAM = Path(__file__).resolve().parent.parent / "fakes" / "upstream.py"
DEADLINE_SECONDS = 60.0


class Answer:
    """A complete HTTP answer."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.notes = response.headers.get_all("x-slimserve-note") or []
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Door:
    """A process with the door in it, open.

    Args:
        folder: of the control socket and the log.
        settings: constants of the door that are shortened, `module.NAME` -> value.
        config: of the door.
    """

    def __init__(self, folder: Path, settings: dict[str, float] | None = None, loop: str = "uvloop", **config: Any):
        folder.mkdir(exist_ok=True)
        self.control = Control(folder / "control")
        self.log = folder / "log"
        config = {"max_in_flight": 4, "max_model_len": 4096} | config
        argv = [sys.executable, str(UPSTREAM), "--control", str(self.control.path), "--config", json.dumps(config)]
        for name, value in (settings or {}).items():
            argv += ["--set", f"{name}={value}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*argv, "--loop", loop], stdout=subprocess.PIPE, stderr=log)
        line = self._line()
        self.port, self.bare = (int(word) for word in line.split()[-2:])
        until(self._listens)
        self.control.accept()

    def _line(self) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(DEADLINE_SECONDS), "the process says nothing"
        line = self.process.stdout.readline().decode()
        assert line, self.log.read_text()
        return line

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return bool(self.state)
        except OSError:
            return False

    @property
    def state(self) -> State:
        return self.control.door(DEADLINE_SECONDS)

    @property
    def seen(self) -> dict[str, Any]:
        """What the fake engine saw."""
        seen: dict[str, Any] = json.loads(self.control.ask("GET", "/fake/state")[1])
        return seen

    def empty(self) -> None:
        """Every slot came back."""
        until(lambda: (self.state.in_flight, self.state.waiting) == (0, 0))
        assert self.state.stalled_seconds == 0

    def ask(
        self,
        body: Any = None,
        path: str = "/v1/chat/completions",
        method: str = "POST",
        headers: dict[str, str] | None = None,
        **fake: Any,
    ) -> Answer:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_SECONDS)
        if method == "POST" and not isinstance(body, bytes):
            body = json.dumps(chat(**fake) | (body or {})).encode()
        connection.request(method, path, body, {"Content-Type": "application/json"} | (headers or {}))
        answer = Answer(connection.getresponse())
        connection.close()
        return answer

    def start(self, body: Any = None, **fake: Any) -> socket.socket:
        """Send a request and leave its answer in the socket."""
        return self.send(request(json.dumps(chat(**fake) | (body or {})).encode()))

    def send(self, *pieces: bytes) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), DEADLINE_SECONDS)
        for piece in pieces:
            sock.sendall(piece)
        return sock

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.control.path.unlink(missing_ok=True)


@contextlib.contextmanager
def nothing_lost(door: Door) -> Iterator[None]:
    """What is tried inside leaves the door without a slot taken, without a traceback, and fit to answer."""
    before = door.log.stat().st_size
    yield
    door.empty()
    assert "Traceback" not in door.log.read_text()[before:]
    assert door.ask().status == 200


def chat(**fake: Any) -> dict[str, Any]:
    """A chat request that tells the fake engine what to do."""
    return {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "fake": fake}


def request(body: bytes, *headers: bytes, length: int | None = None, path: bytes = b"/v1/chat/completions") -> bytes:
    """The bytes of a POST."""
    size = b"content-length: %d" % (len(body) if length is None else length)
    lines = [b"POST " + path + b" HTTP/1.1", b"host: x", b"content-type: application/json", size, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def receive_all(sock: socket.socket) -> bytes:
    """All that comes until the other side closes; nothing more after a reset."""
    pieces: list[bytes] = []
    try:
        while piece := sock.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        pieces.append(b"<reset>")
    return b"".join(pieces)


def receive_until(sock: socket.socket, mark: bytes) -> bytes:
    """What comes up to `mark`."""
    seen = b""
    while mark not in seen:
        piece = sock.recv(65536)
        assert piece, f"closed before {mark!r}: {seen!r}"
        seen += piece
    return seen


def release(sockets: Iterable[socket.socket]) -> None:
    """Hang up on all of them."""
    for sock in sockets:
        sock.close()
