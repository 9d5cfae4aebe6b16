"""States, what is answered in them, and what other programs are told."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from supervisor_support import ROOT, Fake, fake_fixture

from slimserve import status_command
from slimserve.engine import endpoints, waiting
from slimserve.engine.control import Control, Door, Line
from slimserve.engine.front import Front
from slimserve.engine.ports import listen
from slimserve.engine.record import FILE_NAME
from slimserve.engine.state import Board, Crash, State
from slimserve.engine.supervisor import Supervisor
from slimserve.errors import Failed


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    yield from fake_fixture(tmp_path)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e9
        monkeypatch.setattr("slimserve.engine.state.time.time", lambda: self.now)


def test_the_time_to_wait_is_the_rest_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    board = Board(usual={State.LOADING: 30.0, State.WARMING: 5.0})
    board.move(State.LOADING, "x")
    assert board.retry_seconds() == 35
    clock.now += 20.0
    assert board.retry_seconds() == 15
    clock.now += 9.0
    assert board.retry_seconds() == 6
    clock.now += 91.0  # later than usual: what is left is the next state
    assert board.retry_seconds() == 5
    board.move(State.WARMING, "x")  # and from now on a load is known to take 120 s
    clock.now += 2.0
    board.move(State.READY, "x")
    assert board.retry_seconds() == 1
    assert board.usual_seconds == 122
    board.move(State.RESTARTING, "x", deadline_seconds=1.0)
    assert board.retry_seconds() == 60
    for state in (State.DRAINING, State.FAILED, State.STOPPED):
        board.move(state, "x", deadline_seconds=600.0)
        assert board.retry_seconds() == 60  # 122 s, within bounds


def test_nobody_is_told_to_come_back_a_moment_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    board = Board(usual={State.LOADING: 95.0, State.WARMING: 5.0})
    board.move(State.WARMING, "x")
    clock.now += 60.0
    assert board.retry_seconds() == 10
    board = Board(usual={State.LOADING: 4.0, State.WARMING: 1.0})
    board.move(State.WARMING, "x")
    clock.now += 60.0
    assert board.retry_seconds() == 2


@given(st.sampled_from(State), st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_time_to_wait_has_bounds(state: State, usual: float, deadline: float) -> None:
    board = Board(usual={State.LOADING: usual, State.WARMING: usual})
    board.move(state, "x", deadline_seconds=deadline)
    assert (1 if state is State.READY else 2) <= board.retry_seconds() <= 60


def test_an_amended_reason_keeps_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    told: list[tuple[str, float]] = []
    board = Board(lambda status: told.append((status.reason, status.since)))
    board.move(State.FETCHING, "nothing yet")
    clock.now += 5
    board.amend("half of it")
    assert told == [("nothing yet", 1e9), ("half of it", 1e9)]


class Answers(BaseHTTPRequestHandler):
    """Says the next of the server's states; None: nothing at all."""

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        states = self.server.states  # type: ignore[attr-defined]
        raw = states.pop(0) if len(states) > 1 else states[0]
        if raw is None:
            self.server.over.wait()  # type: ignore[attr-defined]
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@contextmanager
def door(tmp_path: Path, *states: dict[str, Any] | bytes | None) -> Iterator[Control]:
    path = tmp_path / "door.sock"
    with ThreadingUnixStreamServer(str(path), Answers) as server:
        server.over = over = threading.Event()  # type: ignore[attr-defined]
        server.states = [json.dumps(one).encode() if isinstance(one, dict) else one for one in states]  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield Control(path)
        finally:
            over.set()
            server.shutdown()


def state(stalled: float = 0.0, in_flight: int = 1) -> dict[str, Any]:
    return {"accepting": True, "in_flight": in_flight, "waiting": 0, "cap": 8, "stalled_seconds": stalled}


def watch(control: Control, seconds: float, report: Callable[[str], None] = print, least: float = 0.01) -> str:
    return waiting.until_frozen(control, seconds, report, threading.Event(), pause=0.01, least=least)


def test_a_state_is_read_strictly(tmp_path: Path) -> None:
    with door(tmp_path, state(1.5)) as control:
        assert control.door() == Door(accepting=True, in_flight=1, waiting=0, cap=8, stalled_seconds=1.5)
    for wrong in ({**state(), "in_flight": -1}, {**state(), "more": 1}, b"[]", b"{", b"\xff", {}):
        (tmp_path / "door.sock").unlink(missing_ok=True)
        with door(tmp_path, wrong) as control, pytest.raises(OSError, match="the door's state is not readable"):
            control.door()


