from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor_support import Driver, Fake, fake_fixture

from slimserve.engine import stop_signals
from slimserve.engine.record import leftovers
from slimserve.engine.supervisor import Supervisor

LOADING = ("--load-seconds", "60")
WARMING = ("--warmup-seconds", "60")


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    yield from fake_fixture(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(
    ("phase", "switches", "code"), [("loading", LOADING, 1), ("warming", WARMING, 1), ("ready", (), 0)]
)
def test_a_signal_stops_everything(  # B2
    fake: Fake, number: signal.Signals, phase: str, switches: tuple[str, ...], code: int
) -> None:
    driver = Driver(fake.launch(*switches, "--leak-children", "2"))
    driver.until_report(phase)
    fake.await_all(3)  # the leader and two children
    driver.process.send_signal(number)
    assert driver.finish(10.0) == (code, "")
    fake.require_none()


def test_a_signal_before_the_start_starts_nothing(fake: Fake) -> None:
    launch = fake.launch()
    driver = Driver(launch, "--term-at", "log")
    assert driver.finish(10.0) == (1, "")
    assert driver.lines[1:] == [f"log {launch.run_folder / 'engine.log'}", "told to stop before it was ready"]
    assert (launch.run_folder / "engine.log").read_text() == ""


def test_a_signal_between_the_fork_and_our_knowing_of_it(fake: Fake) -> None:
    driver = Driver(fake.launch(*LOADING), "--term-in-spawn")
    assert driver.finish(10.0) == (1, "")
    fake.require_none()


def test_a_deferred_signal_goes_to_the_handler_that_it_was_meant_for() -> None:
    came: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append("delivered"))
    try:
        with stop_signals.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            came.append("the end of the block")
        assert came == ["the end of the block", "delivered"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_grace_has_an_end(fake: Fake) -> None:
    driver = Driver(fake.launch("--ignore-sigterm", "--leak-children", "1", stop_seconds=0.5))
    driver.until_report("ready")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.finish(10.0) == (0, "")
    fake.require_none()


def test_what_is_not_ready_has_nothing_to_finish(fake: Fake) -> None:
    driver = Driver(fake.launch(*LOADING, "--ignore-sigterm", stop_seconds=600.0))
    driver.until_report("loading")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.finish(10.0) == (1, "")
    fake.require_none()


def test_a_second_signal_ends_the_grace(fake: Fake) -> None:
    driver = Driver(fake.launch("--ignore-sigterm", stop_seconds=600.0))
    driver.until_report("ready")
    driver.process.send_signal(signal.SIGTERM)
    driver.until_report("stopping")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.finish(10.0) == (0, "")
    fake.require_none()


def test_an_ignored_hangup_stays_ignored(fake: Fake) -> None:
    driver = Driver(fake.launch(), "--ignore-hup")
    driver.until_report("ready")
    driver.process.send_signal(signal.SIGHUP)
    driver.process.send_signal(signal.SIGTERM)
    code, _ = driver.finish(10.0)
    assert code == 0
    assert "stopped" in driver.lines[-1]


@pytest.mark.parametrize(("phase", "switches"), [("loading", LOADING), ("warming", WARMING), ("ready", ())])
def test_kill_9_of_the_supervisor_leaves_no_engine(fake: Fake, phase: str, switches: tuple[str, ...]) -> None:  # B1
    driver = Driver(fake.launch(*switches, "--armed", "--leak-children", "2", "--double-fork-child"))
    driver.until_report(phase)
    fake.await_all(5, sessions=2)  # leader, guard, two children, and a daemon
    driver.process.kill()
    driver.process.wait(5.0)
    fake.require_none(5.0)


def test_kill_9_of_the_leader_alone_leaves_no_worker(fake: Fake) -> None:
    # The guard sees to it, whether or not a supervisor is there to do so.
    launch = fake.launch("--armed", "--leak-children", "2", "--double-fork-child")
    driver = Driver(launch)
    driver.until_report("ready")
    driver.process.send_signal(signal.SIGSTOP)
    try:
        for process in fake.processes():
            if process.session == process.pid and process.parent == driver.process.pid:
                os.kill(process.pid, signal.SIGKILL)
        fake.require_none(5.0)
    finally:
        driver.process.send_signal(signal.SIGCONT)
    driver.until_report("ready")  # an engine of its own has taken the dead one's place
    driver.process.send_signal(signal.SIGTERM)
    assert driver.finish(20.0)[0] == 0


def test_an_engine_of_a_killed_supervisor_is_ended_before_the_next_start(fake: Fake) -> None:  # B1
    lost = fake.launch("--leak-children", "1", run="lost")
    driver = Driver(lost)
    driver.until_report("ready")
    assert leftovers(fake.runs) == []  # its supervisor lives
    driver.process.kill()
    driver.process.wait(5.0)

    pids = sorted(process.pid for process in fake.processes())
    assert len(pids) == 2
    (found,) = leftovers(fake.runs)
    assert sorted(process.pid for process in found.processes) == pids
    reports: list[str] = []
    with Supervisor(fake.launch(port=lost.port, run="next"), reports.append):
        assert not {process.pid for process in fake.processes()} & set(pids)
        assert not (lost.run_folder / "engine.json").exists()
    assert reports[0].startswith(f"ending an engine whose supervisor died: fake-profile, port {lost.port}, ")
    assert all(f"{pid} (" in reports[0] for pid in pids)
