"""What requests may ask for, through the door, with the real engine behind it: every dialect, nothing ends in a 500."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_thinker
from server_support import KEY, PROFILE, Server
from tiny_thinker import EFFORT_TOKENS, END_OF_THOUGHT, MAX_MODEL_LEN, NAME, Answer, Engine

from slimserve.admission.config import Config
from slimserve.admission.notes import Note
from slimserve.admission.routes import Dialect
from slimserve.engine.command import FIXED, flags

CAP = 6
EFFORTS = {"low": "low", "medium": "medium", "xhigh": "xhigh", "minimal": "low", "high": "xhigh", "max": "xhigh"}
MESSAGES = [{"role": "user", "content": "hi"}]
HUGE = 10**30

# path, body, the field that bounds the answer
FORMS: dict[Dialect, tuple[str, dict[str, Any], str]] = {
    Dialect.CHAT: ("/v1/chat/completions", {"messages": MESSAGES}, "max_tokens"),
    Dialect.COMPLETIONS: ("/v1/completions", {"prompt": "hi"}, "max_tokens"),
    Dialect.RESPONSES: ("/v1/responses", {"input": "hi"}, "max_output_tokens"),
    Dialect.ANTHROPIC: ("/v1/messages", {"messages": MESSAGES}, "max_tokens"),
    Dialect.BATCH_CHAT: ("/v1/chat/completions/batch", {"messages": [MESSAGES]}, "max_tokens"),
}
TEMPLATED = [dialect for dialect in Dialect if dialect is not Dialect.COMPLETIONS]


def ask(engine: Engine, dialect: Dialect, **fields: Any) -> Answer:
    path, body, bound = FORMS[dialect]
    return engine.post(path, {"model": engine.model, **body, bound: 8, **fields})


def reason(answer: Answer) -> str:
    """The message of an error, which is in the dialect's own form."""
    assert 400 <= answer.status < 500, (answer.status, answer.body)
    message = answer.data["error"]["message"]
    assert message
    assert "Traceback" not in message
    return str(message)


