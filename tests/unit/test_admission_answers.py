"""Answers that are nothing but a thought (C14), in every dialect, whole and streamed, cut wherever one likes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimserve.admission.answers import MAX_KEPT_BYTES, Watch
from slimserve.admission.routes import Dialect

# What the model says may look like what the engine says.
QUOTE = 'he said "content":"x", "tool_calls":[{ and "finish_reason":"length"\n'


def event(data: object, name: str | None = None) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def chat_stream(*deltas: dict[str, Any], finish: str = "length", index: int = 0) -> bytes:
    def chunk(delta: dict[str, Any], reason: str | None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": {"content": [{"token": "a"}]}, "finish_reason": reason}
        return event({"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice]})

    parts = [{"role": "assistant", "content": ""}, *deltas]
    return b"".join(chunk(delta, finish if delta is parts[-1] else None) for delta in parts)


USAGE = event({"id": "c", "choices": [], "usage": {"completion_tokens": 8}}) + event("[DONE]")


def chat(message: dict[str, Any], finish: str = "length") -> bytes:
    first = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    second = {"index": 1, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return json.dumps({"choices": [first, second], "usage": {}}).encode()


def response(*items: dict[str, Any], status: str = "incomplete") -> dict[str, Any]:
    schema = {"type": "function", "name": "f", "parameters": {"properties": {"type": {"const": "output_text"}}}}
    return {"object": "response", "output": list(items), "status": status, "tools": [schema], "metadata": {"a": QUOTE}}


def response_stream(whole: dict[str, Any], name: str = "response.completed") -> bytes:
    begun = {**whole, "output": [], "status": "in_progress"}
    return (
        event({"response": begun, "type": "response.created"}, "response.created")
        + event({"delta": QUOTE, "type": "response.reasoning_text.delta"}, "response.reasoning_text.delta")
        + event({"response": whole, "type": name}, name)
    )


THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": QUOTE}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
BLANK = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "\n"}]}
CALL = {"type": "function_call", "name": "f", "arguments": "{}"}


def message(*blocks: dict[str, Any], stop: str = "max_tokens") -> bytes:
    return json.dumps({"type": "message", "content": list(blocks), "stop_reason": stop}).encode()


def message_stream(*events: dict[str, Any], stop: str = "max_tokens") -> bytes:
    begun = event({"type": "message_start", "message": {"content": [], "stop_reason": None}}, "message_start")
    ended = event({"type": "message_delta", "delta": {"stop_reason": stop}}, "message_delta")
    return begun + b"".join(event(each, each["type"]) for each in events) + ended


def block(**content: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "content_block": content, "index": 0}


def delta(**content: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "delta": content, "index": 0}


CALLS = [{"index": 0, "function": {"name": "f", "arguments": ""}}]
CASES: list[tuple[str, Dialect, bool, int, bytes, bool]] = [
    ("thought", Dialect.CHAT, False, 1, chat({"content": None, "reasoning": QUOTE}), True),
    ("blank", Dialect.CHAT, False, 1, chat({"content": " \n", "reasoning": QUOTE}), True),
    ("hidden", Dialect.CHAT, False, 1, chat({"content": None, "reasoning": None}), True),
    ("answer", Dialect.CHAT, False, 1, chat({"content": "x", "reasoning": QUOTE}), False),
    ("call", Dialect.CHAT, False, 1, chat({"content": None, "tool_calls": CALLS}), False),
    ("ended", Dialect.CHAT, False, 1, chat({"content": None, "reasoning": QUOTE}, "stop"), False),
    ("batch", Dialect.BATCH_CHAT, False, 2, chat({"content": None, "reasoning": QUOTE}), True),
    ("error", Dialect.CHAT, False, 1, b'{"error":{"message":"\\"length\\"","code":400}}', False),
    ("broken", Dialect.CHAT, False, 1, chat({"content": None})[:-9], False),
    ("no object", Dialect.CHAT, False, 1, b'["length"]', False),
    ("thought", Dialect.CHAT, True, 1, chat_stream({"reasoning": "a"}, {"reasoning": QUOTE}) + USAGE, True),
    ("older name", Dialect.CHAT, True, 1, chat_stream({"reasoning_content": QUOTE}) + USAGE, True),
    ("blank", Dialect.CHAT, True, 1, chat_stream({"reasoning": "a"}, {"content": "\n\n "}) + USAGE, True),
    ("hidden", Dialect.CHAT, True, 1, chat_stream({}, {}) + USAGE, True),
    ("answer", Dialect.CHAT, True, 1, chat_stream({"reasoning": "a"}, {"content": "\n\n"}, {"content": "\\n"}), False),
    ("quote", Dialect.CHAT, True, 1, chat_stream({"content": '"'}), False),
    ("call", Dialect.CHAT, True, 1, chat_stream({"reasoning": "a"}, {"tool_calls": CALLS}) + USAGE, False),
    ("ended", Dialect.CHAT, True, 1, chat_stream({"reasoning": QUOTE}, finish="stop") + USAGE, False),
    ("cut off", Dialect.CHAT, True, 1, chat_stream({"reasoning": "a"})[:-3], False),
    (
        "one of two",
        Dialect.CHAT,
        True,
        2,
        chat_stream({"content": "x"}) + chat_stream({"reasoning": QUOTE}, index=1) + USAGE,
        True,
    ),
    (
        "none of two",
        Dialect.CHAT,
        True,
        2,
        chat_stream({"content": "x"}) + chat_stream({"content": "x"}, index=1) + USAGE,
        False,
    ),
    ("completion", Dialect.COMPLETIONS, False, 1, b'{"choices":[{"text":"","finish_reason":"length"}]}', False),
    ("thought", Dialect.RESPONSES, False, 1, json.dumps(response(THOUGHT)).encode(), True),
    ("nothing", Dialect.RESPONSES, False, 1, json.dumps(response()).encode(), True),
    ("blank", Dialect.RESPONSES, False, 1, json.dumps(response(THOUGHT, BLANK)).encode(), True),
    ("answer", Dialect.RESPONSES, False, 1, json.dumps(response(THOUGHT, SAID)).encode(), False),
    ("call", Dialect.RESPONSES, False, 1, json.dumps(response(THOUGHT, CALL)).encode(), False),
    ("ended", Dialect.RESPONSES, False, 1, json.dumps(response(THOUGHT, status="completed")).encode(), False),
    ("thought", Dialect.RESPONSES, True, 1, response_stream(response(THOUGHT)), True),
    ("other end", Dialect.RESPONSES, True, 1, response_stream(response(THOUGHT), "response.incomplete"), True),
    ("answer", Dialect.RESPONSES, True, 1, response_stream(response(THOUGHT, SAID)), False),
    ("failed", Dialect.RESPONSES, True, 1, response_stream(response(THOUGHT), "response.failed"), False),
    ("thought", Dialect.ANTHROPIC, False, 1, message({"type": "thinking", "thinking": QUOTE}), True),
    ("answer", Dialect.ANTHROPIC, False, 1, message({"type": "text", "text": "x"}), False),
    ("call", Dialect.ANTHROPIC, False, 1, message({"type": "tool_use", "input": {"stop_reason": "max_tokens"}}), False),
    ("ended", Dialect.ANTHROPIC, False, 1, message({"type": "thinking", "thinking": QUOTE}, stop="end_turn"), False),
    (
        "thought",
        Dialect.ANTHROPIC,
        True,
        1,
        message_stream(block(type="thinking", thinking=""), delta(type="thinking_delta", thinking=QUOTE)),
        True,
    ),
    ("blank", Dialect.ANTHROPIC, True, 1, message_stream(delta(type="text_delta", text="\n\n")), True),
    ("answer", Dialect.ANTHROPIC, True, 1, message_stream(delta(type="text_delta", text=QUOTE)), False),
    ("call", Dialect.ANTHROPIC, True, 1, message_stream(block(type="tool_use", id="t", name="f")), False),
    (
        "ended",
        Dialect.ANTHROPIC,
        True,
        1,
        message_stream(delta(type="thinking_delta", thinking='"stop_reason":"max_tokens"'), stop="end_turn"),
        False,
    ),
]
IDS = [f"{case[1].value}-{'stream' if case[2] else 'whole'}-{case[0]}" for case in CASES]


def verdict(dialect: Dialect, streamed: bool, count: int, pieces: list[bytes]) -> bool:
    watch = Watch(dialect, streamed, count)
    for piece in pieces:
        watch.feed(piece)
    return watch.exhausted


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_thought_without_an_answer_is_seen(case: tuple[str, Dialect, bool, int, bytes, bool]) -> None:
    _, dialect, streamed, count, body, exhausted = case
    assert verdict(dialect, streamed, count, [body]) is exhausted


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_one_byte_at_a_time_is_the_same(case: tuple[str, Dialect, bool, int, bytes, bool]) -> None:
    _, dialect, streamed, count, body, exhausted = case
    assert verdict(dialect, streamed, count, [body[i : i + 1] for i in range(len(body))]) is exhausted


@given(st.sampled_from(CASES), st.lists(st.integers(0, 4000), max_size=12))
def test_wherever_it_is_cut(case: tuple[str, Dialect, bool, int, bytes, bool], cuts: list[int]) -> None:
    _, dialect, streamed, count, body, exhausted = case
    ends = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    pieces = [body[a:b] for a, b in itertools.pairwise(ends)]
    assert b"".join(pieces) == body
    assert verdict(dialect, streamed, count, pieces) is exhausted


@given(st.text(max_size=60), st.booleans())
def test_no_word_of_the_model_is_taken_for_one_of_the_engine(text: str, answered: bool) -> None:
    said = [{"content": "x"}] if answered else []
    body = chat_stream({"reasoning": "a" + text}, *said) + USAGE
    assert verdict(Dialect.CHAT, True, 1, [body]) is not answered
    body = message_stream(
        delta(type="thinking_delta", thinking=text), *([delta(type="text_delta", text="x")] if answered else [])
    )
    assert verdict(Dialect.ANTHROPIC, True, 1, [body]) is not answered


def test_what_is_far_too_long_for_a_thought_is_let_go() -> None:
    watch = Watch(Dialect.CHAT, streamed=False)
    for _ in range(MAX_KEPT_BYTES // (1 << 20) + 1):
        watch.feed(b" " * (1 << 20))
    watch.feed(chat({"content": None}))
    assert not watch.exhausted


def test_the_whole_answer_may_come_late() -> None:
    body = chat({"content": None})
    watch = Watch(Dialect.CHAT, streamed=False)
    watch.feed(body[:-1])
    assert not watch.exhausted
    watch.feed(body[-1:])
    assert watch.exhausted
