"""An endpoint of several nodes from its first moment to its last: real processes and sockets, fake engines."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes_support import Group, seat
from supervisor_support import Driver, Fake, ask, fake_fixture
from waiting import until

from slimserve import status_command
from slimserve.engine import endpoints
from slimserve.nodes import wire


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    yield from fake_fixture(tmp_path)


@pytest.fixture
def group(fake: Fake) -> Group:
    return Group(fake)


def port_of(head: Driver) -> int:
    line = next(line for line in head.lines if line.startswith("ready http"))
    return int(line.split(":")[2].split("/")[0])


def both_ready(head: Driver, worker: Driver) -> None:
    head.until_report("ready http")
    worker.until_report("ready: computes")


def end(driver: Driver) -> tuple[int, str]:
    return driver.finish(30)


def engines(fake: Fake) -> list[int]:
    """Leaders of engines; the drivers do not carry the mark."""
    return [process.pid for process in fake.processes() if process.name != "slimserve-guard"]


def test_both_become_ready_and_a_signal_to_the_head_ends_both(fake: Fake, group: Group) -> None:
    worker, head = group.worker(), group.head()
    both_ready(head, worker)
    assert len(engines(fake)) == 2
    status, _, _ = ask(port_of(head), "/health")
    assert status == 200
    head.process.send_signal(signal.SIGTERM)
    assert (end(head)[0], end(worker)[0]) == (0, 0)
    assert any("every answer is complete" in line for line in head.lines)


def test_the_status_of_each_says_which_node_it_is(fake: Fake, group: Group) -> None:
    worker, head = group.worker(), group.head()
    both_ready(head, worker)

    def seen() -> dict[str, Any]:
        return {one.node.split(",")[0]: (one.status.state, one.port > 0) for one in endpoints.living(fake.runs)}

    until(lambda: seen() == {"node 0 of 2": ("ready", True), "node 1 of 2": ("ready", False)}, 10)
    said = status_command.render(status_command.look({"SLIMSERVE_STATE": str(fake.runs.parent)}), time.time())
    assert (
        f"node 1 of 2, node 0 at 127.0.0.1:{group.port}\n    no endpoint of its own   process {worker.process.pid}"
        in said
    )
    assert said.count("listens on") == 1
    head.process.send_signal(signal.SIGTERM)
    assert (end(head)[0], end(worker)[0]) == (0, 0)


def test_a_signal_to_a_worker_drains_at_the_head_first(fake: Fake, group: Group) -> None:
    worker, head = group.worker(), group.head()
    both_ready(head, worker)
    worker.process.send_signal(signal.SIGTERM)
    assert (end(head)[0], end(worker)[0]) == (0, 0)
    assert any(line == "node 1 was told to stop, and with it all stop" for line in head.lines)
    said = " ".join(head.lines)
    assert said.index("draining") < said.index("every answer is complete") < said.index("stopped after")


def test_a_second_signal_to_a_worker_does_not_wait(fake: Fake, group: Group) -> None:
    worker, head = group.worker(), group.head()
    both_ready(head, worker)
    head.process.send_signal(signal.SIGSTOP)  # it cannot drain
    worker.process.send_signal(signal.SIGTERM)
    worker.until_report("asks node 0")
    worker.process.send_signal(signal.SIGTERM)
    assert end(worker)[0] == 1
    head.process.send_signal(signal.SIGCONT)
    head.process.send_signal(signal.SIGTERM)
    end(head)


@pytest.mark.parametrize("name", ["profile hash", "engine", "weights", "slimserve", "torch", "python"])
def test_nodes_that_differ_all_refuse_with_each_ones_value(group: Group, name: str) -> None:
    key = name.replace(" ", "_")
    worker, head = group.worker(**{key: "theirs"}), group.head(**{key: "ours"})
    for driver in (head, worker):
        code, errors = end(driver)
        assert code == 3
        assert f"the nodes differ in {name}: node 0 has ours, node 1 has theirs" in errors
        assert "Traceback" not in errors


def test_every_difference_is_a_line(group: Group) -> None:
    worker, head = group.worker(engine="0.31.0", weights="others"), group.head()
    for driver in (worker, head):
        code, errors = end(driver)
        assert code == 3
        assert errors.count("the nodes differ in") == 2


def test_of_three_nodes_the_odd_one_is_seen_on_all(fake: Fake) -> None:
    group = Group(fake, nodes=3)
    drivers = [group.head(), group.worker(1), group.worker(2, engine="another")]
    for driver in drivers:
        code, errors = end(driver)
        assert code == 3
        assert "engine: node 0 has the same, node 1 has the same, node 2 has another" in errors


def test_a_node_that_does_not_come_is_named(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOIN_SECONDS", "8")
    group = Group(fake, nodes=3)
    head, worker = group.head(), group.worker(1)
    code, errors = end(head)
    assert code == 3
    assert "node 2 has not come" in errors
    assert "node 1" not in errors
    code, errors = end(worker)
    assert code == 3
    assert "node 2 has not come" in errors


def test_a_head_that_does_not_come_is_named(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOIN_SECONDS", "1")
    code, errors = end(group.worker())
    assert code == 3
    assert "node 0 was not reached within 1 s" in errors
    assert "Connection refused" in errors


@pytest.mark.parametrize(
    ("rank", "claims", "says"),
    [
        (1, {}, "rank 1 is taken by a node at 127.0.0.1"),
        (5, {}, "rank 5 is beyond the 2 nodes"),
        (1, {"profile": "another"}, "it serves another, and this endpoint is of fake-profile"),
        (1, {"nodes": 3}, "it counts 3 nodes of fake-profile, and node 0 counts 2"),
    ],
)
def test_a_node_that_does_not_belong_is_refused_and_disturbs_nobody(
    group: Group, rank: int, claims: dict[str, Any], says: str
) -> None:
    head, worker = group.head(), group.worker()
    both_ready(head, worker)
    code, errors = end(group.worker(rank, **claims))
    assert code == 3
    assert says in errors
    assert ask(port_of(head), "/health")[0] == 200
    head.process.send_signal(signal.SIGTERM)
    assert (end(head)[0], end(worker)[0]) == (0, 0)
    assert any(says in line for line in head.lines)


def test_strangers_and_silent_ones_do_not_keep_the_right_nodes_out(group: Group) -> None:
    head = group.head()
    head.until_report("waits for node 1")
    address = ("127.0.0.1", group.port)
    strangers = [socket.create_connection(address) for _ in range(80)]
    for number, stranger in enumerate(strangers):
        if number % 2:
            stranger.sendall([b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100 + b"\n", b"[" * 70_000, b"{"][number // 2 % 4])
    worker = group.worker()
    both_ready(head, worker)
    head.process.send_signal(signal.SIGTERM)
    code, errors = end(head)
    assert (code, errors, end(worker)[0]) == (0, "", 0)
    assert any("turned away: what came is no line of ours" in line for line in head.lines)
    for stranger in strangers:
        stranger.close()


def test_who_does_not_know_the_secret_is_told_so_and_no_more(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    head = group.head()
    monkeypatch.setenv("SECRET", "another-secret-that-is-long-enough-too")
    wrong = group.worker()
    wrong.until_report(f"what is at 127.0.0.1:{group.port} is no node 0 of ours: it says that our secret")
    monkeypatch.delenv("SECRET")
    right = group.worker()
    both_ready(head, right)
    wrong.process.send_signal(signal.SIGTERM)
    assert end(wrong)[0] == 1
    head.process.send_signal(signal.SIGTERM)
    assert (end(head)[0], end(right)[0]) == (0, 0)
    assert any("somebody at 127.0.0.1 is turned away: it does not know the secret" in line for line in head.lines)


def test_a_worker_that_dies_is_waited_for_and_all_start_anew(fake: Fake, group: Group) -> None:
    worker, head = group.worker(), group.head()
    both_ready(head, worker)
    worker.process.kill()
    head.until_report("node 1 at 127.0.0.1 is lost: the other end hung up")
    status, _, body = ask(port_of(head), "/v1/models")
    assert status == 503
    assert "node 1" in json.loads(body)["error"]["message"]
    until(lambda: not engines(fake), 10)  # neither node's
    another = group.worker()
    both_ready(head, another)
    assert ask(port_of(head), "/health")[0] == 200
    head.process.send_signal(signal.SIGTERM)
    assert (end(head)[0], end(another)[0]) == (0, 0)


def test_a_head_that_dies_leaves_no_engine_and_another_takes_its_place(fake: Fake, group: Group) -> None:
    worker, head = group.worker(), group.head()
    both_ready(head, worker)
    head.process.kill()
    worker.until_report("the link to node 0 is lost: the other end hung up")
    until(lambda: not engines(fake), 10)
    another = group.head()
    both_ready(another, worker)
    another.process.send_signal(signal.SIGTERM)
    assert (end(another)[0], end(worker)[0]) == (0, 0)


@pytest.mark.parametrize("where", ["head", "worker"])
def test_an_engine_that_dies_on_either_node_has_both_started_anew(fake: Fake, group: Group, where: str) -> None:
    worker, head = group.worker(), group.head()
    both_ready(head, worker)
    uds = {process: b"--uds" in Path(f"/proc/{process}/cmdline").read_bytes() for process in engines(fake)}
    before = set(engines(fake))
    os.kill(next(process for process, of_head in uds.items() if of_head == (where == "head")), signal.SIGKILL)
    both_ready(head, worker)
    assert before.isdisjoint(engines(fake))
    assert any(line.startswith("restarting in") for line in head.lines)
    if where == "worker":
        assert any(line.startswith("node 1: the engine ended by itself") for line in head.lines)
    head.process.send_signal(signal.SIGTERM)
    assert (end(head)[0], end(worker)[0]) == (0, 0)


def test_an_engine_that_fails_to_load_on_a_worker_fails_all(group: Group) -> None:
    worker, head = group.worker(1, "--crash-on-load"), group.head("--load-seconds", "20")
    code, errors = end(head)
    assert code == 1
    assert "node 1: the engine ended by itself" in errors
    code, errors = end(worker)
    assert code == 1
    assert "exit status 3" in errors


def test_an_engine_that_fails_to_load_on_the_head_fails_all(group: Group) -> None:
    worker, head = group.worker(), group.head("--crash-on-load")
    assert end(head)[0] == 1
    code, errors = end(worker)
    assert code == 1
    assert "exit status 3" in errors


def test_a_signal_before_all_are_there_ends_the_head_with_1(group: Group) -> None:
    head = group.head()
    head.until_report("waits for node 1")
    head.process.send_signal(signal.SIGTERM)
    assert end(head)[0] == 1


def test_while_a_node_is_waited_for_the_endpoint_says_so(fake: Fake, group: Group) -> None:
    head = group.head()
    head.until_report("waits for node 1")

    def reason() -> str:
        return " ".join(one.status.reason for one in endpoints.living(fake.runs))

    until(lambda: "node 1 has not come" in reason(), 10)
    head.process.send_signal(signal.SIGTERM)
    end(head)


def test_a_worker_that_is_cut_off_is_lost_within_the_silence(group: Group) -> None:
    """A node that stands still says nothing, and its link is open all the same."""
    worker, head = group.worker(), group.head()
    both_ready(head, worker)
    worker.process.send_signal(signal.SIGSTOP)
    head.until_report(f"node 1 at 127.0.0.1 is lost: nothing complete was heard for {wire.SILENT_SECONDS:g} s")
    worker.process.send_signal(signal.SIGCONT)
    both_ready(head, worker)  # it comes again by itself
    head.process.send_signal(signal.SIGTERM)
    assert (end(head)[0], end(worker)[0]) == (0, 0)


def test_an_authentic_node_that_says_nonsense_is_turned_away(group: Group) -> None:
    from nodes_support import SECRET

    head = group.head()
    head.until_report("waits for node 1")
    for nonsense in ({"claim": None}, {"claim": {"rank": "one"}}, {}):
        link = wire.offer(socket.create_connection(("127.0.0.1", seat(1, group.port).port)), SECRET)
        link.send(nonsense)
        with pytest.raises(wire.Broken):
            link.receive(time.monotonic() + 10)
    head.process.send_signal(signal.SIGTERM)
    code, errors = end(head)
    assert (code, errors) == (1, "")
