"""The chat on a terminal: prompt, line editing, Ctrl-C, and what may reach the screen."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from chat_support import (
    CTRL_A,
    CTRL_C,
    CTRL_D,
    DONE,
    UP,
    environment,
    event,
    fake_engine,
    response,
    run,
    scripted_server,
    spoken,
    terminal,
)

HINT = "Ctrl-C again, Ctrl-D or /quit leaves"


def test_ctrl_c_in_a_long_prefill_returns_to_the_prompt_and_takes_the_question_back() -> None:
    with fake_engine("--prefill-seconds", "30") as engine, terminal(engine.base_url) as screen:
        screen.type("one\r")
        engine.wait_for_requests(1)
        begun = time.monotonic()
        screen.type(CTRL_C)
        screen.expect("stopped; the question is taken back")
        screen.expect("> ")
        assert time.monotonic() - begun < 1.0
        engine.wait_for_disconnect()
        screen.type("two\r")
        engine.wait_for_requests(2)
        assert spoken(engine.bodies()[1]) == [("user", "two")]


def test_ctrl_c_amid_an_answer_keeps_what_came() -> None:
    with (
        fake_engine("--answer", "One two " + "more " * 500, "--chunk-seconds", "0.1") as engine,
        terminal(engine.base_url) as screen,
    ):
        screen.type("a\r")
        screen.expect("One two")
        screen.type(CTRL_C)
        screen.expect("stopped; what came is kept")
        engine.wait_for_disconnect()
        screen.expect("> ")
        screen.type("b\r")
        engine.wait_for_requests(2)
        (_, partial, question) = spoken(engine.bodies()[1])
    assert partial[0] == "assistant"
    assert partial[1].startswith("One two")
    assert question == ("user", "b")


def test_ctrl_c_at_an_empty_prompt_leaves_the_second_time() -> None:
    with fake_engine() as engine, terminal(engine.base_url) as screen:
        screen.type(CTRL_C)
        screen.expect(HINT)
        screen.expect("> ")
        # A turn between them, and the count begins anew.
        screen.type("Hi\r")
        screen.expect("Hello from the fake.")
        screen.expect("> ")
        screen.type(CTRL_C)
        screen.expect(HINT)
        screen.expect("> ")
        screen.type(CTRL_C)
        assert screen.end() == 0


def test_ctrl_c_on_a_line_clears_the_line_and_counts_for_nothing() -> None:
    with fake_engine() as engine, terminal(engine.base_url) as screen:
        for _ in range(12):
            screen.type("half a")
            screen.expect("half a")
            screen.type(CTRL_C)
            screen.expect("> ")
        screen.type("Hi\r")
        screen.expect("Hello from the fake.")
        assert HINT not in screen.shown
        assert spoken(engine.bodies()[0]) == [("user", "Hi")]


@pytest.mark.parametrize("leave", [CTRL_D, "/quit\r"])
def test_leaving(leave: str) -> None:
    with fake_engine() as engine, terminal(engine.base_url) as screen:
        screen.type(leave)
        assert screen.end() == 0


def test_a_fault_is_told_and_the_prompt_comes_back() -> None:
    with fake_engine("--die-after", "2", "--answer", "One two three") as engine, terminal(engine.base_url) as screen:
        screen.type("a\r")
        screen.expect("the connection ended before the answer was complete")
        screen.expect("> ")
        engine.process.wait(timeout=10)  # its connection closes a moment before its port does
        screen.type("b\r")
        screen.expect("nothing answers at ")
        screen.expect("> ")
        screen.type(CTRL_D)
        # The person at the terminal has read it: leaving is no failure.
        assert screen.end() == 0


def test_the_line_can_be_edited_and_earlier_ones_recalled() -> None:
    with fake_engine() as engine, terminal(engine.base_url) as screen:
        screen.type(f"ello{CTRL_A}H\r")
        engine.wait_for_requests(1)
        screen.expect("tokens")
        screen.expect("> ")
        screen.type(f"{UP} again\r")
        engine.wait_for_requests(2)
        assert [spoken(body)[-1] for body in engine.bodies()] == [("user", "Hello"), ("user", "Hello again")]


def test_several_lines_pasted_are_one_turn_and_a_tab_is_a_tab() -> None:
    with fake_engine() as engine, terminal(engine.base_url) as screen:
        screen.type("\x1b[200~def f():\r\treturn 1\x1b[201~\r")
        engine.wait_for_requests(1)
        assert spoken(engine.bodies()[0]) == [("user", "def f():\n\treturn 1")]


def test_thinking_is_dim_under_its_heading() -> None:
    with fake_engine("--reasoning", "Well now", "--answer", "Yes.") as engine, terminal(engine.base_url) as screen:
        screen.type("Hi\r")
        screen.expect("\x1b[2mthinking\r\n\x1b[0m")
        screen.expect("\x1b[2mWell\x1b[0m\x1b[2m now\x1b[0m\r\nYes.\r\n")


@pytest.mark.parametrize("variable", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_escape_sequence_where_none_is_wanted(variable: dict[str, str]) -> None:
    with (
        fake_engine("--reasoning", "Well", "--answer", "Yes.") as engine,
        terminal(engine.base_url, **variable) as screen,
    ):
        screen.type("Hi\r")
        screen.expect("thinking\r\nWell\r\nYes.\r\n")
        screen.expect("> ")
        screen.type(CTRL_D)
        assert screen.end() == 0
    assert "\x1b" not in screen.shown


SPITEFUL = "a\x1b]0;title\x07\x1b[2Jb\x9b31m\x7f\rc\td"
FILTERED = "a]0;title[2Jb31mc\td"


def test_a_terminal_gets_no_control_characters_of_the_model_s_or_the_server_s() -> None:
    stream = event({"reasoning": SPITEFUL}) + event({"content": SPITEFUL}) + event({}, "stop") + DONE
    with scripted_server(response(stream)) as base_url, terminal(base_url, NO_COLOR="1") as screen:
        screen.type("Hi\r")
        # The terminal's driver may turn a tab into spaces, so the comparison ends ahead of it.
        screen.expect(f"thinking\r\n{FILTERED[:-2]}")
        screen.expect(f"\r\n{FILTERED[:-2]}")
        assert "\x1b" not in screen.shown
    error = b'{"error": {"message": "a\\u001b[2Jb", "code": 400}}'
    with (
        scripted_server(response(error, "application/json", "400 Bad")) as base_url,
        terminal(base_url, NO_COLOR="1") as screen,
    ):
        screen.type("Hi\r")
        screen.expect("400 Bad: a\\x1b[2Jb")
        assert "\x1b" not in screen.shown


def test_a_pipe_gets_every_byte() -> None:
    stream = event({"content": SPITEFUL}) + event({}, "stop") + DONE
    with scripted_server(response(stream)) as base_url:
        assert run(base_url, "--ask", "Hi", env=environment())[:2] == (0, f"{SPITEFUL}\n")


def test_a_redirected_answer_holds_no_prompt_and_the_line_is_still_edited(tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    with fake_engine("--reasoning", "Well") as engine, answers.open("wb") as file:
        with terminal(engine.base_url, stdout=file) as screen:
            screen.type(f"i{CTRL_A}H\r")
            screen.expect("thinking")
            screen.expect("> ")
            screen.type(CTRL_D)
            assert screen.end() == 0
        assert spoken(engine.bodies()[0]) == [("user", "Hi")]
    assert answers.read_text() == "Hello from the fake.\n"
