"""One question, one answer: what goes to stdout, what to stderr, and the exit code."""

from __future__ import annotations

import fcntl
import json
import re
import signal
import socket
import sys
import termios
from pathlib import Path
from typing import IO

import pytest
from chat_support import (
    DEADLINE_SECONDS,
    DONE,
    environment,
    event,
    fake_engine,
    response,
    run,
    scripted_server,
    seconds_to_end,
    start,
    wait_until,
)

from slimserve.client_faults import ADVICE_BY_CODE
from slimserve.engine.state import State

ROOT = Path(__file__).resolve().parents[2]
HELLO = (event({"role": "assistant", "content": ""}), event({"content": "Hello"}), event({"content": " you"}))


def test_the_answer_alone_is_on_stdout() -> None:
    with fake_engine("--answer", "It is Paris.", "--chunk-seconds", "0.01") as engine:
        code, out, err = run(engine.base_url, "--ask", "Which city?")
    assert (code, out) == (0, "It is Paris.\n")
    assert "3 tokens, first after " in err
    assert "tokens/s" in err


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_shown_apart_and_without_escapes_in_a_pipe(field: str) -> None:
    with fake_engine("--answer", "Paris.", "--reasoning", "France has one", "--reasoning-field", field) as engine:
        code, out, err = run(engine.base_url, "--ask", "Which city?")
    assert (code, out) == (0, "Paris.\n")
    assert err.startswith("thinking\nFrance has one\n[")
    assert "\x1b" not in err


def test_sampling_is_left_to_the_server_and_the_key_is_sent_and_never_shown() -> None:
    with fake_engine(key="sk-very-secret") as engine:
        env = environment(CHAT_KEY="sk-very-secret")
        code, out, err = run(engine.base_url, "--ask", "Hi", "--system", "Be brief.", env=env)
        assert engine.bodies() == [
            {
                "model": "fake",
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ]
        assert engine.events()["authorizations"] == ["Bearer sk-very-secret"]
    assert code == 0
    assert "secret" not in out + err


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        (["--null-content"], "no answer: the content is empty (finish_reason stop)"),
        (["--answer", ""], "no answer: the content is empty (finish_reason stop)"),
        (["--answer", "  \n"], "no answer: the content is empty (finish_reason stop)"),
        (["--null-content", "--reasoning", "Hm"], "no answer: only reasoning came (finish_reason stop)"),
        (
            ["--null-content", "--reasoning", "Hm", "--finish-reason", "length"],
            "no answer: thinking used the whole token budget (finish_reason length)",
        ),
        (
            ["--null-content", "--finish-reason", "length"],
            "no answer: the token budget was used up before any text (finish_reason length)",
        ),
    ],
)
def test_no_answer_is_a_failure_that_says_why(switches: list[str], said: str) -> None:
    with fake_engine(*switches) as engine:
        code, out, err = run(engine.base_url, "--ask", "Hi")
    assert (code, out) == (1, "")
    assert f"{said}\n  why: " in err
    assert "\n  do:  " in err


def test_a_call_of_a_tool_is_no_answer() -> None:
    call = event({"tool_calls": [{"index": 0, "function": {"name": "look", "arguments": "{}"}}]}, "tool_calls")
    with scripted_server(response(call + DONE)) as base_url:
        code, out, err = run(base_url, "--ask", "Hi")
    assert (code, out) == (1, "")
    assert "the model asked for a tool and gave no answer (finish_reason tool_calls)" in err


@pytest.mark.parametrize(
    ("status", "do"),
    [
        (400, "mend what its message names"),
        (401, "set SLIMSERVE_API_KEY to one of its keys; `slimserve --add-key NAME` makes one"),
        (404, "compare with the names under"),
        (429, "wait for a moment"),
        (500, "look at the end of the engine's log"),
        (503, "wait for a moment"),
    ],
)
def test_an_error_status_is_told_with_the_server_s_own_words(status: int, do: str) -> None:
    with fake_engine("--status", str(status)) as engine:
        code, out, err = run(engine.base_url, "--ask", "Hi")
    assert (code, out) == (1, "")
    assert err.startswith(f"the server answered {status} ")
    assert f"the fake answers {status}" in err
    assert f"do:  {do}" in err


