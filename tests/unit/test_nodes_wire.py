"""A link between two nodes: who is let in, and what becomes of lines that are not the other end's."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nodes_support import SECRET, links, pair, sockets

from slimserve.nodes import wire


def soon() -> float:
    return time.monotonic() + 5


def test_both_ends_prove_themselves_and_lines_go_both_ways() -> None:
    node, head = links()
    node.send({"claim": 1})
    head.send({"do": "welcome"})
    node.send({"claim": 2})
    assert [head.receive(soon()), head.receive(soon())] == [{"claim": 1}, {"claim": 2}]
    assert node.receive(soon()) == {"do": "welcome"}


def test_a_wrong_secret_is_refused_at_both_ends() -> None:
    assert pair(SECRET, b"another") == ("it says that our secret is not its own", "it does not know the secret")


def raw_head() -> tuple[socket.socket, threading.Thread, list[str]]:
    """A head behind a bare socket, and what it says in the end."""
    ours, theirs = sockets()
    said: list[str] = []

    def accept() -> None:
        try:
            wire.accept(theirs, SECRET, soon())
            said.append("let in")
        except wire.Broken as error:
            said.append(str(error))

    thread = threading.Thread(target=accept)
    thread.start()
    return ours, thread, said


@given(st.binary(max_size=300))
def test_no_bytes_of_a_stranger_are_more_than_a_sentence(data: bytes) -> None:
    stranger, thread, said = raw_head()
    with stranger:
        stranger.sendall(data + b"\n")
        stranger.shutdown(socket.SHUT_WR)
        thread.join(20)
    assert said != ["let in"]
    assert len(said) == 1


@pytest.mark.parametrize(
    "greeting",
    [{}, {"slimserve": 2, "nonce": "0" * 64}, {"slimserve": 1, "nonce": 5}, {"slimserve": 1, "nonce": "x" * 64}, [1]],
)
def test_a_greeting_of_another_kind_is_a_sentence(greeting: object) -> None:
    stranger, thread, said = raw_head()
    with stranger:
        stranger.sendall(json.dumps(greeting).encode() + b"\n")
        thread.join(20)
    assert said in (["what came is no greeting of ours"], ["what came is no line of ours"])


def test_a_proof_that_is_sent_back_proves_nothing() -> None:
    """A stranger who mirrors what the head says, nonce and all, does not get in."""
    stranger, thread, said = raw_head()
    with stranger, stranger.makefile("rb") as lines:
        stranger.sendall(json.dumps({"slimserve": 1, "nonce": "0" * 64}).encode() + b"\n")
        nonce = json.loads(lines.readline())["nonce"]
        proof = wire.digest(SECRET, "head", "0" * 64, nonce)  # what the head itself would say
        stranger.sendall(json.dumps({"proof": proof}).encode() + b"\n")
        assert json.loads(lines.readline()) == {"refused": "the secret"}
        thread.join(20)
    assert said == ["it does not know the secret"]


def test_a_trickle_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = sockets()
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.05):
            ours.sendall(b" ")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(wire.Broken, match="nothing complete was heard"):
        wire.accept(theirs, SECRET, time.monotonic() + 0.5)
    stop.set()
    thread.join()
    ours.close()


def test_a_line_without_an_end_is_cut_off() -> None:
    stranger, thread, said = raw_head()
    with stranger:
        stranger.sendall(b"{" * (wire.MOST_BYTES + 2))
        thread.join(20)
    assert said == ["a line of more than 64 KiB"]


@pytest.mark.parametrize("change", ["forged", "repeated", "left out", "turned round"])
def test_a_line_that_somebody_changed_ends_the_link(change: str) -> None:
    node, head = links()
    sent = []
    write = node._channel.write
    node._channel.write = sent.append  # type: ignore[method-assign, assignment]
    for number in range(2):
        node.send({"number": number})
    first, second = sent
    match change:
        case "forged":
            write(first.replace(b"0}", b"7}"))
        case "repeated":
            write(first + first)
            assert head.receive(soon()) == {"number": 0}
        case "left out":
            write(second)
        case "turned round":
            head._channel.write(first)
            with pytest.raises(wire.Broken, match="not signed"):
                node.receive(soon())
            return
    with pytest.raises(wire.Broken, match="not signed"):
        head.receive(soon())


def test_a_link_that_is_kept_beats_and_tells_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BEAT_SECONDS", 0.05)
    node, head = links()
    heard: list[wire.Message] = []
    beat, ended = threading.Event(), threading.Event()
    reasons: list[str] = []

    def told(message: wire.Message) -> None:
        heard.append(message)
        beat.set()

    def over(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    head.keep(dict, told, over)
    node.keep(lambda: {"words": "is loading"}, lambda message: None, lambda reason: None)
    assert beat.wait(5)
    assert heard[0] == {"beat": {"words": "is loading"}}
    node.close()
    assert ended.wait(5)
    assert reasons == ["the other end hung up"]


def test_a_link_that_says_nothing_is_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SILENT_SECONDS", 0.2)
    _, head = links()
    with pytest.raises(wire.Broken, match=r"nothing complete was heard for 0\.2 s"):
        head.receive()
