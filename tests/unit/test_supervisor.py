from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from supervisor_support import KEY, Driver, Fake, ask, fake_fixture, free_port
from waiting import until

from slimserve.engine import ending, ports, process, procfs
from slimserve.engine.record import MOST_PATH_BYTES
from slimserve.engine.supervisor import Launch, Supervisor
from slimserve.errors import Failed, Refused


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    yield from fake_fixture(tmp_path)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_life_from_start_to_stop(fake: Fake) -> None:
    reports: list[str] = []
    launch = fake.launch("--load-seconds", "0.2")
    record = launch.run_folder / "engine.json"
    with Supervisor(launch, reports.append) as supervisor:
        assert supervisor.base_url == f"http://127.0.0.1:{launch.port}/v1"
        fields = json.loads(record.read_text())
        assert fields["profile_id"] == "fake-profile"
        assert fields["port"] == launch.port
        assert fields["argv"] == list(launch.argv)
        leader = procfs.read(fields["pid"])
        assert leader is not None
        assert (leader.session, leader.start_ticks) == (leader.pid, fields["start_ticks"])
        assert (mode(record), mode(launch.run_folder), mode(supervisor.log_path)) == (0o600, 0o700, 0o600)
    fake.require_none()
    assert not record.exists()
    assert "listening" in supervisor.log_path.read_text()
    words = ["listens", "log", "loading", "warming", "ready", "stopping", "stopped"]
    assert [line.split()[0] for line in reports] == words
    assert reports[0] == f"listens on 127.0.0.1:{launch.port}, asks for no key; no web page may call"
    assert reports[1] == f"log {supervisor.log_path}"
    assert reports[4].startswith(f"ready {supervisor.base_url} after ")


