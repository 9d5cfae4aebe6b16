"""The chat where the input is a pipe: each line is a turn, and stdout holds answers alone."""

from __future__ import annotations

import signal

from chat_support import DEADLINE_SECONDS, environment, fake_engine, run, spoken, start


def test_each_line_is_a_turn_and_reasoning_is_not_in_the_history() -> None:
    with fake_engine("--answer", "Fine.", "--reasoning", "secret thoughts") as engine:
        code, out, err = run(engine.base_url, given=b"one\r\n\n   \ntwo")
        first, second = engine.bodies()
    assert (code, out) == (0, "Fine.\nFine.\n")
    assert ">" not in err
    assert "\x1b" not in err
    assert err.count("thinking\nsecret thoughts\n") == 2
    assert spoken(first) == [("user", "one")]
    assert spoken(second) == [("user", "one"), ("assistant", "Fine."), ("user", "two")]
    assert {"temperature", "top_p", "top_k", "max_tokens", "seed"}.isdisjoint(second)


def test_no_input_is_no_error() -> None:
    with fake_engine() as engine:
        assert run(engine.base_url) == (0, "", "")


def test_the_system_prompt_can_be_shown_set_and_removed() -> None:
    given = b'/system\n/system Rhyme, please.\nHi\n/system\n/system ""\nHo\n'
    with fake_engine("--answer", "Fine.") as engine:
        code, out, err = run(engine.base_url, "--system", "Be brief.", given=given)
        first, second = engine.bodies()
    assert (code, out) == (0, "Fine.\nFine.\n")
    assert spoken(first) == [("system", "Rhyme, please."), ("user", "Hi")]
    assert spoken(second) == [("user", "Hi"), ("assistant", "Fine."), ("user", "Ho")]
    assert "system prompt: Be brief.\nthe system prompt is set\n" in err
    assert "system prompt: Rhyme, please.\nthe system prompt is removed\n" in err


def test_clear_forgets_the_turns_and_keeps_the_system_prompt() -> None:
    with fake_engine("--answer", "Fine.") as engine:
        run(engine.base_url, "--system", "Be brief.", given=b"one\n/clear\ntwo\n")
        assert spoken(engine.bodies()[1]) == [("system", "Be brief."), ("user", "two")]


def test_help_names_every_command_and_quit_leaves() -> None:
    with fake_engine() as engine:
        code, out, err = run(engine.base_url, given=b"/help\n/quit\nnever sent\n")
        assert engine.bodies() == []
    assert (code, out) == (0, "")
    for name in ("/help", "/clear", "/system [TEXT]", "/stats", "/quit"):
        assert f"\n{name} " in f"\n{err}"


def test_stats_add_up() -> None:
    switches = ["--answer", "One two three", "--chunk-seconds", "0.01"]
    with fake_engine(*switches, "--cached-tokens", "8") as engine:
        _, _, err = run(engine.base_url, given=b"/stats\na\nb\n/stats\n")
    assert err.startswith("0 turns, 0 prompt tokens, 0 completion tokens\n")
    last = err.splitlines()[-1]
    assert last.startswith("2 turns, 22 prompt tokens (16 cached), 6 completion tokens, last ")
    assert last.endswith(" tokens/s")


def test_stats_without_usage_say_so() -> None:
    with fake_engine("--no-usage") as engine:
        _, _, err = run(engine.base_url, given=b"a\n/stats\n")
    assert err.endswith("1 turn, 0 prompt tokens, 0 completion tokens, 1 of the turns without a count\n")


def test_an_unknown_command_names_the_nearest_and_is_not_sent() -> None:
    with fake_engine() as engine:
        code, out, err = run(engine.base_url, given=b"/claer\n/SYSTEM Be brief\n/\n/quit now\n /etc is a folder\n")
        (body,) = engine.bodies()
    assert (code, out) == (1, "Hello from the fake.\n")
    assert "there is no command /claer\n" in err
    assert "do:  write /clear; to send the line as a message, put a space ahead of it" in err
    assert "there is no command /SYSTEM\n" in err
    assert "do:  write /system; to send" in err
    assert "do:  write /help for the list;" in err
    assert "/quit takes nothing behind it\n  why: found 'now'\n  do:  write /quit alone" in err
    assert spoken(body) == [("user", " /etc is a folder")]


def test_a_failed_turn_is_taken_back_and_the_conversation_goes_on() -> None:
    with fake_engine("--status", "500") as engine:
        code, out, err = run(engine.base_url, given=b"one\ntwo\n")
        assert [spoken(body) for body in engine.bodies()] == [[("user", "one")], [("user", "two")]]
    assert (code, out) == (1, "")
    assert err.count("the server answered 500") == 2


def test_a_turn_that_broke_off_keeps_the_words_that_came() -> None:
    with fake_engine("--answer", "One two three", "--drop-after", "3") as engine:
        code, out, _ = run(engine.base_url, given=b"a\nb\n")
        assert spoken(engine.bodies()[1]) == [("user", "a"), ("assistant", "One two"), ("user", "b")]
    assert (code, out) == (1, "One two\nOne two\n")


def test_when_the_engine_is_gone_the_rest_is_not_tried() -> None:
    with fake_engine("--answer", "One two three", "--die-after", "3") as engine:
        code, out, err = run(engine.base_url, given=b"a\nb\nc\nd\n")
    assert (code, out) == (1, "One two\n")
    assert "the connection ended before the answer was complete" in err
    assert err.count("nothing answers at ") == 1


def test_a_wrong_key_form_is_told_once() -> None:
    with fake_engine() as engine:
        code, out, err = run(engine.base_url, given=b"a\nb\n", env=environment(CHAT_KEY="a\nb"))
    assert (code, out) == (1, "")
    assert err.count("the API key cannot be sent") == 1


def test_a_line_that_is_not_utf_8_is_left_out() -> None:
    with fake_engine() as engine:
        code, out, err = run(engine.base_url, given="\ngut\n".encode("utf-16") + "\nüber\n".encode())
        bodies = [spoken(body)[-1][1] for body in engine.bodies()]
    assert code == 1
    assert bodies[-1] == "über"
    assert "a line of the input is not UTF-8" in err
    assert out.count("Hello from the fake.\n") == len(bodies)


def test_ctrl_c_stops_the_answer_and_the_next_line_is_answered() -> None:
    with fake_engine("--prefill-seconds", "30") as engine, start(engine.base_url) as process:
        assert process.stdin is not None
        process.stdin.write(b"one\n")
        process.stdin.flush()
        engine.wait_for_requests(1)
        process.send_signal(signal.SIGINT)
        engine.wait_for_disconnect()
        process.stdin.write(b"two\n")
        process.stdin.flush()
        engine.wait_for_requests(2)
        assert spoken(engine.bodies()[1]) == [("user", "two")]
        # The second in a row, with no answer between them, leaves.
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=DEADLINE_SECONDS) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b"stopped; the question is taken back\n" * 2