def test_a_stall_is_a_freeze_only_at_the_second_look(tmp_path: Path) -> None:
    states = (state(9), state(0), state(9), state(0), state(9), state(9, 3))
    with door(tmp_path, *states) as control:
        assert watch(control, 5.0) == "3 sequences are under way, and for 9 s there was no step"


def test_silence_is_a_freeze(tmp_path: Path) -> None:
    with door(tmp_path, None) as control:
        assert watch(control, 0.3) == "its API server has not answered for 0.31 s"
        (tmp_path / "door.sock").unlink()
    with socket.socket(socket.AF_UNIX) as deaf:  # bound, and nobody listens
        deaf.bind(str(tmp_path / "door.sock"))
        assert "has not answered" in watch(Control(tmp_path / "door.sock"), 0.1)


def test_one_silence_is_none(tmp_path: Path) -> None:
    """Such as that of an engine that was stopped for as long as its supervisor was."""
    with door(tmp_path, None, state(), None, state(9), state(9)) as control:
        assert "no step" in watch(control, 0.3, least=0.3)


def test_what_is_in_our_own_way_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def full(*args: Any) -> None:
        if len(said) == 1:
            monkeypatch.undo()
        raise OSError(errno.EMFILE, "Too many open files")

    with door(tmp_path, state(9), state(9)) as control:
        monkeypatch.setattr("slimserve.engine.control.socket.socket", full)
        assert "no step" in watch(control, 0.0, said.append)
    (told,) = said
    assert told.startswith("the engine cannot be watched: ")
    assert "Too many open files" in told


def test_one_connection_serves_the_whole_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "protocol_version", "HTTP/1.1")
    looked: list[int] = []

    def removed(line: Line, seconds: float) -> Door:
        looked.append(1)
        if len(looked) == 2:
            (tmp_path / "door.sock").unlink()  # whoever tidies up there takes nothing from us
        return found(line, seconds)

    found = Line.door
    monkeypatch.setattr(Line, "door", removed)
    with door(tmp_path, state(), state(), state(9), state(9)) as control:
        assert "no step" in watch(control, 5.0)
    assert len(looked) == 4


def test_a_connection_that_the_engine_closed_is_made_anew(tmp_path: Path) -> None:
    with door(tmp_path, state(1)) as control, contextlib.closing(Line(control)) as line:  # HTTP/1.0: one answer each
        for _ in range(3):
            assert line.door(5.0).stalled_seconds == 1


def test_the_page_is_served_beside_the_front() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"the page"})

    public, page = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
    front = Front(public, Board())
    try:
        front.accept()
        front.serve(lambda: app, page)
        assert get(page) == (200, b"the page")
        assert get(public)[0] == 503
        front.pause()
        front.accept()
        assert get(public)[0] == 503
    finally:
        front.close()
        public.close()
        page.close()


def test_a_page_that_is_being_made_does_not_open_after_the_end() -> None:
    events: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        events.append(scope["type"])

    def make() -> Any:
        time.sleep(0.3)
        return app

    public, page = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
    front = Front(public, Board())
    served = front.serve(make, page)
    front.close()
    public.close()
    assert page.fileno() == -1
    with pytest.raises((CancelledError, TimeoutError)):
        served.result(1.0)
    time.sleep(0.4)
    assert events == []


def test_a_page_that_cannot_be_made_refuses_instead_of_being_silent() -> None:
    def make() -> Any:
        raise RuntimeError("no page today")

    public, page = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
    where = page.getsockname()
    front = Front(public, Board())
    try:
        with pytest.raises(RuntimeError, match="no page today"):
            front.serve(make, page).result(10.0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where, 10.0)
    finally:
        front.close()
        public.close()


def test_silent_connections_do_not_use_up_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimserve.engine.front.PAGE_CONNECTIONS", 4)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"the page"})

    public, page = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
    front = Front(public, Board())
    with contextlib.ExitStack() as clients:
        try:
            front.serve(lambda: app, page)
            silent = []
            for _ in range(12):
                silent.append(clients.enter_context(socket.create_connection(page.getsockname(), 60)))
                assert get(page) == (200, b"the page")
            for client in silent[:8]:
                assert client.recv(1) == b""  # the longest silent made room
        finally:
            front.close()
            public.close()


def test_who_says_nothing_to_the_page_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimserve.admission.protocol.HEADER_SECONDS", 0.1)
    public, page = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
    front = Front(public, Board())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody asked")

    try:
        front.serve(lambda: app, page)
        with socket.create_connection(page.getsockname(), 60) as silent:
            assert silent.recv(1) == b""
    finally:
        front.close()
        public.close()


def get(listening: socket.socket) -> tuple[int, bytes]:
    return get_at(listening.getsockname()[1], "/")


