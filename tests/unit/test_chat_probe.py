"""Who listens at an endpoint's address, who is told the key, and what the chat says to it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TextIO

import pytest
from chat_support import fake_engine, response, scripted_server

from slimserve import run
from slimserve.chat import Endpoint, find, probe
from slimserve.engine import variables
from slimserve.engine.front import Front
from slimserve.engine.state import Board, State
from slimserve.errors import Failed, Refused, SlimserveError, UsageError
from slimserve.plan import describe
from slimserve.registry_files import load_registry
from slimserve.session import Session

GOOD = Path(__file__).parent.parent / "registry"
PROFILE = "tiny-bf16-box"
SILENT_SECONDS = 0.3


@contextlib.contextmanager
def listener(key: str | None, status: int = 401, model: str = "m") -> Iterator[tuple[str, list[str | None]]]:
    """A server that lists `model` to those who give `key`; yields its URL and the Authorization of each request."""
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = self.headers.get("Authorization")
            seen.append(given)
            allowed = key is None or given == f"Bearer {key}"
            body = json.dumps({"data": [{"id": model}]} if allowed else {"error": "no"}).encode()
            self.send_response(200 if allowed else status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """An address that refuses connections: bound, so that nobody else gets it, and not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/v1"


@pytest.mark.parametrize("status", [401, 403])
def test_the_key_is_sent_only_to_who_asked_for_one(status: int) -> None:
    with listener("k", status) as (base_url, seen):
        assert probe(Endpoint(base_url, "m", "k")) == "serving"
        assert seen == [None, "Bearer k"]
        assert probe(Endpoint(base_url, "m", "wrong")) == "refuses-key"
        assert probe(Endpoint(base_url, "m")) == "refuses-key"
        assert seen[2:] == [None, "Bearer wrong", None]


@pytest.mark.parametrize(("model", "presence"), [("m", "serving"), ("another", "other")])
def test_a_server_that_asks_for_no_key_is_never_told_it(model: str, presence: str) -> None:
    with listener(None, model=model) as (base_url, seen):
        assert find(Endpoint(base_url, "m", "k")) == (presence, Endpoint(base_url, "m"))
        assert seen == [None]


@pytest.mark.parametrize(
    "answer",
    [
        response(b"SSH-2.0", "text/plain"),
        response(b"{}", "application/json", "404 Not Found"),
        b"SSH-2.0-OpenSSH_9.7\r\n",
        b"",
    ],
)
def test_what_answers_otherwise_is_another_and_is_not_told_the_key(answer: bytes) -> None:
    with scripted_server(answer) as base_url:
        assert find(Endpoint(base_url, "m", "k")) == ("other", Endpoint(base_url, "m"))


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{"])
def test_who_takes_the_connection_and_keeps_silent_is_busy(begun: bytes) -> None:
    with scripted_server(begun, hold=True) as base_url:
        assert probe(Endpoint(base_url, "m"), deadline_seconds=SILENT_SECONDS) == "busy"


def test_a_frozen_server_whose_queue_is_full_is_busy() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        endpoint = Endpoint(f"http://127.0.0.1:{server.getsockname()[1]}/v1", "m")
        assert probe(endpoint, deadline_seconds=SILENT_SECONDS) == "busy"


def test_nobody_and_no_address() -> None:
    with nobody() as base_url:
        assert probe(Endpoint(base_url, "m", "k")) == "nobody"
    with pytest.raises(UsageError):
        probe(Endpoint("ftp://127.0.0.1/v1", "m"))


class Launched(Exception):
    """The chat went on to start an engine."""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    def launch(*_: object) -> None:
        raise Launched

    monkeypatch.setattr(run, "launch", launch)
    registry = load_registry(GOOD, variables.OWNED)
    environment = {**os.environ, run.API_KEY_VARIABLE: "sk-ours"}
    return Session(registry, describe(registry.platforms["box"], 1 << 30), True, tmp_path, environment)


def chat(session: Session, base_url: str, system: str | None = None) -> int:
    port = int(base_url.rpartition(":")[2].removesuffix("/v1"))
    return run.chat(session, session.registry.default, "127.0.0.1", port, system, "Hi")


def refusal(session: Session, base_url: str) -> SlimserveError:
    with pytest.raises(SlimserveError) as caught:
        chat(session, base_url)
    assert "sk-ours" not in str(caught.value)
    return caught.value


def test_the_chat_says_that_its_key_is_refused(session: Session) -> None:
    with listener("sk-other") as (base_url, _):
        error = refusal(session, base_url)
    assert isinstance(error, Refused)
    assert str(error).startswith(f"the endpoint at {base_url} refuses the key\n")
    assert "set SLIMSERVE_API_KEY" in error.findings[0].do


def test_the_chat_says_that_the_endpoint_keeps_silent(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "__kwdefaults__", {"deadline_seconds": SILENT_SECONDS})
    with scripted_server(hold=True) as base_url:
        error = refusal(session, base_url)
    assert isinstance(error, Failed)
    assert f"the endpoint at {base_url} does not answer" in str(error)


def test_the_chat_repeats_what_an_endpoint_that_loads_says(session: Session) -> None:
    board = Board()
    board.move(State.LOADING, "the engine loads the model")
    with socket.create_server(("127.0.0.1", 0)) as public:
        front = Front(public, board)
        front.accept()
        error = refusal(session, f"http://127.0.0.1:{public.getsockname()[1]}/v1")
        front.close()
    assert isinstance(error, Failed)
    assert "the endpoint is loading: the engine loads the model; ask again in " in str(error)


def test_the_chat_says_that_something_else_has_the_port(session: Session) -> None:
    with listener(None, model="another") as (base_url, seen):
        error = refusal(session, base_url)
    assert isinstance(error, Refused)
    assert f"something else answers at {base_url}" in str(error)
    assert "--port" in error.findings[0].do
    assert seen == [None]


def test_the_chat_starts_an_engine_only_where_nobody_listens(session: Session) -> None:
    with nobody() as base_url, pytest.raises(Launched):
        chat(session, base_url)


def test_the_chat_starts_no_engine_for_an_empty_input(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def talk(base_url: str, given: TextIO) -> int:
        monkeypatch.setattr(sys, "stdin", given)
        port = int(base_url.rpartition(":")[2].removesuffix("/v1"))
        return run.chat(session, session.registry.default, "127.0.0.1", port, None, None)

    with nobody() as base_url, open(os.devnull) as empty:
        assert talk(base_url, empty) == 0
        reader, writer = os.pipe()
        with open(reader) as pipe:
            with pytest.raises(Launched):  # whoever writes may wait for the engine first
                talk(base_url, pipe)
            os.write(writer, b"Hi\n")
            with pytest.raises(Launched):
                talk(base_url, pipe)
            assert pipe.readline() == "Hi\n"
            os.close(writer)
            assert talk(base_url, pipe) == 0


@pytest.mark.parametrize(("key", "told"), [("", []), ("sk-ours", ["Bearer sk-ours"])])
def test_the_chat_talks_to_who_serves_and_tells_the_key_if_asked(session: Session, key: str, told: list[str]) -> None:
    with fake_engine("--model", PROFILE, key=key) as engine:
        assert chat(session, engine.base_url) == 0
        assert list(filter(None, engine.events()["authorizations"])) == told


def test_a_system_prompt_that_is_not_utf_8_is_refused_before_anything_is_asked(session: Session) -> None:
    with nobody() as base_url, pytest.raises(UsageError, match="--system is not UTF-8"):
        chat(session, base_url, "\udcff")