@pytest.mark.parametrize(
    ("code", "why", "do"),
    [
        ("endpoint_loading", "it is not ready yet", "wait until it is"),
        ("endpoint_failed", "it does not come back by itself", "see why with `slimserve --status`"),
        ("endpoint_stopped", "it was told to stop", "start it again"),
        ("draining", "it was told to stop", "start it again"),
        ("engine_died", "its engine died and is started again", "wait until it is ready"),
        ("somebody_else_s", "it takes no requests at the moment", "wait for a moment"),
    ],
)
def test_what_to_do_about_a_503_depends_on_its_code(code: str, why: str, do: str) -> None:
    body = json.dumps({"error": {"message": "the reason", "code": code}}).encode()
    with scripted_server(response(body, "application/json", "503 Service Unavailable")) as base_url:
        _, _, err = run(base_url, "--ask", "Hi")
    assert err.startswith("the server answered 503 Service Unavailable: the reason\n")
    assert f"why: {why}" in err.replace("its engine crashed too often, and ", "")
    assert f"do:  {do}" in err


def test_every_state_and_code_of_a_503_has_its_advice() -> None:
    codes = {f"endpoint_{state}" for state in State if state is not State.READY}
    for file in (ROOT / "slimserve/admission").glob("*.py"):
        codes |= set(re.findall(r'\b503,(?:(?!Rejected).)*?code="(\w+)"', file.read_text(), re.DOTALL))
    assert {"engine_died", "draining"} <= codes
    assert codes == set(ADVICE_BY_CODE)


def test_an_error_status_without_an_openai_body_is_quoted() -> None:
    page = response(b"<h1>\x1b[31mBad\xff</h1>", "text/html", "502 Bad Gateway")
    with scripted_server(page) as base_url:
        code, _, err = run(base_url, "--ask", "Hi")
    assert code == 1
    assert "502 Bad Gateway: '<h1>\\x1b[31mBad" in err


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code, out, err = run(f"http://127.0.0.1:{port}/v1", "--ask", "Hi")
    assert (code, out) == (1, "")
    assert f"nothing answers at http://127.0.0.1:{port}/v1\n  why: Connection refused\n" in err


@pytest.mark.parametrize("switch", ["--drop-after", "--die-after"])
def test_a_stream_that_breaks_off_is_a_failure_and_keeps_what_came(switch: str) -> None:
    with fake_engine("--answer", "One two three", switch, "3") as engine:
        code, out, err = run(engine.base_url, "--ask", "Hi")
    assert (code, out) == (1, "One two\n")
    assert "the connection ended before the answer was complete" in err
    assert "tokens/s" not in err


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (b"data: {not JSON\n\n", "an event that is no JSON object: '{not JSON'"),
        (b"data: [1]\n\n", "an event that is no JSON object: '[1]'"),
        (b'data: {"choices": 3}\n\n', "an event without a list of choices"),
        (b'data: {"choices": [{"index": 0}]}\n\n', "a choice without a delta"),
        (event({"content": 5}), "a content of type int"),
        (b'data: {"choices": "\xff\xfe"}\n\n', "bytes that are not UTF-8"),
        (b"data: " + b"x" * (5 << 20), "a line of more than 4194304 bytes"),
        (b"data: xxxxxxxxx\n" * (5 << 16), "an event of more than 4194304 bytes"),
        (b"data\n" * (2 << 20), "an event of more than 4194304 bytes"),
        (DONE, "the connection ended before the answer was complete"),
        (event({"content": "Half"}, "abort") + DONE, "the server gave the answer up (finish_reason abort)"),
        (
            b'data: {"error": {"message": "engine died", "type": "InternalServerError", "code": 500}}\n\n' + DONE,
            "the server broke the answer off with 500: engine died",
        ),
    ],
)
def test_a_stream_that_is_not_one(stream: bytes, said: str) -> None:
    with scripted_server(response(stream)) as base_url:
        code, _, err = run(base_url, "--ask", "Hi")
    assert code == 1
    assert said in err
    assert err.count("  why: ") == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (response(b"<html>", "text/html"), "an answer of type text/html"),
        (b"220 mail.example ESMTP\r\n", "an answer that cannot be read"),
        (b"", "the connection ended before the answer was complete"),
    ],
)
def test_a_server_that_is_something_else(answer: bytes, said: str) -> None:
    with scripted_server(answer) as base_url:
        code, out, err = run(base_url, "--ask", "Hi")
    assert (code, out) == (1, "")
    assert said in err


