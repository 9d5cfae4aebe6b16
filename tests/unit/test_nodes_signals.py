"""Who ends all nodes tells each of them: that is one end, and what runs may finish."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from nodes_support import Group
from supervisor_support import Driver, Fake, ask, fake_fixture
from waiting import until

from slimserve.engine import stop_signals
from slimserve.engine.control import Control
from slimserve.engine.descriptors import wait_readable
from slimserve.engine.record import control_path

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    yield from fake_fixture(tmp_path)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as one:
        yield one


class Answering:
    """Nodes that are ready, and an answer under way."""

    def __init__(self, fake: Fake, pool: ThreadPoolExecutor, nodes: int, seconds: str, **grace: float) -> None:
        group = Group(fake, nodes, **grace)
        self.head = group.head("--prefill-seconds", seconds)
        self.workers = [group.worker(rank) for rank in range(1, nodes)]
        self.port = int(self.head.until_report("ready http").split(":")[2].split("/")[0])
        for worker in self.workers:
            worker.until_report("ready: computes")
        self.answer: Future[tuple[int, dict[str, str], bytes]] = pool.submit(
            ask, self.port, "/v1/chat/completions", CHAT
        )
        control = Control(control_path(fake.runs / "run-1"))
        until(lambda: control.door().in_flight == 1)

    def tell(self, driver: Driver, number: signal.Signals = signal.SIGTERM) -> None:
        driver.process.send_signal(number)

    def require_whole(self) -> None:
        """All end well, and the answer with them."""
        assert self.answer.result(60)[0] == 200
        assert [driver.finish(30)[0] for driver in (self.head, *self.workers)] == [0] * (1 + len(self.workers))
        assert "every answer is complete" in self.head.lines
        assert "told again: stopping now" not in self.head.lines


def test_a_signal_to_both_with_the_head_first(fake: Fake, pool: ThreadPoolExecutor) -> None:
    one = Answering(fake, pool, 2, "4")
    one.tell(one.head)
    one.head.until_report("draining")
    one.tell(one.workers[0])
    one.head.until_report("node 1 was told to stop too")
    one.require_whole()


def test_a_signal_to_both_with_the_worker_first(fake: Fake, pool: ThreadPoolExecutor) -> None:
    one = Answering(fake, pool, 2, "4")
    one.tell(one.workers[0])
    one.head.until_report("draining")
    one.tell(one.head)
    one.require_whole()


def test_a_signal_to_two_workers(fake: Fake, pool: ThreadPoolExecutor) -> None:
    one = Answering(fake, pool, 3, "4")
    one.tell(one.workers[0])
    one.head.until_report("draining")
    one.tell(one.workers[1])
    one.head.until_report("node 2 was told to stop too")
    one.require_whole()


def test_a_second_signal_to_the_head_itself_ends_the_drain(fake: Fake, pool: ThreadPoolExecutor) -> None:
    one = Answering(fake, pool, 2, "600", drain_seconds=600.0)
    one.tell(one.workers[0])
    one.head.until_report("draining")
    one.tell(one.head, signal.SIGTERM)
    one.tell(one.head, signal.SIGINT)  # another number: two of one are one when they come at once
    assert [driver.finish(30)[0] for driver in (one.head, one.workers[0])] == [0, 0]
    assert "told again: stopping now" in one.head.lines
    with pytest.raises(ConnectionError):
        one.answer.result(60)


def test_a_signal_that_was_heeded_ahead_wakes_nobody() -> None:
    with stop_signals.Counter() as signals:
        signals.heed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.count, signals.pending, wait_readable([signals], 0)) == (1, False, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.pending
        assert wait_readable([signals], 0)
        signals.heed()
        assert (signals.pending, wait_readable([signals], 0)) == (False, False)


def test_a_node_takes_the_place_of_one_whose_link_is_open_and_silent(fake: Fake) -> None:
    group = Group(fake)
    silent, head = group.worker(), group.head()
    head.until_report("ready http")
    silent.process.send_signal(signal.SIGSTOP)
    another = group.worker()
    another.until_report("ready: computes")
    head.until_report("ready http")
    silent.process.kill()
    head.process.send_signal(signal.SIGTERM)
    assert (head.finish(30), another.finish(30)[0]) == ((0, ""), 0)
    assert not any("is taken" in line or "has come again" in line for line in head.lines)
