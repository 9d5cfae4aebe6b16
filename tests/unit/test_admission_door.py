"""The door with a fake engine behind it: slots come back whatever happens, and the supervisor's way in."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from admission_support import DEADLINE_SECONDS, Door, chat, receive_all, receive_until, release, request
from waiting import until

KEYS = {"alice": "sk-slim-alice", "bob": "sk-slim-bob"}
HASHES = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
MakeDoor = Callable[..., Door]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeDoor]:
    doors: list[Door] = []

    def make(settings: dict[str, float] | None = None, **config: Any) -> Door:
        doors.append(Door(tmp_path / f"door{len(doors)}", settings, **config))
        return doors[-1]

    yield make
    for door in doors:
        door.stop()


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """One with short graces, for tests that leave it as they found it."""
    graces = {"exchange.LISTEN_SECONDS": 0.1, "exchange.GRACE_SECONDS": 0.3, "protocol.UNREAD_SECONDS": 0.5}
    door = Door(tmp_path_factory.mktemp("door") / "a", graces, thinking="keep")
    yield door
    door.stop()


def busy(door: Door, count: int) -> None:
    until(lambda: door.state.in_flight == count)


def metrics_of(door: Door) -> dict[str, float]:
    lines = door.control.ask("GET", "/fake/metrics")[1].decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("slimserve_"))
    return {name: float(value) for name, value in pairs}


def test_beyond_the_cap_it_is_429_and_what_was_admitted_completes(door: Door) -> None:  # C1
    held = [door.start({"stream": True}, chunks=2, interval=0.5) for _ in range(4)]
    busy(door, 4)
    answer = door.ask()
    assert answer.status == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.json["error"]["type"] == "rate_limit_error"
    assert answer.json["error"]["code"] == "too_many_in_flight"
    assert door.ask(path="/v1/messages").json["type"] == "error"
    for sock in held:
        assert b"[DONE]" in receive_until(sock, b"0\r\n\r\n")
    release(held)
    door.empty()


def test_a_refusal_by_the_head_alone_is_that_of_the_long_way(door: Door) -> None:
    """A small request is refused before it is a task, and one of which less is known later; no client can tell."""
    held = [door.start(freeze=True) for _ in range(4)]
    busy(door, 4)
    name = 'slimserve_requests_total{dialect="chat",outcome="rejected: too_many_in_flight"}'
    before = metrics_of(door).get(name, 0)
    body = json.dumps({"messages": []}).encode()
    short = door.ask(body)
    long = door.ask(body, headers={"Expect": "100-continue"})
    assert (short.status, short.json["error"]["code"]) == (long.status, long.json["error"]["code"])
    # The long way cannot know whether the body will come, and ends the connection.
    assert short.headers.keys() == long.headers.keys() - {"connection"}
    assert metrics_of(door)[name] == before + 2
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=60)
    for _ in range(3):  # on one connection, the body's rest is no request
        connection.request("POST", "/v1/chat/completions", b" " * 50_000, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert (response.status, bool(response.read())) == (429, True)
    connection.close()
    release(held)
    door.empty()


def test_a_key_is_asked_for_where_there_is_no_room(make: MakeDoor) -> None:
    door = make(max_in_flight=1, key_hashes=HASHES)
    held = door.send(
        request(json.dumps(chat(freeze=True)).encode(), b"Authorization: Bearer " + KEYS["alice"].encode())
    )
    busy(door, 1)
    assert door.ask().status == 401
    assert door.ask(headers={"Authorization": f"Bearer {KEYS['alice']}"}).status == 429
    release([held])
    door.empty()


def test_only_generation_takes_a_slot(door: Door) -> None:
    held = [door.start(freeze=True) for _ in range(4)]
    busy(door, 4)
    for path in ("/v1/models", "/health"):
        assert door.ask(path=path, method="GET").status == 200
    assert door.ask(path="/tokenize").status == 200
    assert door.state.in_flight == 4
    release(held)
    door.empty()


def test_the_name_of_a_model_is_bounded_on_every_route(door: Door) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"):
        answer = door.ask({"model": "/a" * 200}, path=path)
        assert answer.status == 404
        assert "400 characters" in answer.json["error"]["message"]
    door.empty()


def test_n_and_prompts_take_as_many(door: Door) -> None:
    held = [door.start({"n": 3}, freeze=True)]
    busy(door, 3)
    assert door.ask({"n": 2}).status == 429
    assert door.ask({"n": 5}).status == 400
    assert door.ask({"prompt": ["a", "b"]}, path="/v1/completions").status == 429
    assert door.ask().status == 200
    assert door.state.in_flight == 3
    release(held)
    door.empty()


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    "fake",
    [
        {"chunks": 10**6, "interval": 0.05, "delay": 0.1},
        {"freeze": True},
        {"stay": True},
        {"freeze": True, "deaf": True},
    ],
    ids=["answers", "frozen", "stays", "deaf"],
)
def test_a_client_that_goes_away_gives_its_slot_back(door: Door, fake: dict[str, Any], streamed: bool) -> None:
    sock = door.start({"stream": streamed}, **fake)
    busy(door, 1)
    sock.close()
    door.empty()
    assert door.ask().status == 200


def test_a_client_that_resets_in_its_body_gives_its_slot_back(door: Door) -> None:
    socks = [door.send(request(b"{", length=100)) for _ in range(3)]
    busy(door, 3)
    release(socks)
    door.empty()


def test_a_client_that_reads_nothing_is_cut_off(door: Door) -> None:
    sock = door.start({"stream": True}, chunks=1000, text="x" * 50_000)
    busy(door, 1)
    door.empty()
    sock.close()


def test_a_frozen_engine_shows(door: Door) -> None:
    assert door.state.stalled_seconds == 0
    sock = door.start(freeze=True)
    until(lambda: door.state.stalled_seconds > 0.3)
    other = door.start({"stream": True}, chunks=20, interval=0.05)
    receive_until(other, b"data:")
    assert door.state.stalled_seconds < 5  # a chunk is a sign of life
    release([sock, other])
    door.empty()


def test_an_exception_before_the_answer_is_a_500_without_its_words(door: Door) -> None:
    answer = door.ask({"stream": True}, **{"raise": 0})
    assert answer.status == 500
    assert answer.json["error"]["type"] == "server_error"
    assert b"secret" not in answer.body
    assert b"Traceback" not in answer.body
    assert "a secret of the engine's" in door.log.read_text()
    door.empty()


def test_an_exception_in_the_stream_closes_it_short(door: Door) -> None:
    sock = door.start({"stream": True}, **{"raise": 2})
    raw = receive_all(sock)
    sock.close()
    assert raw.count(b"data: ") == 2
    assert not raw.endswith(b"0\r\n\r\n")
    door.empty()


def test_an_error_of_the_engine_keeps_its_status_and_gets_our_form(door: Door) -> None:
    answer = door.ask(status=404)
    assert answer.status == 404
    assert answer.json["error"] == {
        "message": "as told", "type": "not_found_error", "param": None, "code": "refused_by_engine"
    }  # fmt: skip
    answer = door.ask(path="/v1/messages", status=400)
    assert answer.json == {"type": "error", "error": {"type": "invalid_request_error", "message": "as told"}}
    door.empty()


def test_a_failure_of_the_engine_at_a_grammar_is_the_request_s(door: Door) -> None:
    grammar = {"response_format": {"type": "json_object"}}
    answer = door.ask(grammar, status=500)
    assert (answer.status, answer.json["error"]["param"]) == (400, "response_format")
    answer = door.ask(grammar, status=500, words="EngineCore encountered an issue. See stack trace (above)")
    assert (answer.status, answer.json["error"]["code"]) == (503, "engine_died")
    assert int(answer.headers["retry-after"]) > 0
    answer = door.ask(status=500)
    assert (answer.status, answer.json["error"]["code"]) == (500, "engine_error")
    assert "as told" not in answer.json["error"]["message"]


def test_an_error_in_a_stream_gets_our_form(door: Door) -> None:
    inside = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    for path in ("/v1/chat/completions", "/v1/messages"):
        raw = door.ask({"stream": True}, path=path, fail=1, words=inside).body
        assert b"EngineCore" not in raw
        event = next(line for line in raw.split(b"\n") if line.startswith(b"data: ") and b"the engine died" in line)
        error = json.loads(event.removeprefix(b"data: "))
        assert error["error"]["type"] == ("overloaded_error" if path == "/v1/messages" else "server_error")
        assert raw.endswith(b"data: [DONE]\n\n")
        assert raw.count(b"word") == 1
    refused = door.ask({"stream": True, "response_format": {"type": "json_object"}}, fail=0, words="Internal").body
    assert b'"param":"response_format"' in refused
    door.empty()


def test_tokens_are_counted_for_few_at_once(make: MakeDoor) -> None:
    door = make()
    held = [door.send(request(json.dumps(chat(freeze=True)).encode(), path=b"/tokenize")) for _ in range(2)]
    until(lambda: door.seen["in_flight"] == 2)
    answer = door.ask(path="/v1/messages/count_tokens")
    assert (answer.status, answer.json["error"]["type"]) == (429, "rate_limit_error")
    assert int(answer.headers["retry-after"]) >= 1
    assert door.ask(path="/v1/models", method="GET").status == 200
    assert door.ask().status == 200
    release(held)
    until(lambda: door.ask(path="/tokenize").status == 200)


def test_a_body_is_as_large_as_the_context_has_use_for(door: Door) -> None:
    limit = 4096 * 16 + (64 << 10)
    for path in ("/v1/chat/completions", "/tokenize"):
        assert door.ask({"user": "x" * (limit - 1000)}, path=path).status == 200
        answer = door.ask({"user": "x" * limit}, path=path)
        assert (answer.status, answer.json["error"]["code"]) == (413, "body_too_large")
    assert door.ask({"prompt": "x" * limit}, path="/v1/completions").status == 200  # it may bring several prompts


def test_messages_without_number(door: Door) -> None:
    for path in ("/v1/chat/completions/batch", "/v1/messages/count_tokens"):
        answer = door.ask({"messages": [[]] * 50_001}, path=path)
        assert answer.status == (400 if path.endswith("batch") else 413)
    assert (
        "50000 objects and lists" in door.ask({"messages": [[]] * 50_001}, "/v1/completions").json["error"]["message"]
    )


def test_a_body_is_passed_on_as_it_came_unless_it_was_changed(door: Door) -> None:
    raw = json.dumps(chat() | {"user": "ünï", "seed": 7}, indent=3).encode()
    assert door.ask(raw).notes == []
    seen = door.seen["last"]
    assert int(seen["headers"]["content-length"]) == len(raw)
    answer = door.ask({"temperature": 0, "user": "ünï"})
    assert answer.notes == ["greedy sampling replaced by the model's own defaults"]
    seen = door.seen["last"]
    assert "temperature" not in seen["body"]
    assert seen["body"]["user"] == "ünï"
    assert door.log.read_text().count("greedy_replaced") >= 1
    assert "ünï" not in door.log.read_text()


def test_a_chunked_body_that_is_changed_gets_a_length(door: Door) -> None:
    body = json.dumps(chat() | {"temperature": 0}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )
    sock = door.send(head, b"5\r\n" + body[:5] + b"\r\n", b"%x\r\n" % len(body[5:]) + body[5:] + b"\r\n0\r\n\r\n")
    assert b" 200 " in receive_all(sock)[:20]
    sock.close()
    assert "transfer-encoding" not in door.seen["last"]["headers"]


def test_thinking_that_ate_the_budget_shows(door: Door) -> None:
    count = 'slimserve_notes_total{note="thinking_exhausted"}'
    before = metrics_of(door).get(count, 0)
    whole = door.ask(thought=True)
    assert whole.json["choices"][0]["finish_reason"] == "length"
    assert any("whole token budget" in note for note in whole.notes)
    stream = door.ask({"stream": True}, thought=True).body
    comment = stream.index(b"\n\n: thinking used up")
    assert stream.index(b'"length"') < comment < stream.index(b"data: [DONE]")
    assert metrics_of(door)[count] == before + 2
    assert not door.ask().notes
    assert b"budget" not in door.ask({"stream": True}).body


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_who_asks_one_after_the_other_is_never_refused(make: MakeDoor, kept: bool, stream: bool) -> None:
    """At a cap of one: the slot is free before the end of the answer is out."""
    door = make(max_in_flight=1)
    body = json.dumps(chat() | {"stream": stream}).encode()
    headers = {"Content-Type": "application/json"}
    seen = []
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=DEADLINE_SECONDS)
    for _ in range(200):
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        response.read()
        seen.append(response.status)
        if not kept:
            connection.close()
    connection.close()
    assert seen == [200] * 200
    assert door.seen["most"] == 1


def test_what_is_counted(make: MakeDoor) -> None:
    door = make(max_in_flight=1)
    door.ask()
    door.ask({"temperature": 0})
    door.ask(status=400)
    door.ask(status=500)
    door.ask({"stream": True}, fail=1, words="Internal server error")
    door.ask(b"{")
    door.ask(path="/nowhere")
    sock = door.start(freeze=True)
    busy(door, 1)
    assert metrics_of(door)["slimserve_in_flight"] == 1
    door.ask()
    sock.close()
    door.empty()
    seen = metrics_of(door)
    chats = {
        name.split('outcome="')[1].rstrip('"}'): value for name, value in seen.items() if "requests_total{" in name
    }
    assert chats == {
        "ok": 2,
        "refused by the engine": 1,
        "error": 2,
        "rejected: invalid_body": 1,
        "rejected: too_many_in_flight": 1,
        "disconnected": 1,
    }
    assert seen['slimserve_denied_total{reason="no_such_route"}'] == 1
    assert seen['slimserve_notes_total{note="greedy_replaced"}'] == 1
    assert seen["slimserve_cap"] == 1
    assert seen["slimserve_in_flight"] == 0
    assert seen["slimserve_wait_seconds_count"] == 6  # those that came through to the engine


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_drain_and_accept(make: MakeDoor, loop: str) -> None:
    door = make(loop=loop)
    kept = http.client.HTTPConnection("127.0.0.1", door.port, timeout=DEADLINE_SECONDS)
    kept.request("GET", "/v1/models")
    assert kept.getresponse().read()
    stream = door.start({"stream": True}, chunks=10, interval=0.1)
    seen = receive_until(stream, b"data: ")
    door.control.drain()
    assert not door.state.accepting
    # Running streams go on, kept connections hear the reason, new ones wait for whoever accepts next.
    kept.request("POST", "/v1/chat/completions", json.dumps(chat()), {"Content-Type": "application/json"})
    answer = kept.getresponse()
    assert answer.status == 503
    assert int(answer.headers["Retry-After"]) >= 1
    error = json.loads(answer.read())["error"]
    assert error["code"] == "draining"
    assert "it does not come back by itself" in error["message"]
    kept.request("GET", "/v1/models")
    assert kept.getresponse().status == 200
    kept.close()
    waiting = door.start()
    seen += receive_until(stream, b"0\r\n\r\n")
    assert seen.count(b"data: ") == 12
    door.empty()
    assert door.seen["requests"] == 1
    door.control.drain()  # again, which changes nothing
    door.control.accept()
    assert door.state.accepting
    assert b"200 OK" in receive_until(waiting, b"\r\n\r\n")
    door.control.accept()
    assert door.ask().status == 200
    release([stream, waiting])


def test_the_control_socket_needs_no_key_and_no_slot(make: MakeDoor) -> None:
    door = make(max_in_flight=1, key_hashes=HASHES)
    sock = door.send(request(json.dumps(chat(freeze=True)).encode(), b"x-api-key: sk-slim-bob"))
    busy(door, 1)
    state = door.state
    assert (state.accepting, state.in_flight, state.waiting, state.cap) == (True, 1, 0, 1)
    assert state.stalled_seconds >= 0
    assert door.control.ask("GET", "/metrics")[0] == 200
    assert door.control.is_healthy()
    sock.close()
    door.empty()


def test_keys_at_the_door(make: MakeDoor) -> None:
    door = make(key_hashes=HASHES)
    assert door.ask(path="/health", method="GET").status == 200
    for path, method in (("/v1/models", "GET"), ("/v1/chat/completions", "POST"), ("/v1/messages", "POST")):
        assert door.ask(path=path, method=method).status == 401
        assert door.ask(path=path, method=method, headers={"x-api-key": "sk-slim-eve"}).status == 401
        assert door.ask(path=path, method=method, headers={"Authorization": "Bearer sk-slim-bob"}).status == 200
    # A stranger learns nothing about bodies, and takes no slot.
    assert door.ask(b"{").status == 401
    log = door.log.read_text() + json.dumps(metrics_of(door))
    assert "sk-slim" not in log


def test_shares_by_key(make: MakeDoor) -> None:
    door = make(key_hashes=HASHES, fair_share=True, queue={"length": 8, "seconds": 60})

    def start(name: str, **fake: Any) -> socket.socket:
        return door.send(request(json.dumps(chat(**fake)).encode(), b"x-api-key: " + KEYS[name].encode()))

    heavy = [start("alice", freeze=True) for _ in range(4)]
    busy(door, 4)
    more = [start("alice", freeze=True) for _ in range(2)]
    until(lambda: door.state.waiting == 2)
    light = start("bob")
    until(lambda: door.state.waiting == 3)
    heavy.pop().close()
    heavy.pop().close()
    assert b"200 OK" in receive_until(light, b"\r\n\r\n")  # although alice's were there first
    release([*heavy, *more, light])
    door.empty()


def test_waiting_instead_of_429(make: MakeDoor) -> None:
    door = make(max_in_flight=1, queue={"length": 2, "seconds": 60})
    first = door.start(freeze=True)
    busy(door, 1)
    second, third = door.start(), door.start()
    until(lambda: door.state.waiting == 2)
    assert door.ask().status == 429
    third.close()  # who leaves the line leaves it
    until(lambda: door.state.waiting == 1)
    first.close()
    assert b"200 OK" in receive_until(second, b"\r\n\r\n")
    second.close()
    door.empty()
    assert door.seen["requests"] == 2


def test_a_wait_that_is_too_long(make: MakeDoor) -> None:
    door = make(max_in_flight=1, queue={"length": 2, "seconds": 1})
    first = door.start(freeze=True)
    busy(door, 1)
    answer = door.ask()
    assert answer.status == 429
    assert "within 1 s" in answer.json["error"]["message"]
    assert answer.headers["retry-after"]
    first.close()
    door.empty()


def test_browsers_may_come_from_listed_origins_only(make: MakeDoor) -> None:
    door = make(origins=["https://good.example"], key_hashes=HASHES)
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    good, bad = {"Origin": "https://good.example"}, {"Origin": "https://bad.example"}
    yes = door.ask(method="OPTIONS", headers=good | ask)
    assert yes.status == 200
    assert yes.headers["access-control-allow-origin"] == "https://good.example"
    assert "authorization" in yes.headers["access-control-allow-headers"].lower()
    no = door.ask(method="OPTIONS", headers=bad | ask)
    assert no.status == 400
    assert "access-control-allow-origin" not in no.headers
    refused = door.ask(headers=good)
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "https://good.example"
    served = door.ask({"temperature": 0}, headers=good | {"x-api-key": "sk-slim-bob"})
    assert served.status == 200
    assert "x-slimserve-note" in served.headers["access-control-expose-headers"].lower()
    assert "access-control-allow-origin" not in door.ask(headers=bad | {"x-api-key": "sk-slim-bob"}).headers


def test_cors_is_off_unless_origins_are_listed(door: Door) -> None:
    headers = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
    assert door.ask(method="OPTIONS", headers=headers).status == 405
    assert not [name for name in door.ask(headers=headers).headers if name.startswith("access-control")]


def test_an_engine_that_dies_closes_every_connection(make: MakeDoor) -> None:
    door = make()
    others = [door.start(freeze=True), door.start({"stream": True}, chunks=100, interval=0.1)]
    busy(door, 2)
    last = door.start({"stream": True}, exit=2)
    assert receive_all(last).count(b"data: ") <= 2
    assert door.process.wait(DEADLINE_SECONDS) == 9
    for sock in others:
        assert b"[DONE]" not in receive_all(sock)
    release([*others, last])