def get_at(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_weights_that_come_no_further_end_the_start(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimserve.engine.fetching.FETCH_SECONDS", 0.2)
    over = threading.Event()
    supervisor = Supervisor(fake.launch(), print, lambda progress: over.wait(60) and None)
    with pytest.raises(Failed, match=r"have not come any further for 0\.2 s"), supervisor:
        pytest.fail("it never was ready")
    over.set()
    assert fake.processes() == []


def test_clients_hear_how_far_the_weights_are(fake: Fake) -> None:
    launch = fake.launch()
    heard: list[str] = []

    def prepare(progress: Any) -> None:
        deadline = time.monotonic() + 30
        while not any("fetching a.bin: 50%" in text for text in heard):
            assert time.monotonic() < deadline, heard
            progress(5_000_000, 10_000_000, "fetching a.bin")
            heard.append(get_at(launch.port, "/")[1].decode())

    with Supervisor(launch, print, prepare):
        pass
    assert "the endpoint is fetching" in heard[-1]


def test_an_interrupted_fetch_is_cancelled(fake: Fake) -> None:
    seen: list[str] = []

    def prepare(progress: Any) -> None:
        try:
            while True:
                progress(1, 2, "x")
                time.sleep(0.01)
                if not seen:
                    seen.append("begun")
                    os.kill(os.getpid(), 2)
        except BaseException as error:
            seen.append(type(error).__name__)
            raise

    with pytest.raises(KeyboardInterrupt), Supervisor(fake.launch(), print, prepare):
        pytest.fail("it never was ready")
    assert seen == ["begun", "Cancelled"]


def status(fake: Fake, *arguments: str) -> str:
    environment = {"PATH": os.environ["PATH"], "SLIMSERVE_STATE": str(fake.runs.parent), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "slimserve", "--status", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_status_names_what_runs(fake: Fake) -> None:
    assert status(fake) == "no endpoint runs\n"
    launch = fake.launch()
    with Supervisor(launch, print):
        text = status(fake)
        assert text.startswith("fake-profile  ready since ")
        assert "0 of 8 in flight, 0 waiting at the door" in text
        assert f"http://127.0.0.1:{launch.port}/v1" in text
        (one,) = json.loads(status(fake, "--json"))["endpoints"]
        assert (one["state"], one["pid"], one["door"]["accepting"]) == ("ready", os.getpid(), True)
        assert (one["listens"], one["asks_for_key"], one["origins"]) == (f"127.0.0.1:{launch.port}", False, [])
        assert f"listens on 127.0.0.1:{launch.port}, asks for no key; web pages that may call: none" in text
        assert (launch.run_folder / endpoints.FILE_NAME).stat().st_mode & 0o077 == 0
    assert status(fake) == "no endpoint runs\n"


def test_status_shows_the_end_of_a_crash_and_where_the_rest_is(fake: Fake) -> None:
    launch = fake.launch()
    words = tuple(f"line {number} " + "x" * 500 for number in range(30))
    with Supervisor(launch, print) as supervisor:
        crash = Crash(1.0, "the engine ended by itself", "somebody killed it", words, "/runs/engine.log")
        supervisor.board.move(State.FAILED, "that was the crash number 3 in a row", crash=crash)
        lines = status(fake).splitlines()
        shown = [line for line in lines if line.startswith("    | ")]
        assert [line.split()[2] for line in shown] == ["25", "26", "27", "28", "29"]
        assert all(len(line) < 180 for line in shown)
        assert lines[lines.index(shown[-1]) + 1] == "    what it said before: --status --json, or /runs/engine.log"
        (one,) = json.loads(status(fake, "--json"))["endpoints"]
        assert one["crash"]["last_words"] == list(words)


def test_status_names_a_leftover_and_forgets_the_dead(fake: Fake, tmp_path: Path) -> None:
    launch = fake.launch()
    with Supervisor(launch, print):
        for name in (endpoints.FILE_NAME, FILE_NAME):
            fields = json.loads((launch.run_folder / name).read_text())
            for key in ("start_ticks", "supervisor_start_ticks"):
                if key in fields and (key != "start_ticks" or name == endpoints.FILE_NAME):
                    fields[key] -= 1  # as if that process were gone, and its number another's
            (launch.run_folder / name).write_text(json.dumps(fields))
        data = status_command.look({"SLIMSERVE_STATE": str(tmp_path)})
        assert data["endpoints"] == []
        (left,) = data["leftovers"]
        assert (left["profile"], left["pids"]) == ("fake-profile", [one.pid for one in fake.processes()])
        assert "an engine whose supervisor died" in status_command.render(data, time.time())
