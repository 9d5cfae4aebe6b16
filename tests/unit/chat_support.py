"""Servers to chat with and a terminal to chat on: real processes, real sockets, a deadline on each wait."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("chat_driver.py")
DEADLINE_SECONDS = 20.0
CTRL_A, CTRL_C, CTRL_D, UP = "\x01", "\x03", "\x04", "\x1b[A"


def wait_until(true: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Poll until `true`, or fail with `what` was awaited."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(0.01)


class FakeEngine:
    """The fake engine of tests/fakes, and what it has seen."""

    def __init__(self, port: int, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.root = f"http://127.0.0.1:{port}"
        self.base_url = f"{self.root}/v1"

    def events(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.root}/fake/events", timeout=DEADLINE_SECONDS) as answer:
            return json.load(answer)

    def bodies(self) -> list[dict[str, Any]]:
        return [request["body"] for request in self.events()["requests"]]

    def wait_for_requests(self, count: int) -> None:
        wait_until(lambda: len(self.bodies()) >= count, f"{count} requests")

    def wait_for_disconnect(self) -> None:
        wait_until(lambda: self.events()["disconnects"] == 1, "the server to see that the client left", 5.0)


@contextlib.contextmanager
def fake_engine(*switches: str, key: str = "") -> Iterator[FakeEngine]:
    """A fake engine that listens, stopped at the end."""
    command = [sys.executable, str(REPO / "tests/fakes/engine.py"), *switches]
    env = {**os.environ, "VLLM_API_KEY": key}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as process:
        assert process.stdout is not None
        try:
            port = next(int(line.split()[-1]) for line in process.stdout if line.startswith("listening on "))
            # Its log is read to the end, or a full pipe would hold it up.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield FakeEngine(port, process)
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def scripted_server(*pieces: bytes, hold: bool = False) -> Iterator[str]:
    """Answers each request with exactly these bytes, a segment each, then closes; with `hold` waits for the client.

    Yields the base URL.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    _read_request(client)
                    for piece in pieces:
                        client.sendall(piece)
                    while hold and client.recv(4096):
                        pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        # A close alone does not wake a thread that is in accept.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _read_request(client: socket.socket) -> None:
    got = b""
    while b"\r\n\r\n" not in got:
        got += client.recv(65536) or b"\r\n\r\n"
    head, _, body = got.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += client.recv(65536) or b" " * length


def response(body: bytes, kind: str = "text/event-stream", status: str = "200 OK") -> bytes:
    """An answer whose end is the end of the connection."""
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode() + body


def event(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
    """One streamed event."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def environment(**more: str) -> dict[str, str]:
    """The environment of a driver: no leftovers of ours that change colours or encodings."""
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "INPUTRC", "PYTHONIOENCODING")}
    return {**kept, "PYTHONPATH": str(REPO), "TERM": "xterm", "LC_ALL": "C.UTF-8", "INPUTRC": os.devnull, **more}


def start(base_url: str, *arguments: str, env: dict[str, str] | None = None, **pipes: Any) -> subprocess.Popen[bytes]:
    """A driver with pipes at all three ends unless told otherwise."""
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
    return subprocess.Popen([sys.executable, str(DRIVER), base_url, *arguments], env=env or environment(), **ends)


def run(base_url: str, *arguments: str, given: bytes = b"", env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run a driver to its end: exit code, stdout, stderr. No traceback, ever."""
    with start(base_url, *arguments, env=env) as process:
        out, err = process.communicate(given, timeout=DEADLINE_SECONDS)
    assert b"Traceback" not in err, err.decode()
    return process.returncode, out.decode(), err.decode()


def seconds_to_end(process: subprocess.Popen[bytes], number: int) -> float:
    """Send a signal and take the time until the process has ended."""
    begun = time.monotonic()
    process.send_signal(number)
    process.wait(timeout=DEADLINE_SECONDS)
    return time.monotonic() - begun


class Terminal:
    """A driver on a terminal of its own, read with deadlines."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master = process, master
        self.shown = ""
        self._seen = 0
        self._rest = b""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str, seconds: float = DEADLINE_SECONDS) -> str:
        """Wait until `text` is shown behind what was expected before; returns what was shown up to its end."""
        until = time.monotonic() + seconds
        while (at := self.shown.find(text, self._seen)) < 0:
            left = until - time.monotonic()
            assert left > 0, f"{text!r} was not shown within {seconds} s behind {self.shown[self._seen :]!r}"
            self._read(left)
        since, self._seen = self._seen, at + len(text)
        return self.shown[since : self._seen]

    def end(self) -> int:
        """Read to the end of the process; its exit code."""
        until = time.monotonic() + DEADLINE_SECONDS
        while self._read(max(0.0, until - time.monotonic())):
            assert time.monotonic() < until, f"it did not end: {self.shown!r}"
        return self.process.wait(timeout=DEADLINE_SECONDS)

    def _read(self, seconds: float) -> bool:
        readable, _, _ = select.select([self._master], [], [], seconds)
        if not readable:
            return True
        try:
            got = os.read(self._master, 65536)
        except OSError:
            # Linux says EIO when the last process has left the terminal.
            got = b""
        text = (self._rest + got).decode(errors="surrogateescape")
        self._rest = b""
        self.shown += text
        return bool(got)


@contextlib.contextmanager
def terminal(base_url: str, *arguments: str, stdout: Any = None, **env: str) -> Iterator[Terminal]:
    """A chat on a terminal, its prompt awaited; killed at the end if it is still there."""
    master, slave = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    try:
        process = start(
            base_url,
            *arguments,
            env=environment(**env),
            stdin=slave,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(slave)
        screen = Terminal(process, master)
        try:
            screen.expect("> ")
            yield screen
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
    finally:
        os.close(master)


def spoken(body: dict[str, Any]) -> Sequence[tuple[str, str]]:
    """The messages of a request as (role, content), each holding nothing else."""
    assert all(set(message) == {"role", "content"} for message in body["messages"])
    return [(message["role"], message["content"]) for message in body["messages"]]