def test_a_malformed_event_amid_an_answer() -> None:
    with fake_engine("--malformed") as engine:
        code, _, err = run(engine.base_url, "--ask", "Hi")
    assert code == 1
    assert "an event that is no JSON object: '{this is not JSON'" in err


def test_a_character_may_be_cut_anywhere() -> None:
    answer = "Grüße, 日本 🙂 ok"
    with fake_engine("--answer", answer, "--bytes-per-write", "1") as engine:
        assert run(engine.base_url, "--ask", "Hi")[:2] == (0, f"{answer}\n")


def test_comments_other_fields_and_carriage_returns_are_part_of_the_protocol() -> None:
    stream = b": ping\n\nevent: message\nid: 1\n" + b"".join(HELLO).replace(b"\n", b"\r\n") + event({}, "stop") + DONE
    with scripted_server(response(stream)) as base_url:
        assert run(base_url, "--ask", "Hi")[:2] == (0, "Hello you\n")


def test_an_answer_that_ended_is_whole_even_without_done_and_without_usage_has_no_rate() -> None:
    with scripted_server(response(b"".join(HELLO) + event({}, "stop"))) as base_url:
        code, out, err = run(base_url, "--ask", "Hi")
    assert (code, out) == (0, "Hello you\n")
    assert err.startswith("[first after ")
    assert "tokens" not in err


def test_without_usage_no_rate_is_guessed() -> None:
    with fake_engine("--no-usage", "--chunk-seconds", "0.01") as engine:
        code, _, err = run(engine.base_url, "--ask", "Hi")
    assert code == 0
    assert "tokens" not in err


def test_an_answer_that_was_cut_says_so() -> None:
    with fake_engine("--finish-reason", "length") as engine:
        code, out, err = run(engine.base_url, "--ask", "Hi")
    assert (code, out) == (0, "Hello from the fake.\n")
    assert "cut off" in err
    assert "finish_reason length" in err


def test_blank_lines_ahead_of_the_answer_are_left_out_and_its_indent_is_kept() -> None:
    stream = event({"content": "\n"}) + event({"content": " \n    x = 1\n\n"}) + event({}, "stop") + DONE
    with scripted_server(response(stream)) as base_url:
        assert run(base_url, "--ask", "Hi")[:2] == (0, "    x = 1\n\n")


def test_what_the_output_s_encoding_lacks_is_replaced() -> None:
    stream = event({"content": "é \ud83d €"}) + event({}, "stop") + DONE
    with (
        scripted_server(response(stream)) as base_url,
        start(base_url, "--ask", "Hi", env=environment(PYTHONIOENCODING="latin-1")) as process,
    ):
        out, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, out) == (0, b"\xe9 ? ?\n")


@pytest.mark.parametrize(
    ("base_url", "prompt", "key", "said"),
    [
        ("http://127.0.0.1:1/v1", " \n", "", "the prompt is empty"),
        ("127.0.0.1:8000", "Hi", "", "'127.0.0.1:8000' is no address of a server"),
        ("http://127.0.0.1:99999/v1", "Hi", "", "is no address of a server"),
        ("http://127.0.0.1:1/v 1", "Hi", "", "is no address of a server"),
    ],
)
def test_what_cannot_be_sent_is_a_matter_of_usage(base_url: str, prompt: str, key: str, said: str) -> None:
    code, out, err = run(base_url, "--ask", prompt, env=environment(CHAT_KEY=key))
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ask", b"\xff\xfe"], b"the prompt is not UTF-8\n"),
        (["--ask", "Hi", "--system", b"\xff\xfe"], b"the system prompt is not UTF-8\n"),
        (["--system", b"\xff\xfe"], b"the system prompt is not UTF-8\n"),
    ],
)
def test_a_prompt_that_is_not_utf_8(arguments: list[str], said: bytes) -> None:
    with start("http://127.0.0.1:1/v1", *arguments) as process:
        _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 2
    assert err.startswith(said)