def test_the_engine_gets_no_input_and_the_environment_as_given(fake: Fake) -> None:
    launch = fake.launch()
    with Supervisor(launch, lambda line: None):
        pid = json.loads((launch.run_folder / "engine.json").read_text())["pid"]
        names = {entry.split(b"=")[0].decode() for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
        ours = {"SLIMSERVE_PARENT_PID", "SLIMSERVE_ENGINE_TAG", "SLIMSERVE_ADMISSION", "SLIMSERVE_SUPERVISOR"}
        assert names - {""} == {*launch.env, *ours, "TMPDIR"}
        assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull


def scratch_of(launch: Launch) -> Path:
    """The temporary folder of the engine that runs: what its own environment says."""
    pid = json.loads((launch.run_folder / "engine.json").read_text())["pid"]
    (entry,) = [one for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if one.startswith(b"TMPDIR=")]
    return Path(os.fsdecode(entry.removeprefix(b"TMPDIR=")))


def test_the_engine_has_a_temporary_folder_of_its_own_that_goes_with_it(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(tempfile.mkdtemp(prefix="own-", dir="/tmp"))  # pytest's may be too long for a socket
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    launch = fake.launch()
    with Supervisor(launch, lambda line: None):
        scratch = scratch_of(launch)
        assert scratch.parent == own
        assert scratch.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(scratch / str(uuid.uuid4()))) <= MOST_PATH_BYTES
        (scratch / "vllm_dist_0").write_text("left behind")
    assert not scratch.exists()
    own.rmdir()
    deep = tmp_path / ("deep" * 20)  # no socket could be bound there
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with Supervisor(launch, lambda line: None):
        assert scratch_of(launch).parent == Path("/tmp")
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with (
        pytest.raises(Refused, match=r"cannot make a temporary folder(.|\n)*make TMPDIR writable"),
        Supervisor(launch, lambda line: None),
    ):
        pytest.fail("it never was ready")


def test_the_temporary_folder_of_a_killed_run_goes_at_the_next_start(fake: Fake) -> None:
    launch = fake.launch("--armed")
    driver = Driver(launch)
    driver.until_report("ready")
    scratch = scratch_of(launch)
    (scratch / "0d7e").mkdir()
    driver.process.kill()
    driver.process.wait()
    fake.require_none(10.0)
    assert scratch.is_dir()
    with Supervisor(fake.launch(run="another"), lambda line: None):
        assert not scratch.exists()


def test_of_what_died_while_nobody_looked_the_api_server_is_not_named_as_the_first(fake: Fake) -> None:
    with Supervisor(fake.launch("--core"), lambda line: None) as supervisor:
        (server,) = [one for one in fake.processes() if one.parent == os.getpid()]
        (core,) = [one for one in fake.processes() if one.parent == server.pid]
        os.kill(core.pid, signal.SIGKILL)
        until(lambda: not procfs.lives(server.pid, server.start_ticks), 10.0)
        with pytest.raises(Failed) as caught:
            supervisor.check()
    text = str(caught.value)
    assert "which of its processes died first is not known; dead are " in text
    assert f"process {server.pid} (the API server): exit status 0" in text
    assert f"process {core.pid} (" in text


def test_ready_only_when_a_token_came_back(fake: Fake) -> None:
    begun = time.monotonic()
    with Supervisor(fake.launch("--warmup-seconds", "0.5"), lambda line: None):
        assert time.monotonic() - begun >= 0.5


def test_a_long_load_takes_nothing_from_the_warm_up(fake: Fake) -> None:  # B5
    launch = fake.launch("--load-seconds", "1.5", "--warmup-seconds", "0.3", warmup_seconds=1.4)
    with Supervisor(launch, lambda line: None):
        pass


@pytest.mark.parametrize("switches", [("--never-healthy",), ("--load-seconds", "30")])
def test_load_deadline(fake: Fake, switches: tuple[str, ...]) -> None:
    supervisor = Supervisor(fake.launch(*switches, load_seconds=0.6), lambda line: None)
    with pytest.raises(Failed, match=r"did not load within 0\.6 s(.|\n)*`serve\.load_seconds`"), supervisor:
        pytest.fail("it never was ready")
    fake.require_none()
    assert supervisor.log_path.exists()


@pytest.mark.parametrize("switch", ["--healthy-but-no-completion", "--empty-completion"])
def test_warm_up_deadline(fake: Fake, switch: str) -> None:
    supervisor = Supervisor(fake.launch(switch, warmup_seconds=0.6), lambda line: None)
    with pytest.raises(Failed, match=r"no token within 0\.6 s(.|\n)*`serve\.warmup_seconds`"), supervisor:
        pytest.fail("it never was ready")
    fake.require_none()


def test_a_question_that_cannot_succeed_is_not_asked_until_the_deadline(fake: Fake) -> None:
    supervisor = Supervisor(fake.launch(model_name="another", warmup_seconds=60.0), lambda line: None)
    with (
        pytest.raises(Failed, match=r"refuses a one-token completion: HTTP 404: .*`another` does not exist"),
        supervisor,
    ):
        pytest.fail("it never was ready")


def test_death_during_load_shows_status_and_the_last_lines(fake: Fake) -> None:
    supervisor = Supervisor(fake.launch("--crash-on-load", "--print-lines", "100"), lambda line: None)
    with pytest.raises(Failed) as caught, supervisor:
        pytest.fail("it never was ready")
    text = str(caught.value)
    assert "exit status 3" in text
    assert str(supervisor.log_path) in text
    shown = [line.partition("| ")[2] for line in text.splitlines() if line.startswith("    | ")]
    assert len(shown) == 30
    assert shown[-1] == "fake: the load failed"
    assert "line 100" in shown
    assert "line 1" in supervisor.log_path.read_text().splitlines()


def test_only_this_start_is_in_the_tail(fake: Fake) -> None:
    launch = fake.launch("--crash-on-load")
    launch.run_folder.mkdir(parents=True)
    (launch.run_folder / "engine.log").write_text("of an earlier start\n")
    supervisor = Supervisor(launch, lambda line: None)
    with pytest.raises(Failed) as caught, supervisor:
        pytest.fail("it never was ready")
    assert "of an earlier start" not in str(caught.value)
    assert supervisor.log_path.read_text().startswith("of an earlier start\n")


def test_a_kill_is_told_apart_from_the_out_of_memory_killer(fake: Fake) -> None:
    supervisor = Supervisor(fake.launch("--oom-like"), lambda line: None)
    # Nothing but the counters tells the two apart, and they stand still here unless the machine really runs out.
    words = "not the kernel's out-of-memory killer" if ending.oom_counters() else "probably the kernel's"
    with pytest.raises(Failed, match=rf"signal 9 \(SIGKILL\)(.|\n)*{words}"), supervisor:
        pytest.fail("it never was ready")


@pytest.mark.parametrize(
    ("status", "before", "after", "says"),
    [
        (-9, {"a": 1}, {"a": 2}, "struck meanwhile"),
        (1, {"a": 1}, {"a": 2}, "struck meanwhile"),
        (-9, {"a": 1}, {"a": 1}, "somebody killed it"),
        (-9, {}, {}, "probably the kernel's"),
        (1, {"a": 1}, {"a": 1}, ""),
    ],
)
def test_what_the_counters_say(status: int, before: dict[str, int], after: dict[str, int], says: str) -> None:
    verdict = ending.memory_verdict(status, before, after)
    assert says in verdict
    assert bool(verdict) == bool(says)


def test_stop_ends_what_ignores_it(fake: Fake) -> None:
    switches = ["--ignore-sigterm", "--leak-children", "2", "--double-fork-child"]
    with Supervisor(fake.launch(*switches, stop_seconds=0.3), lambda line: None):
        fake.await_all(4, sessions=2)  # leader, two children, and a daemon
    fake.require_none()


def test_an_early_stop_ends_what_ignores_it(fake: Fake) -> None:
    switches = ["--ignore-sigterm", "--leak-children", "2", "--double-fork-child", "--load-seconds", "30"]

    def report(line: str) -> None:
        if line.startswith("loading"):
            fake.await_all(4, sessions=2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Supervisor(fake.launch(*switches, stop_seconds=0.3), report):
        pytest.fail("it never was ready")
    fake.require_none()


def test_children_of_a_dead_leader_are_ended(fake: Fake) -> None:
    supervisor = Supervisor(fake.launch("--crash-on-load", "--leak-children", "2", "--double-fork-child"), print)
    with pytest.raises(Failed, match="exit status 3"), supervisor:
        pytest.fail("it never was ready")
    fake.require_none()


def test_an_interrupted_start_leaves_nothing(fake: Fake) -> None:
    def report(line: str) -> None:
        if line.startswith("loading"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Supervisor(fake.launch("--load-seconds", "30"), report):
        pytest.fail("it never was ready")
    fake.require_none()


def test_ctrl_c_between_the_fork_and_our_knowing_of_it(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(process.EngineProcess):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("slimserve.engine.attempt.EngineProcess", Interrupted)
    with pytest.raises(KeyboardInterrupt), Supervisor(fake.launch("--load-seconds", "30"), lambda line: None):
        pytest.fail("it never was ready")
    fake.require_none()


def test_the_key_is_asked_for_and_seen_nowhere(fake: Fake) -> None:
    reports: list[str] = []
    launch = fake.launch(api_key=KEY)
    with Supervisor(launch, reports.append):
        assert ask(launch.port, "/v1/models")[0] == 401
        assert ask(launch.port, "/v1/models", key=KEY)[0] == 200
        files = [path for path in launch.run_folder.rglob("*") if path.is_file()]
        assert {path.name for path in files} == {"engine.log", "engine.json", "status.json"}
        seen = [path.read_text() for path in files] + reports + [repr(launch)]
        seen += [procfs.command_line(process.pid) for process in fake.processes()]
        seen += [Path(f"/proc/{process.pid}/environ").read_text() for process in fake.processes()]
    assert not [text for text in seen if KEY in text]


def refusal(launch: Launch) -> str:
    with pytest.raises(Refused) as caught, Supervisor(launch, print):
        pytest.fail("it was not refused")
    return str(caught.value)


def test_a_taken_port_is_found_before_anything_is_started(fake: Fake) -> None:  # B4
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        launch = fake.launch(port=port)
        assert f"port {port} on 127.0.0.1 is taken by process {os.getpid()} (" in refusal(launch)
    assert not launch.run_folder.exists()


def test_a_port_of_our_own_says_whose_it_is_and_since_when(fake: Fake) -> None:  # B4
    launch = fake.launch()
    with Supervisor(launch, lambda line: None):
        text = refusal(fake.launch(port=launch.port, run="second"))
    own = f"taken by the endpoint of fake-profile (process {os.getpid()}), ready since "
    assert f"port {launch.port} on 127.0.0.1 is {own}" in text
    assert time.strftime("%Y-%m-%d ") in text


def test_where_the_page_is_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(ports, "PAGE_PORT", port)
    listening, why = ports.listen_for_page(None, own=port)
    with listening:
        assert (listening.getsockname()[1] != port, why) == (True, f"{port} is the endpoint's own")
    with ports.listen_for_page(None, own=1)[0] as usual:
        assert usual.getsockname()[1] == port
        page = Mock(page=f"http://127.0.0.1:{port}/", port=1, profile="some-profile", pid=7)
        listening, why = ports.listen_for_page(None, own=1, ours=[page])
        listening.close()
        assert why == (f"port {port} on 127.0.0.1 is taken by the operator page of some-profile's endpoint (process 7)")
        with pytest.raises(Refused, match="another --page-port"):
            ports.listen("127.0.0.1", port, [page])


def test_a_port_that_is_bound_and_not_listened_on_is_taken(fake: Fake) -> None:  # B4
    with socket.socket() as loading:
        loading.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        loading.bind(("127.0.0.1", 0))
        port = loading.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is taken by a process that does not listen" in refusal(fake.launch(port=port))


def test_an_old_connection_does_not_take_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # who closes first keeps the port in TIME_WAIT
            assert client.recv(1) == b""
    until(lambda: bool(procfs.sockets(port)), 2.0)
    ports.listen("127.0.0.1", port).close()


@pytest.mark.parametrize(
    ("host", "said"), [("192.0.2.1", "cannot listen on 192.0.2.1"), ("no such host", "no address")]
)
def test_a_host_that_is_not_this_machine(host: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        ports.listen(host, free_port())


def test_an_unwritable_run_folder_is_refused_before_the_start(fake: Fake, tmp_path: Path) -> None:  # B11
    (tmp_path / "runs").write_text("a file where the folder of the runs should be")
    assert re.search(r"cannot write in the run folder .*/runs/run: ", refusal(fake.launch()))
    fake.require_none()


def test_a_command_that_is_not_there(fake: Fake) -> None:
    assert "cannot start the engine" in refusal(replace(fake.launch(), argv=("/nonexistent/python",)))


def test_a_run_folder_too_deep_for_a_socket(fake: Fake) -> None:
    launch = fake.launch(run="x" * 120)
    assert launch.control.parent != launch.run_folder
    with Supervisor(launch, lambda line: None):
        assert mode(launch.control.parent) == 0o700
    assert not launch.control.parent.exists()
