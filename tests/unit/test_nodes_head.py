"""Node 0's port and its book of the other nodes, without engines: who is let in, who is cut off, what ends all."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nodes_support import SECRET, claim, links, seat
from supervisor_support import free_port
from waiting import until

from slimserve.engine.stop_signals import Stopped
from slimserve.nodes import arrivals, orders, wire
from slimserve.nodes.agreement import Claim
from slimserve.nodes.arrivals import Arrivals
from slimserve.nodes.head import Head
from slimserve.shapes import plain


class Port:
    """Node 0's port, and what came of it."""

    def __init__(self) -> None:
        self.number = free_port()
        self.said: list[str] = []
        self.joined: list[Claim] = []
        self.arrivals = Arrivals(seat(0, self.number), SECRET, self._join, self.said.append)

    def _join(self, link: wire.Link, claim: Claim) -> None:
        self.joined.append(claim)
        link.close()

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.number), 20, (source, 0))

    def arrive(self, connection: socket.socket) -> None:
        wire.offer(connection, SECRET).send({"claim": plain(claim())})
        until(lambda: self.joined, 20)


@pytest.fixture
def port() -> Iterator[Port]:
    one = Port()
    yield one
    one.arrivals.close()


@pytest.fixture
def head() -> Iterator[tuple[Head, int, list[str]]]:
    said: list[str] = []
    number = free_port()
    one = Head(seat(0, number, nodes=3), claim(0, nodes=3), SECRET, said.append)
    one.open()
    yield one, number, said
    one.close()


def come(number: int, rank: int = 1) -> wire.Link:
    """A node that claims its place and says no more by itself."""
    link = wire.offer(socket.create_connection(("127.0.0.1", number), 20), SECRET)
    link.send({"claim": plain(claim(rank, nodes=3))})
    return link


def test_one_address_that_connects_without_end_does_not_cut_off_another(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MOST_STRANGERS", 4)
    node = port.connect()
    strangers = [port.connect("127.0.0.2") for _ in range(8)]
    for stranger in strangers[:5]:
        assert stranger.recv(1) == b""  # cut off: the others and the node are the four that may be
    port.arrive(node)
    for stranger in strangers:
        stranger.close()


def test_without_a_thread_to_greet_it_a_connection_is_cut_and_the_next_is_taken(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    start: Callable[[threading.Thread], None] = threading.Thread.start
    refused: list[threading.Thread] = []

    def limited(thread: threading.Thread) -> None:
        if not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        assert port.connect().recv(1) == b""
    port.arrive(port.connect())  # after it was said: the thread that accepts says it before it accepts again
    assert port.said[:1] == ["a connection cannot be taken: can't start new thread"]


def test_without_a_thread_to_read_it_a_link_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    node, head_end = links()
    over: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        head_end.keep(dict, lambda message: None, over.append)
    assert over == ["can't start new thread"]
    with pytest.raises(wire.Broken, match="hung up"):
        node.receive(time.monotonic() + 20)


def test_many_lines_of_strangers_do_not_silence_what_comes_after(port: Port) -> None:
    lines = [f"somebody at {number}" for number in range(300)]
    for line in lines:
        port.arrivals.say_once(line)
        port.arrivals.say_once(line)
    assert port.said == lines


def test_the_gate_of_a_node_that_is_gone_has_not_passed(head: tuple[Head, int, list[str]]) -> None:
    one, number, said = head
    both = [come(number, 1), come(number, 2)]
    one.gather(None, lambda words: None)
    one.start()
    both[0].send({"is": "passed", "round": 1, "gate": "a"})
    both[1].close()
    until(lambda: any(line.startswith("node 2 is gone") for line in said), 20)
    cancelled = threading.Event()
    results: list[bool] = []
    waits = threading.Thread(target=lambda: results.append(one.passed(cancelled)))
    waits.start()
    both[1] = come(number, 2)
    until(lambda: sum("has come from" in line for line in said) == 3, 20)
    cancelled.set()
    waits.join(20)
    assert results == [False]
    for link in both:
        link.close()


def test_that_a_node_asks_for_the_end_is_news_once(head: tuple[Head, int, list[str]]) -> None:
    one, number, said = head
    both = [come(number, rank) for rank in (1, 2)]
    until(lambda: sum("has come from" in line for line in said) == 2, 20)
    both[0].send({"ask": "stop"})

    def asked() -> bool:
        try:
            one.check()
        except Stopped:
            return True
        return False

    until(asked, 20)
    both[1].send({"ask": "stop"})
    until(lambda: "node 2 was told to stop too" in said, 20)
    one.check()
    for link in both:
        link.close()


def test_after_our_own_signal_that_a_node_asks_for_the_end_is_no_news(head: tuple[Head, int, list[str]]) -> None:
    one, number, said = head
    one.heed()
    link = come(number)
    link.send({"ask": "stop"})
    until(lambda: "node 1 was told to stop too" in said, 20)
    one.check()
    link.close()


def test_a_node_that_died_without_a_word_makes_way_for_another(
    head: tuple[Head, int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENT_SECONDS", 2.0)
    monkeypatch.setattr(wire, "BEAT_SECONDS", 0.2)
    _, number, said = head
    silent = come(number)
    until(lambda: any("node 1 has come from" in line for line in said), 20)
    another = come(number)
    assert another.receive(time.monotonic() + 20) == {"beat": {}}  # it hears of us while it waits
    until(lambda: sum("node 1 has come from" in line for line in said) == 2, 20)
    assert any(line.startswith("node 1 is gone: nothing complete was heard") for line in said)
    for link in (silent, another):
        link.close()


class Dumb:
    """A link whose other end has gone before anything is said."""

    closed = False

    def send(self, message: wire.Message) -> None:
        raise wire.Broken("nothing can be sent: Broken pipe")

    def close(self) -> None:
        self.closed = True


def test_a_link_over_which_nothing_can_be_claimed_is_closed(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    dumb, offer = Dumb(), wire.offer
    offers: list[Any] = [lambda connection, secret: dumb, offer]
    monkeypatch.setattr(orders, "TRY_SECONDS", 0.0)
    monkeypatch.setattr(wire, "offer", lambda connection, secret: offers.pop(0)(connection, secret))
    told: list[str] = []
    link = orders.connect(seat(1, port.number), claim(), SECRET, told.append, threading.Event())
    assert dumb.closed
    assert len(told) == 1
    assert "Broken pipe" in told[0]
    link.close()