def test_events_are_bounded_one_by_one_and_not_together() -> None:
    stream = event({"content": "x" * (1 << 20)}) * 6 + event({}, "stop") + DONE
    with scripted_server(response(stream)) as base_url:
        code, out, _ = run(base_url, "--ask", "Hi")
    assert (code, len(out)) == (0, 6 * (1 << 20) + 1)


@pytest.mark.parametrize("count", ["1" + "0" * 400, str(2**53 + 1), "-1", "true", "3.0", '"3"', "null"])
def test_a_count_that_is_none_is_no_usage(count: str) -> None:
    usage = f'data: {{"choices": [], "usage": {{"prompt_tokens": 1, "completion_tokens": {count}}}}}\n\n'.encode()
    # Apart in time, so that there is something to divide by.
    pieces = [response(HELLO[0]), *HELLO[1:] * 200, event({}, "stop"), usage, DONE]
    with scripted_server(*pieces) as base_url:
        code, _, err = run(base_url, "--ask", "Hi")
    assert code == 0
    assert "tokens" not in err


def test_a_key_that_no_header_carries_is_refused_unseen() -> None:
    with fake_engine() as engine:
        code, _, err = run(engine.base_url, "--ask", "Hi", env=environment(CHAT_KEY="sk-secret\nX: y"))
    assert code == 2
    assert "the API key cannot be sent" in err
    assert "secret" not in err


def test_ctrl_c_ends_a_long_prefill_at_once_and_the_server_sees_it() -> None:
    with fake_engine("--prefill-seconds", "30") as engine, start(engine.base_url, "--ask", "Hi") as process:
        engine.wait_for_requests(1)
        assert seconds_to_end(process, signal.SIGINT) < 1.0
        engine.wait_for_disconnect()
        out, err = process.communicate()
    assert (process.returncode, out, err) == (1, b"", b"stopped\n")


def test_a_stop_by_a_handler_that_does_not_raise() -> None:
    with (
        fake_engine("--prefill-seconds", "30") as engine,
        start(engine.base_url, "--ask", "Hi", "--stop-on-sigterm") as process,
    ):
        engine.wait_for_requests(1)
        assert seconds_to_end(process, signal.SIGTERM) < 1.0
        engine.wait_for_disconnect()
        out, err = process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert err.startswith(b"the answer was stopped\n")


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    with fake_engine("--answer", "word " * 300, "--chunk-seconds", "0.01") as engine:
        with start(engine.base_url, "--ask", "Hi") as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(4) == b"word"
            process.stdout.close()
            assert process.wait(timeout=DEADLINE_SECONDS) == 1
            assert process.stderr.read() == b""
        engine.wait_for_disconnect()


def test_a_full_disk_is_told_once() -> None:
    with (
        fake_engine() as engine,
        open("/dev/full", "wb") as full,
        start(engine.base_url, "--ask", "Hi", stdout=full) as process,
    ):
        _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 1
    assert err.startswith(b"the answer could not be written: No space left on device\n  why: ")
    assert err.count(b"No space") == 1


def test_ctrl_c_works_while_nobody_empties_the_pipe() -> None:
    words = "word " * (1 << 16)
    with (
        scripted_server(response(event({"content": words})), hold=True) as base_url,
        start(base_url, "--ask", "Hi") as process,
    ):
        assert process.stdout is not None
        pipe = process.stdout
        # Once it is full the process can only be waiting in its write.
        wait_until(lambda: _is_full(pipe), "the pipe to fill")
        assert seconds_to_end(process, signal.SIGINT) < 1.0
    assert process.returncode == 1


def _is_full(pipe: IO[bytes]) -> bool:
    unread = int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
    return unread == fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