BACKEND = [part for name, value, _ in FIXED if name == "structured_outputs_config" for part in flags(name, value)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A thinking model behind a door that keeps it thinking."""
    home = tmp_path_factory.mktemp("thinker")
    tiny_thinker.make(home / "model")
    door = Config(max_in_flight=CAP, max_model_len=MAX_MODEL_LEN, thinking="keep", efforts=EFFORTS)
    # The parser of the larger models needs a package that is left out of a CPU install; this one reads the same tokens.
    more = ("--max-model-len", str(MAX_MODEL_LEN), "--reasoning-parser", "deepseek_r1")
    with tiny_thinker.serving(home / "model", home, door, *more, *BACKEND) as started:
        yield started


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0.001}, {"min_p": 1}], ids=json.dumps)
@pytest.mark.parametrize("dialect", Dialect)
def test_greedy_requests_are_sampled(engine: Engine, dialect: Dialect, fields: dict[str, Any]) -> None:
    answers = [ask(engine, dialect, **{FORMS[dialect][2]: 32}, **fields) for _ in range(3)]
    for answer in answers:
        assert answer.status == 200, answer.body
        assert Note.GREEDY_REPLACED.text in answer.headers["x-slimserve-note"]
    said = {tuple(_words(answer.data)) for answer in answers}
    assert any(map(any, said))
    assert len(said) > 1, "32 tokens at the default temperature came out the same each time"


def _words(data: Any) -> list[str]:
    """Everything that the model said, wherever the dialect has it."""
    if isinstance(data, list):
        return [word for part in data for word in _words(part)]
    if not isinstance(data, dict):
        return []
    own = [data[key] for key in ("text", "thinking", "reasoning", "content") if isinstance(data.get(key), str)]
    return own + [word for part in data.values() for word in _words(part)]


def test_beam_search_is_sampled(engine: Engine) -> None:
    answer = ask(engine, Dialect.COMPLETIONS, use_beam_search=True, n=2)
    assert (answer.status, len(answer.data["choices"])) == (200, 2)
    assert Note.GREEDY_REPLACED.text in answer.headers["x-slimserve-note"]


OFF: list[dict[str, Any]] = [
    {"reasoning_effort": "none"},
    {"reasoning": {"effort": "none"}},
    {"output_config": {"effort": "none"}},
    {"thinking": {"type": "disabled"}},
    {"enable_thinking": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"reasoning_effort": "none"}},
    {"thinking_token_budget": 0},
]


@pytest.mark.parametrize("fields", OFF, ids=json.dumps)
@pytest.mark.parametrize("dialect", TEMPLATED)
def test_the_prompt_is_that_of_a_thinking_model(engine: Engine, dialect: Dialect, fields: dict[str, Any]) -> None:
    plain, asked = ask(engine, dialect), ask(engine, dialect, **fields)
    assert asked.status == 200, asked.body
    assert asked.prompt_tokens == plain.prompt_tokens
    assert Note.THINKING_KEPT.text in asked.headers["x-slimserve-note"]
    assert "x-slimserve-note" not in plain.headers or plain.headers["x-slimserve-note"] == Note.THINKING_EXHAUSTED.text


PLACES = ["reasoning_effort", "reasoning.effort", "output_config.effort", "chat_template_kwargs.reasoning_effort"]


def placed(place: str, word: object) -> dict[str, Any]:
    outer, _, inner = place.partition(".")
    return {outer: {inner: word}} if inner else {outer: word}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dialect", TEMPLATED)
def test_every_effort_reaches_the_template(engine: Engine, dialect: Dialect, place: str) -> None:
    plain = ask(engine, dialect).prompt_tokens - EFFORT_TOKENS["low"]
    for word, meaning in EFFORTS.items():
        answer = ask(engine, dialect, **placed(place, word))
        assert answer.status == 200, (word, answer.body)
        assert answer.prompt_tokens - plain == EFFORT_TOKENS[meaning], word


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dialect", TEMPLATED)
def test_an_effort_that_the_template_does_not_know_is_a_400(engine: Engine, dialect: Dialect, place: str) -> None:
    for word in ("ultra", "", 3, ["low"]):
        answer = ask(engine, dialect, **placed(place, word))
        assert answer.status == 400
        assert "Accepted: high, low, max, medium, minimal, xhigh." in reason(answer)


WRONG: list[tuple[str, list[Any]]] = [
    ("temperature", [-1, 2.5, "0", False, HUGE, [1]]),
    ("top_p", [0, 1.5, -1, "x"]),
    ("top_k", [-2, HUGE, 1.5, "1"]),
    ("min_p", [-0.1, 2, True]),
    ("presence_penalty", [5, "x"]),
    ("frequency_penalty", [-5, {}]),
    ("repetition_penalty", [0, -1, 1e308, 1e-300]),
    ("seed", [HUGE, -HUGE, 0.5, "x"]),
    ("min_tokens", [-1, HUGE]),
    ("stream_interval", [0, HUGE]),
    ("thinking_token_budget", [-2, HUGE, True]),
    ("kv_transfer_params", [{"prompt_token_ids": [1]}]),
]


@pytest.mark.parametrize(("field", "values"), WRONG, ids=[field for field, _ in WRONG])
@pytest.mark.parametrize("dialect", Dialect)
def test_a_wrong_value_is_a_400_that_names_it(engine: Engine, dialect: Dialect, field: str, values: list[Any]) -> None:
    for value in values:
        answer = ask(engine, dialect, **{field: value})
        assert answer.status == 400, (value, answer.body)
        assert field in reason(answer)


# What the engine refuses by itself: some of it in one dialect only, and never with a 500.
LEFT: list[dict[str, Any]] = [
    {"stop_token_ids": [HUGE]},
    {"allowed_token_ids": [HUGE]},
    {"allowed_token_ids": []},
    {"logit_bias": {str(HUGE): 1}},
    {"logit_bias": {"999999": 1}},
    {"bad_words": [""]},
    {"stop": [""]},
    {"logprobs": HUGE},
    {"logprobs": True, "top_logprobs": HUGE},
    {"prompt_logprobs": HUGE},
    {"truncate_prompt_tokens": HUGE},
    {"priority": HUGE},
    {"vllm_xargs": {"a": HUGE}},
    {"structured_outputs": {"regex": "((("}},
    {"response_format": {"type": "nonsense"}},
    {"tools": [{}]},
    {"tool_choice": "required"},
    {"chat_template": "{{ 1 }}"},
    {"chat_template_kwargs": {"messages": []}},
    {"reasoning": "x"},
    {"thinking": {"type": "enabled", "budget_tokens": 1}},
    {"model": "nobody/nothing"},
    {"model": None},
    {"messages": [], "prompt": [], "input": []},
    {"messages": "x", "prompt": {}, "input": 1},
    {"prompt": [HUGE], "messages": [{}], "input": [{}]},
    {"prompt": [-1], "messages": [{"role": "user"}], "input": [{"type": "nonsense"}]},
    {"prompt": [99999], "messages": [[]], "input": [None]},
    {"min_tokens": 100},
    {"documents": 1},
    {"echo": "x"},
    {"request_id": "a\r\nb: c"},
    {"cache_salt": ""},
    {"previous_response_id": "nothing"},
    {"stream_options": {}},
]


@pytest.mark.parametrize("fields", LEFT, ids=lambda fields: json.dumps(fields)[:50])
@pytest.mark.parametrize("dialect", Dialect)
def test_whatever_else_is_wrong_has_a_reason_or_an_answer(
    engine: Engine, dialect: Dialect, fields: dict[str, Any]
) -> None:
    answer = ask(engine, dialect, **fields)
    if answer.status != 200:
        reason(answer)


SCHEMAS: list[Any] = [
    {"type": "array", "minItems": 1_000_000_000},
    {"$ref": "#"},
    {"type": "object", "minProperties": 1000},
    {"type": "string", "pattern": "\\p{L}+(?<n>x)"},
    {"type": "number", "multipleOf": 7},
]


def grammars(dialect: Dialect) -> Iterator[tuple[str, dict[str, Any]]]:
    """Grammars that the engine cannot follow, by the field that has to be named."""
    for schema in SCHEMAS:
        if dialect is Dialect.RESPONSES:
            yield "text", {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
        elif dialect is Dialect.ANTHROPIC:
            yield "output_config", {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        else:
            named = {"name": "x", "schema": schema}
            yield "response_format", {"response_format": {"type": "json_schema", "json_schema": named}}
    if dialect in (Dialect.CHAT, Dialect.COMPLETIONS, Dialect.BATCH_CHAT):
        for form in (
            {"regex": "\\p{L}+(?<n>x)"},
            {"grammar": "root ::= root"},
            {"grammar": "root ::= root root | root"},
            {"json": {"$ref": "#"}},
        ):
            yield "", {"structured_outputs": form}


@pytest.mark.parametrize("dialect", Dialect)
def test_the_engine_s_refusals_have_the_documented_forms(engine: Engine, dialect: Dialect) -> None:
    long = [{"role": "user", "content": "a " * MAX_MODEL_LEN}]
    texts: dict[Dialect, dict[str, Any]] = {
        Dialect.COMPLETIONS: {"prompt": "a " * MAX_MODEL_LEN},
        Dialect.RESPONSES: {"input": "a " * MAX_MODEL_LEN},
        Dialect.BATCH_CHAT: {"messages": [long]},
    }
    too_long = ask(engine, dialect, **texts.get(dialect, {"messages": long}))
    unknown = ask(engine, dialect, model="nobody/nothing")
    assert (too_long.status, unknown.status) == (400, 404)
    if dialect is Dialect.ANTHROPIC:
        kinds = [answer.data["error"]["type"] for answer in (too_long, unknown)]
        assert kinds == ["invalid_request_error", "not_found_error"]
        return
    assert too_long.data["error"]["type"] == "invalid_request_error"
    assert too_long.data["error"]["code"] == "context_length_exceeded"
    assert unknown.data["error"]["type"] == "not_found_error"
    assert unknown.data["error"]["code"] == "model_not_found"


def test_a_wrong_field_is_named_in_a_sentence(engine: Engine) -> None:
    message = reason(ask(engine, Dialect.ANTHROPIC, max_tokens=8, system=3))
    assert message.startswith("system")
    assert "'loc'" not in message
    assert "validation error" not in message


def test_the_log_has_what_was_changed_and_no_traceback_for_a_client_s_error(engine: Engine) -> None:
    before = len(engine.log.read_text())
    assert ask(engine, Dialect.ANTHROPIC, temperature=0).status == 200
    assert ask(engine, Dialect.ANTHROPIC, model="nobody/nothing").status == 404
    long = [{"role": "user", "content": "a " * MAX_MODEL_LEN}]
    assert ask(engine, Dialect.ANTHROPIC, messages=long).status == 400
    said = engine.log.read_text()[before:]
    assert "anthropic of anybody: greedy_replaced" in said
    assert "Error in create_messages: This model's maximum context length" in said
    assert "Traceback" not in said


def test_few_count_tokens_at_once_and_generation_goes_on(engine: Engine) -> None:
    text = "hello " * ((MAX_MODEL_LEN * 16 + (60 << 10)) // 6)
    done = threading.Event()
    statuses: list[int] = []

    def count() -> None:
        while not done.is_set():
            statuses.append(engine.post("/tokenize", {"model": NAME, "prompt": text}).status)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        assert ask(engine, Dialect.CHAT).status == 200
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert set(statuses) <= {200, 429}
    assert 200 in statuses


@pytest.mark.parametrize("dialect", Dialect)
def test_more_output_than_the_context_is_a_400_with_both_figures(engine: Engine, dialect: Dialect) -> None:
    field = FORMS[dialect][2]
    for value in (MAX_MODEL_LEN + 1, HUGE, "8", -1):
        answer = ask(engine, dialect, **{field: value})
        assert answer.status == 400, (value, answer.body)
        assert field in reason(answer)
    message = reason(ask(engine, dialect, **{field: MAX_MODEL_LEN + 1}))
    assert str(MAX_MODEL_LEN + 1) in message
    assert str(MAX_MODEL_LEN) in message.replace(str(MAX_MODEL_LEN + 1), "")


def test_as_many_sequences_as_there_are_slots(engine: Engine) -> None:
    assert len(ask(engine, Dialect.CHAT, n=CAP).data["choices"]) == CAP
    assert len(ask(engine, Dialect.COMPLETIONS, prompt=["a", "b"], n=CAP // 2).data["choices"]) == CAP
    assert len(ask(engine, Dialect.BATCH_CHAT, messages=[MESSAGES] * CAP).data["choices"]) == CAP
    for answer in (
        ask(engine, Dialect.CHAT, n=CAP + 1),
        ask(engine, Dialect.CHAT, n=HUGE),
        ask(engine, Dialect.CHAT, n="2"),
        ask(engine, Dialect.COMPLETIONS, prompt=["a", "b"], n=CAP),
        ask(engine, Dialect.BATCH_CHAT, messages=[MESSAGES] * (CAP + 1)),
        ask(engine, Dialect.COMPLETIONS, best_of=5),
    ):
        assert answer.status == 400, answer.body
        reason(answer)


WAYS = [(dialect, streamed) for dialect in TEMPLATED for streamed in (False, True)]
WAYS.remove((Dialect.BATCH_CHAT, True))  # the engine does not stream batches


@pytest.mark.parametrize(("dialect", "streamed"), WAYS)
def test_a_thought_that_ate_the_budget_is_seen(engine: Engine, dialect: Dialect, streamed: bool) -> None:
    # Hardly warm, the model repeats the token that opened its thought.
    answer = ask(engine, dialect, stream=streamed, temperature=0.06)
    assert answer.status == 200, answer.body
    where = answer.body.decode() if streamed else answer.headers["x-slimserve-note"]
    assert Note.THINKING_EXHAUSTED.text in where


@pytest.mark.parametrize(("dialect", "streamed"), [way for way in WAYS if way[0] is not Dialect.ANTHROPIC])
def test_an_answer_after_the_thought_is_not_taken_for_one(engine: Engine, dialect: Dialect, streamed: bool) -> None:
    # The token that ends a thought comes first and again and again; the later ones are text.
    answer = ask(engine, dialect, stream=streamed, logit_bias={str(END_OF_THOUGHT): 100})
    assert answer.status == 200, answer.body
    assert b"</think>" in answer.body
    assert Note.THINKING_EXHAUSTED.text not in answer.body.decode()
    assert Note.THINKING_EXHAUSTED.text not in answer.headers.get("x-slimserve-note", "")


@pytest.fixture
def plain(server: Server) -> Engine:
    """A model that does not think, the default profile's: a grammar rules it from its first token on."""
    return Engine(server.port, server.engine_log, PROFILE, KEY)


@pytest.mark.parametrize("dialect", Dialect)
def test_a_grammar_that_cannot_be_followed_is_a_400(plain: Engine, dialect: Dialect) -> None:
    for field, fields in grammars(dialect):
        answer = ask(plain, dialect, **fields)
        assert answer.status == 400, (fields, answer.status, answer.body)
        assert answer.data["error"]["type"] == "invalid_request_error"
        if dialect is not Dialect.ANTHROPIC and answer.data["error"]["code"] != "refused_by_engine":
            assert str(answer.data["error"]["param"]).startswith(field), answer.body
    answer = ask(plain, dialect)
    assert answer.status == 200, answer.body


def test_a_grammar_that_can_be_followed_still_is(plain: Engine) -> None:
    answer = ask(plain, Dialect.COMPLETIONS, structured_outputs={"choice": ["yes"]})
    assert answer.data["choices"][0]["text"] == "yes"


def test_what_the_profile_does_not_carry_is_said_without_a_flag(plain: Engine) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    for fields in ({"tools": [tool]}, {"thinking_token_budget": 100}):
        message = reason(ask(plain, Dialect.CHAT, **fields))
        assert "this profile" in message
        assert "--" not in message


def test_a_model_that_does_not_think_takes_any_effort(plain: Engine) -> None:
    for dialect in TEMPLATED:
        bound = {FORMS[dialect][2]: 1}
        tokens = ask(plain, dialect, **bound).prompt_tokens
        for fields in [*OFF, *(placed(place, word) for place in PLACES for word in ("minimal", "high", "ultra"))]:
            answer = ask(plain, dialect, **fields, **bound)
            if answer.status == 200:
                assert answer.prompt_tokens == tokens, fields
            else:
                reason(answer)
        for word in ("low", "medium", "high", "none"):
            assert ask(plain, dialect, reasoning_effort=word, **bound).status == 200
