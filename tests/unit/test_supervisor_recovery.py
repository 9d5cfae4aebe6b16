"""Crashes, freezes and drains of an endpoint whose clients go on asking."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor_support import Driver, Fake, ask, fake_fixture, free_port
from waiting import until

from harness.clients import Clients
from slimserve import chat_probe, status_command
from slimserve.client_faults import Endpoint
from slimserve.engine import endpoints, procfs
from slimserve.engine.attempt import Launch
from slimserve.engine.control import Control
from slimserve.engine.state import moment

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
PATIENCE = 60.0


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    yield from fake_fixture(tmp_path)


def leader(fake: Fake, driver: Driver) -> procfs.Process:
    """The API server of the fake engine."""
    (found,) = [one for one in fake.processes() if one.session == one.pid and one.parent == driver.process.pid]
    return found


def stop(driver: Driver, code: int = 0) -> str:
    driver.process.send_signal(signal.SIGTERM)
    ended, errors = driver.finish(PATIENCE)
    assert ended == code, errors
    return errors


def unavailable(port: int, path: str = "/v1/chat/completions", body: object = CHAT) -> tuple[int, str]:
    """What the front says: seconds to wait, and the message."""
    status, headers, raw = ask(port, path, body)
    assert status == 503
    assert headers["connection"] == "close"
    error = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(headers["retry-after"]), error["message"]


def clients_of(port: int, count: int = 4) -> Clients:
    """Clients that ask without a pause."""
    return Clients(lambda: ask(port, "/v1/chat/completions", CHAT)[0], count)


def test_who_comes_too_early_is_told_when_to_come_back(fake: Fake) -> None:
    launch = fake.launch("--load-seconds", "60")
    driver = Driver(launch)
    driver.until_report("loading")
    seconds, message = unavailable(launch.port)
    assert 1 <= seconds <= 60
    assert message.startswith("the endpoint is loading: ")
    unavailable(launch.port, "/health", None)
    assert chat_probe.probe(Endpoint(f"http://127.0.0.1:{launch.port}/v1", "fake")) == "busy"
    # A body that is still being sent does not cost the client the answer.
    with socket.create_connection(("127.0.0.1", launch.port), timeout=30) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        client.sendall(b"x" * 3_000_000)
        assert client.recv(65536).startswith(b"HTTP/1.1 503 ")
    with socket.create_connection(("127.0.0.1", launch.port), timeout=30) as client:
        client.sendall(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert answer.endswith(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", launch.port), timeout=30) as client:
        client.sendall(b"G" * 100_000)
        assert client.recv(65536).startswith(b"HTTP/1.1 503 ")
    assert stop(driver, 1) == ""


def test_kill_9_of_the_engine_is_a_pause_for_its_clients(fake: Fake) -> None:
    launch = fake.launch("--load-seconds", "0.5")
    driver = Driver(launch)
    driver.until_report("ready")
    first = leader(fake, driver)
    with clients_of(launch.port) as clients:
        until(lambda: clients.met[200] > 20)
        os.kill(first.pid, signal.SIGKILL)
        driver.until_report("restarting in 0 s")
        driver.until_report("ready")
        before = clients.met[200]
        until(lambda: clients.met[200] > before + 20)
    # Who was talking to the engine as it died is cut off; nobody is refused, and nobody hangs.
    cut = {"RemoteDisconnected", "ConnectionResetError", "IncompleteRead", "BrokenPipeError", "BadStatusLine"}
    assert set(clients.met) <= {200, 503} | cut
    assert sum(clients.met[name] for name in cut) <= 8
    assert clients.met[503] > 0
    assert clients.longest_seconds < 30
    assert leader(fake, driver).pid != first.pid
    (endpoint,) = endpoints.living(fake.runs)
    assert (endpoint.status.state, endpoint.status.restarts) == ("ready", 1)
    crash = endpoint.status.crash  # of which everything else that is shown has nothing left
    assert crash is not None
    assert "signal 9 (SIGKILL)" in crash.what
    assert crash.when <= endpoint.status.since
    assert crash.log == endpoint.log
    assert any(line.startswith("fake: POST ") for line in crash.last_words)
    text = status_command.render(status_command.look({"SLIMSERVE_STATE": str(fake.runs.parent)}), time.time())
    assert "restarted once\n" in text
    assert f"last crash {moment(crash.when)}: {crash.what}\n" in text
    stop(driver)
    assert endpoints.living(fake.runs) == []


def test_three_crashes_in_a_row_end_in_failed_with_the_last_words(fake: Fake) -> None:
    launch = fake.launch("--crash-after", "0.5", "--print-lines", "3")
    driver = Driver(launch, "--hold-seconds", "120")
    driver.until_report("failed; the reason is answered")
    assert sum(line.startswith("ready ") for line in driver.lines) == 3
    _, message = unavailable(launch.port)
    assert message.startswith("the endpoint is failed: the engine ended by itself")
    assert "exit status 7" in message
    (endpoint,) = endpoints.living(fake.runs)
    assert (endpoint.status.state, endpoint.status.restarts) == ("failed", 2)
    assert endpoint.status.crash is not None
    assert any("listening on" in line for line in endpoint.status.crash.last_words)
    fake.require_none()
    errors = stop(driver, 1)
    assert "exit status 7" in errors
    assert "Traceback" not in errors


def test_the_process_that_died_first_is_named_with_its_signal(fake: Fake) -> None:
    launch = fake.launch("--core")
    driver = Driver(launch)
    driver.until_report("ready")
    (core,) = [one for one in fake.processes() if one.parent == leader(fake, driver).pid]
    os.kill(core.pid, signal.SIGKILL)
    told = driver.until_report("the engine ended by itself")
    assert f": its process {core.pid} (" in told
    assert ") died first: signal 9 (SIGKILL)" in told
    driver.until_report("ready")
    text = "\n".join(driver.lines)
    assert "somebody killed it; not the kernel's out-of-memory killer" in text or "probably" in text
    assert "ERROR 11-30 04:00:00 [core_client.py:1] the core is dead" in text
    assert "what follows from that: 99" in text
    stop(driver)


def test_of_a_killed_api_server_the_core_that_the_kernel_kills_with_it_is_not_blamed(fake: Fake) -> None:
    launch = fake.launch("--core")
    driver = Driver(launch)
    driver.until_report("ready")
    first = leader(fake, driver)
    os.kill(first.pid, signal.SIGKILL)
    told = driver.until_report("the engine ended by itself")
    assert told.endswith(f": its process {first.pid} (the API server) died first: signal 9 (SIGKILL)\n")
    driver.until_report("ready")
    stop(driver)


def test_an_engine_whose_log_became_a_pipe_is_not_waited_for(fake: Fake) -> None:
    launch = fake.launch()
    driver = Driver(launch)
    driver.until_report("ready")
    (launch.run_folder / "engine.log").unlink()
    os.mkfifo(launch.run_folder / "engine.log")
    os.kill(leader(fake, driver).pid, signal.SIGKILL)
    assert "engine.log is no plain file" in driver.until_report("cannot write in the run folder")
    driver.until_report("failed")
    stop(driver, 1)


def test_an_engine_whose_log_was_taken_away_is_started_anew_all_the_same(fake: Fake) -> None:
    launch = fake.launch()
    driver = Driver(launch)
    driver.until_report("ready")
    (launch.run_folder / "engine.log").unlink()
    os.kill(leader(fake, driver).pid, signal.SIGKILL)
    driver.until_report("ready")
    assert (launch.run_folder / "engine.log").stat().st_mode & 0o077 == 0
    stop(driver)


def test_an_engine_whose_folder_was_taken_away_goes_on_and_is_started_anew_after_a_crash(fake: Fake) -> None:
    launch = fake.launch(stall_seconds=1.0)
    driver = Driver(launch)
    driver.until_report("ready")
    first = leader(fake, driver)
    shutil.rmtree(launch.run_folder)
    deadline = time.monotonic() + 4.0
    until(lambda: time.monotonic() > deadline)
    assert leader(fake, driver).pid == first.pid
    assert ask(launch.port, "/v1/chat/completions", CHAT)[0] == 200
    os.kill(first.pid, signal.SIGKILL)
    driver.until_report("ready")
    assert ask(launch.port, "/v1/chat/completions", CHAT)[0] == 200
    (endpoint,) = endpoints.living(fake.runs)
    assert (endpoint.status.state, endpoint.status.restarts) == ("ready", 1)
    stop(driver)


def test_a_folder_that_cannot_be_made_anew_is_a_crash_and_no_traceback(fake: Fake) -> None:
    launch = fake.launch()
    driver = Driver(launch, "--hold-seconds", "0.2")
    driver.until_report("ready")
    first = leader(fake, driver)
    shutil.rmtree(launch.run_folder)
    launch.run_folder.write_text("in the way")
    os.kill(first.pid, signal.SIGKILL)
    code, errors = driver.finish(PATIENCE)
    assert code == 1
    assert "cannot write in the run folder" in errors
    assert "Traceback" not in errors


def test_the_hold_of_the_failed_has_an_end(fake: Fake) -> None:
    driver = Driver(fake.launch("--crash-after", "0.2"), "--hold-seconds", "0.5")
    code, errors = driver.finish(PATIENCE)
    assert code == 1
    assert "exit status 7" in errors


def test_a_crash_in_the_load_of_a_restart_counts(fake: Fake, tmp_path: Path) -> None:
    driver = Driver(fake.launch("--crash-after", "0.5", "--only-once", str(tmp_path / "flag")), "--hold-seconds", "0.2")
    code, errors = driver.finish(PATIENCE)
    assert code == 1
    assert "exit status 3" in errors
    assert sum(line.startswith("ready ") for line in driver.lines) == 1
    assert sum(line.startswith("loading ") for line in driver.lines) == 3


def test_crashes_far_apart_are_not_in_a_row(fake: Fake) -> None:
    driver = Driver(fake.launch("--crash-after", "0.5"), "--steady-seconds", "0.1")
    for _ in range(5):
        driver.until_report("ready ")
    assert "restarting in 1 s" not in driver.lines
    driver.process.send_signal(signal.SIGTERM)
    driver.finish(PATIENCE)


def test_a_signal_ends_a_restart(fake: Fake, tmp_path: Path) -> None:
    launch = fake.launch("--crash-after", "0.5", "--load-seconds", "2")
    driver = Driver(launch)
    driver.until_report("restarting")
    driver.until_report("loading")
    stop(driver, 1)
    fake.require_none()


def test_a_core_that_makes_no_step_is_noticed_though_health_answers(fake: Fake) -> None:  # B6
    launch = fake.launch("--freeze", stall_seconds=1.0)
    driver = Driver(launch)
    driver.until_report("ready")
    first = leader(fake, driver)
    with socket.create_connection(("127.0.0.1", launch.port)) as client:
        body = json.dumps(CHAT)
        client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        until(lambda: in_flight(launch) == 1)
        assert ask(launch.port, "/health")[0] == 200
        driver.until_report("the engine is frozen: 1 sequences are under way")
        driver.until_report("ready")
    assert leader(fake, driver).pid != first.pid
    stop(driver)


def test_a_stopped_api_server_is_noticed(fake: Fake) -> None:  # B6
    launch = fake.launch(stall_seconds=2.0)
    driver = Driver(launch)
    driver.until_report("ready")
    first = leader(fake, driver)
    os.kill(first.pid, signal.SIGSTOP)
    driver.until_report("the engine is frozen: its API server has not answered for ")
    driver.until_report("ready")
    assert ask(launch.port, "/v1/chat/completions", CHAT)[0] == 200
    stop(driver)


def test_an_idle_engine_is_not_frozen(fake: Fake) -> None:
    launch = fake.launch(stall_seconds=1.0)
    driver = Driver(launch)
    driver.until_report("ready")
    first = leader(fake, driver)
    deadline = time.monotonic() + 3.5
    until(lambda: time.monotonic() > deadline)
    assert leader(fake, driver).pid == first.pid
    stop(driver)


def in_flight(launch: Launch) -> int:
    return Control(launch.control).door().in_flight


class Stream:
    """A streamed chat, read in a thread."""

    def __init__(self, launch: Launch) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", launch.port, timeout=PATIENCE)
        self.connection.request("POST", "/v1/chat/completions", json.dumps({**CHAT, "stream": True}))
        self.response = self.connection.getresponse()
        self.begun = self.response.read1(4096)

    def rest(self) -> bytes:
        return self.begun + self.response.read()


WORDS = " ".join(f"word{number}" for number in range(20))


def test_a_drain_lets_a_stream_finish_and_takes_no_new_work(fake: Fake) -> None:  # B3
    launch = fake.launch("--answer", WORDS, "--chunk-seconds", "0.1")
    driver = Driver(launch)
    driver.until_report("ready")
    stream = Stream(launch)
    driver.process.send_signal(signal.SIGTERM)
    driver.until_report("draining")
    until(lambda: ask(launch.port, "/v1/models")[0] == 503)
    assert "draining" in unavailable(launch.port)[1]
    whole = stream.rest()
    assert b"word19" in whole
    assert whole.rstrip().endswith(b"data: [DONE]")
    assert driver.finish(PATIENCE) == (0, "")
    assert "every answer is complete" in driver.lines


def test_a_drain_has_a_deadline(fake: Fake) -> None:
    launch = fake.launch("--prefill-seconds", "600", drain_seconds=0.5)
    driver = Driver(launch)
    driver.until_report("ready")
    with clients_of(launch.port, 1):
        until(lambda: in_flight(launch) == 1)
        driver.process.send_signal(signal.SIGTERM)
        driver.until_report("answers that still ran are cut off")
        assert driver.finish(PATIENCE) == (0, "")
    fake.require_none()


def test_a_second_signal_ends_the_drain(fake: Fake) -> None:
    launch = fake.launch("--prefill-seconds", "600", "--ignore-sigterm", drain_seconds=600.0, stop_seconds=600.0)
    driver = Driver(launch)
    driver.until_report("ready")
    with clients_of(launch.port, 1):
        until(lambda: in_flight(launch) == 1)
        driver.process.send_signal(signal.SIGTERM)
        driver.until_report("draining")
        driver.process.send_signal(signal.SIGTERM)
        assert driver.finish(PATIENCE) == (0, "")
    assert "told again: stopping now" in driver.lines
    fake.require_none()


def test_a_crash_in_the_middle_of_a_stream(fake: Fake) -> None:
    launch = fake.launch("--answer", WORDS, "--die-after", "5")
    driver = Driver(launch)
    driver.until_report("ready")
    with pytest.raises((OSError, http.client.HTTPException)):
        Stream(launch).rest()
    driver.until_report("restarting in 0 s")
    driver.until_report("ready")
    stop(driver)


def test_a_killed_supervisor_gives_the_port_back(fake: Fake) -> None:
    launch = fake.launch("--armed", "--leak-children", "2", "--double-fork-child")
    driver = Driver(launch)
    driver.until_report("ready")
    driver.process.kill()
    driver.process.wait(PATIENCE)
    fake.require_none(10.0)
    until(lambda: procfs.listener(launch.port) is None, 10.0)
    again = Driver(fake.launch(port=launch.port, run="again"))
    again.until_report("ready")
    stop(again)


def test_a_port_that_nobody_has(fake: Fake) -> None:
    """The helper of these tests tells a refused connection from everything else."""
    with clients_of(free_port(), 1) as clients:
        until(lambda: bool(clients.met))
    assert set(clients.met) == {"ConnectionRefusedError"}
