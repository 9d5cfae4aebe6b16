"""The parts of the chat that need no process: is there a server, the rate, and Ctrl-C's windows."""

from __future__ import annotations

import io
import os
import signal
import time
import tracemalloc

import pytest
from chat_support import fake_engine, response, scripted_server

from slimserve.chat import Endpoint, is_serving
from slimserve.chat_answer import Answer, Usage
from slimserve.chat_terminal import INDENT_CHARACTERS, Interrupts, Screen


def test_a_server_that_lists_the_model_with_this_key_is_serving() -> None:
    with fake_engine("--model", "smol", key="k") as engine:
        assert is_serving(Endpoint(engine.base_url, "smol", "k"))
        assert is_serving(Endpoint(engine.base_url + "/", "smol", "k"))
        assert not is_serving(Endpoint(engine.base_url, "smol", "other"))
        assert not is_serving(Endpoint(engine.base_url, "smol"))
        assert not is_serving(Endpoint(engine.base_url, "smo", "k"))
    assert not is_serving(Endpoint(engine.base_url, "smol", "k"))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"data": {"id": "m"}}', b'{"data": ["m", null, 3]}', b"\xff{", b"[" * 100_000]
)
def test_what_else_may_listen_there_is_not_serving(body: bytes) -> None:
    with scripted_server(response(body, "application/json")) as base_url:
        assert not is_serving(Endpoint(base_url, "m"))


@pytest.mark.parametrize("base_url", ["", "ftp://127.0.0.1/v1", "http://[::1/v1", "http://127.0.0.1:0/v1"])
def test_an_address_that_is_none_is_not_serving(base_url: str) -> None:
    assert not is_serving(Endpoint(base_url, "m"))


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{"])
def test_a_server_that_keeps_silent_is_not_waited_for(begun: bytes) -> None:
    with scripted_server(begun, hold=True) as base_url:
        asked_at = time.monotonic()
        assert not is_serving(Endpoint(base_url, "m"), deadline_seconds=0.3)
        assert 0.25 < time.monotonic() - asked_at < 2.0


def test_the_key_is_not_in_the_representation() -> None:
    assert "sk-1" not in repr(Endpoint("http://127.0.0.1:8000/v1", "m", "sk-1"))


def test_the_rate_leaves_out_the_first_token_whose_time_is_the_prefill_s() -> None:
    answer = Answer(usage=Usage(100, 41), asked_at=10.0, first_at=12.0, last_at=16.0)
    assert answer.tokens_per_second == 10.0
    assert answer.first_token_seconds == 2.0


@pytest.mark.parametrize(
    "answer",
    [
        Answer(usage=None, first_at=1.0, last_at=2.0),
        Answer(usage=Usage(1, 5)),
        Answer(usage=Usage(1, 1), first_at=1.0, last_at=2.0),
        # All in one event, as speculation or a slow link may have it: there is no time to divide by.
        Answer(usage=Usage(1, 5), first_at=1.0, last_at=1.0),
    ],
)
def test_no_rate_where_there_is_nothing_to_measure(answer: Answer) -> None:
    assert answer.tokens_per_second is None


def test_blank_lines_without_end_are_not_kept() -> None:
    out = io.StringIO()
    screen = Screen(out, io.StringIO(), colour=False)
    tracemalloc.start()
    try:
        for _ in range(1000):
            screen.words(" \t\n" * 1000)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    screen.words("  ")
    screen.words("x")
    assert out.getvalue() == "  x"
    assert held < 100_000


def test_an_indent_without_end_is_passed_on_and_not_kept() -> None:
    out = io.StringIO()
    screen = Screen(out, io.StringIO(), colour=False)
    screen.words("\n" + " " * INDENT_CHARACTERS)
    assert out.getvalue() == ""
    screen.words(" ")
    screen.words(" ")
    assert out.getvalue() == " " * (INDENT_CHARACTERS + 2)


def test_an_interrupt_outside_a_window_is_raised_in_the_next_one_and_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            pytest.fail("the window was entered")
        with interrupts.allowed():
            pass
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_ignores_interrupts_keeps_ignoring_them() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.allowed():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
