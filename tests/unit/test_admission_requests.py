"""What becomes of a request: greedy sampling, thinking, efforts, numbers, counts."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimserve.admission.config import Config
from slimserve.admission.notes import Note
from slimserve.admission.rejection import Rejected
from slimserve.admission.requests import Judged, judge
from slimserve.admission.routes import Dialect
from slimserve.admission.sampling import GREEDY_MIN_P, RECIPE

EFFORTS = {"low": "low", "medium": "medium", "xhigh": "xhigh", "minimal": "low", "high": "xhigh", "max": "xhigh"}
PLAIN = Config(max_in_flight=12, max_model_len=4096)
THINKING = Config(max_in_flight=12, max_model_len=4096, thinking="keep", efforts=EFFORTS)
REFUSING = Config(max_in_flight=12, max_model_len=4096, greedy="refuse", thinking="refuse", efforts=EFFORTS)
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[Dialect, dict[str, Any]] = {
    Dialect.CHAT: {"model": "m", "messages": MESSAGES},
    Dialect.COMPLETIONS: {"model": "m", "prompt": "hi"},
    Dialect.RESPONSES: {"model": "m", "input": "hi"},
    Dialect.ANTHROPIC: {"model": "m", "messages": MESSAGES, "max_tokens": 100},
    Dialect.BATCH_CHAT: {"model": "m", "messages": [MESSAGES, MESSAGES]},
}
TEMPLATED = [dialect for dialect in Dialect if dialect is not Dialect.COMPLETIONS]
CHATS = [Dialect.CHAT, Dialect.BATCH_CHAT]


def judged(dialect: Dialect, config: Config = THINKING, **fields: Any) -> Judged:
    body = {**BODIES[dialect], **fields}
    before = copy.deepcopy(body)
    result = judge(dialect, body, config)
    assert body == before, "the caller's body was changed"
    assert result.changed == (result.body != before)
    assert bool(result.notes) == result.changed
    return result


def refused(dialect: Dialect, config: Config = THINKING, **fields: Any) -> Rejected:
    with pytest.raises(Rejected) as caught:
        judge(dialect, {**BODIES[dialect], **fields}, config)
    assert caught.value.status == 400
    assert caught.value.message.isascii()
    return caught.value


@pytest.mark.parametrize("dialect", Dialect)
def test_a_name_longer_than_any_is_refused_and_not_repeated(dialect: Dialect) -> None:
    long = "/a" * 200
    with pytest.raises(Rejected) as caught:
        judge(dialect, {**BODIES[dialect], "model": long}, PLAIN)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    assert "400 characters" in caught.value.message
    assert long not in caught.value.message
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    named = {"type": "function", "function": {"name": long}}
    for field, value in (
        ("tools", [tool, named]),
        ("tools", [{"name": long, "input_schema": {}}]),
        ("tools", [{"type": long}]),
        ("tool_choice", named),
        ("tool_choice", {"type": "tool", "name": long}),
        ("tool_choice", long),
    ):
        error = refused(dialect, PLAIN, **{field: value})
        assert (error.code, error.param) == ("invalid_value", field)
    judged(dialect, PLAIN, model="m" * 256, tools=[tool], tool_choice=named | {"function": {"name": "f" * 256}})
    judged(dialect, PLAIN, model=None, tools=["f", 3, None, {"function": "f"}], tool_choice=3)


# Greedy sampling (C15).

GREEDY = [
    {"temperature": 0},
    {"temperature": 0.0},
    {"temperature": 0.049},
    {"temperature": -0.0},
    {"top_k": 1},
    {"top_k": 1.0},
    {"top_p": 0.01},
    {"top_p": 5e-324},
    {"min_p": 1},
    {"min_p": GREEDY_MIN_P},
    {"temperature": 0, "top_p": 0.9, "top_k": 40, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 1},
]
FREE = [
    {},
    {"temperature": 0.05},
    {"temperature": 2},
    {"top_k": 0},
    {"top_k": -1},
    {"top_k": 2},
    {"top_p": 0.1},
    {"top_p": 1},
    {"min_p": 0},
    {"min_p": 0.89},
    {"use_beam_search": False},
    {"temperature": None, "top_k": None, "top_p": None, "min_p": None, "use_beam_search": None},
]


@pytest.mark.parametrize("fields", GREEDY, ids=json.dumps)
@pytest.mark.parametrize("dialect", Dialect)
def test_greedy_sampling_gives_way_to_the_defaults_as_a_whole(dialect: Dialect, fields: dict[str, Any]) -> None:
    result = judged(dialect, seed=7, repetition_penalty=1.1, **fields)
    assert result.notes == (Note.GREEDY_REPLACED,)
    assert not set(RECIPE) & set(result.body)
    assert result.body == {**BODIES[dialect], "seed": 7, "repetition_penalty": 1.1}


@pytest.mark.parametrize("fields", FREE, ids=json.dumps)
@pytest.mark.parametrize("dialect", Dialect)
def test_sampling_that_is_not_greedy_is_left_alone(dialect: Dialect, fields: dict[str, Any]) -> None:
    assert judged(dialect, **fields).notes == ()


@pytest.mark.parametrize("fields", GREEDY, ids=json.dumps)
def test_greedy_sampling_is_refused_where_the_profile_says_so(fields: dict[str, Any]) -> None:
    error = refused(Dialect.CHAT, REFUSING, **fields)
    assert (error.code, error.param) == ("greedy_refused", error.message.split(" ")[0])
    assert error.param in fields


@pytest.mark.parametrize("fields", [*GREEDY, {"use_beam_search": True, "n": 2}], ids=json.dumps)
def test_verification_lets_greedy_through_untouched(fields: dict[str, Any]) -> None:
    config = Config(max_in_flight=12, max_model_len=4096, greedy="verification")
    assert judged(Dialect.CHAT, config, **fields).notes == ()


def test_beam_search_is_greedy_and_its_width_still_counts() -> None:
    result = judged(Dialect.COMPLETIONS, use_beam_search=True, n=3, temperature=0.7)
    assert (result.notes, result.count) == ((Note.GREEDY_REPLACED,), 3)
    assert result.body == {**BODIES[Dialect.COMPLETIONS], "n": 3}


@pytest.mark.parametrize("value", ["true", 1, "yes", []])
def test_beam_search_is_true_or_false_and_no_other_word_for_it(value: object) -> None:
    assert refused(Dialect.CHAT, use_beam_search=value).param == "use_beam_search"


# Values that are wrong in themselves.

WRONG = [
    ("temperature", -0.01),
    ("temperature", 2.01),
    ("temperature", "0"),
    ("temperature", False),
    ("temperature", float("inf")),
    ("temperature", 10**400),
    ("temperature", [0]),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", True),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", "1"),
    ("top_k", 10**30),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e308),
    ("presence_penalty", 2.1),
    ("frequency_penalty", "x"),
    ("seed", 1 << 63),
    ("seed", "1"),
    ("seed", 0.5),
    ("min_tokens", -1),
    ("min_tokens", 10**30),
    ("stream_interval", 0),
    ("stream_interval", 10**30),
    ("thinking_token_budget", -2),
    ("thinking_token_budget", True),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=[f"{field}-{str(value)[:12]}" for field, value in WRONG])
@pytest.mark.parametrize("dialect", Dialect)
def test_a_wrong_value_is_refused_before_it_is_called_greedy(dialect: Dialect, field: str, value: object) -> None:
    for config in (PLAIN, THINKING, REFUSING):
        error = refused(dialect, config, **{field: value})
        assert (error.code, error.param) == ("invalid_value", field)
        assert "it must be a" in error.message
        assert len(error.message) < 200


@pytest.mark.parametrize(
    ("dialect", "field"),
    [
        (Dialect.CHAT, "max_tokens"),
        (Dialect.CHAT, "max_completion_tokens"),
        (Dialect.BATCH_CHAT, "max_tokens"),
        (Dialect.COMPLETIONS, "max_tokens"),
        (Dialect.RESPONSES, "max_output_tokens"),
        (Dialect.ANTHROPIC, "max_tokens"),
    ],
)
def test_more_output_than_the_context_is_refused_with_both_figures(dialect: Dialect, field: str) -> None:
    assert judged(dialect, **{field: 4096}).notes == ()
    error = refused(dialect, **{field: 4097})
    assert "4097" in error.message
    assert "4096" in error.message
    assert (error.code, error.param) == ("context_length_exceeded", field)
    for value in (-1, "5", True, 1.5, 10**40):
        assert refused(dialect, **{field: value}).param == field


@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params", "background"])
def test_what_reaches_past_the_door_is_not_served(field: str) -> None:
    assert refused(Dialect.RESPONSES, **{field: {"prompt_token_ids": [1]}}).param == field
    assert judged(Dialect.RESPONSES, **{field: None}).notes == ()


# Slots.

COUNTS: list[tuple[Dialect, dict[str, Any], int]] = [
    (Dialect.CHAT, {}, 1),
    (Dialect.CHAT, {"n": None}, 1),
    (Dialect.CHAT, {"n": 3}, 3),
    (Dialect.CHAT, {"n": 3.0, "best_of": 3}, 3),
    (Dialect.COMPLETIONS, {"prompt": "ab"}, 1),
    (Dialect.COMPLETIONS, {"prompt": [1, 2, 3]}, 1),
    (Dialect.COMPLETIONS, {"prompt": ["a", "b"], "n": 4}, 8),
    (Dialect.COMPLETIONS, {"prompt": [[1, 2], [3], [4]]}, 3),
    (Dialect.COMPLETIONS, {"prompt": []}, 1),
    (Dialect.COMPLETIONS, {"prompt": None, "prompt_embeds": ["a", "b"]}, 2),
    (Dialect.BATCH_CHAT, {}, 2),
    (Dialect.BATCH_CHAT, {"messages": "x"}, 1),
    (Dialect.RESPONSES, {}, 1),
    (Dialect.ANTHROPIC, {}, 1),
]


@pytest.mark.parametrize(("dialect", "fields", "count"), COUNTS)
def test_each_generated_sequence_counts(dialect: Dialect, fields: dict[str, Any], count: int) -> None:
    assert judged(dialect, **fields).count == count


@pytest.mark.parametrize(
    ("dialect", "fields", "param"),
    [
        (Dialect.CHAT, {"n": 13}, "n"),
        (Dialect.CHAT, {"n": 1 << 30}, "n"),
        (Dialect.COMPLETIONS, {"prompt": ["a"] * 4, "n": 4}, "prompt"),
        (Dialect.COMPLETIONS, {"prompt": ["a"] * 13}, "prompt"),
        (Dialect.BATCH_CHAT, {"messages": [MESSAGES] * 13}, "messages"),
    ],
)
def test_more_sequences_than_slots_can_never_run(dialect: Dialect, fields: dict[str, Any], param: str) -> None:
    error = refused(dialect, **fields)
    assert (error.code, error.param) == ("too_many_sequences", param)
    assert "at most 12" in error.message


@pytest.mark.parametrize("n", [0, -1, "2", True, 2.5, 10**100, [2]])
def test_n_is_a_number_from_one(n: object) -> None:
    assert refused(Dialect.CHAT, n=n).param == "n"


def test_best_of_is_not_ignored() -> None:
    assert refused(Dialect.COMPLETIONS, n=2, best_of=5).param == "best_of"


# Thinking.

SWITCHES: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"enable_thinking": 0, "x": 1}},
    {"chat_template_kwargs": {"enable_thinking": None}},
    {"chat_template_kwargs": {"thinking": False}},
    {"chat_template_kwargs": {"reasoning_effort": "none"}},
    {"reasoning_effort": "none"},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False}},
    {"output_config": {"effort": "none"}},
    {"thinking": {"type": "disabled"}},
    {"thinking": False},
    {"thinking_token_budget": 0},
    {"thinking_token_budget": 63},
]


def kwargs_of(result: Judged) -> dict[str, Any]:
    found: dict[str, Any] = result.body["chat_template_kwargs"]
    return found


@pytest.mark.parametrize("fields", SWITCHES, ids=json.dumps)
@pytest.mark.parametrize("dialect", TEMPLATED)
def test_thinking_stays_on(dialect: Dialect, fields: dict[str, Any]) -> None:
    result = judged(dialect, **fields)
    assert result.notes == (Note.THINKING_KEPT,)
    assert kwargs_of(result)["enable_thinking"] is True
    rest = json.dumps({key: value for key, value in result.body.items() if key != "chat_template_kwargs"})
    assert not any(word in rest for word in ("none", "disabled", "false", "budget"))
    again = judge(dialect, result.body, THINKING)
    assert not again.changed, "what was settled once is settled"


@pytest.mark.parametrize("fields", SWITCHES, ids=json.dumps)
@pytest.mark.parametrize("dialect", TEMPLATED)
def test_thinking_off_is_refused_where_the_profile_says_so(dialect: Dialect, fields: dict[str, Any]) -> None:
    error = refused(dialect, REFUSING, **fields)
    assert error.code == "thinking_refused"
    assert error.param is not None
    assert error.param.split(".")[0] in fields


@pytest.mark.parametrize("fields", SWITCHES, ids=json.dumps)
@pytest.mark.parametrize("dialect", Dialect)
def test_a_model_that_does_not_think_gets_the_request_as_it_is(dialect: Dialect, fields: dict[str, Any]) -> None:
    if "thinking_token_budget" in fields:
        # The engine would name flags that nobody can set.
        assert refused(dialect, PLAIN, **fields).code == "unsupported_field"
    else:
        assert judged(dialect, PLAIN, **fields).notes == ()


def test_thinking_is_not_asked_of_a_model_that_does_not_think() -> None:
    error = refused(Dialect.ANTHROPIC, PLAIN, thinking={"type": "enabled", "budget_tokens": 1024})
    assert (error.code, error.param) == ("unsupported_field", "thinking")
    assert judged(Dialect.ANTHROPIC, PLAIN, thinking={"type": "adaptive"}).notes == ()
    assert judged(Dialect.ANTHROPIC, thinking={"type": "enabled", "budget_tokens": 1024}).notes == ()


TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("dialect", TEMPLATED)
def test_tools_are_refused_where_the_engine_cannot_call_them(dialect: Dialect) -> None:
    without = dataclasses.replace(PLAIN, tools=False)
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}, {"tool_choice": {"type": "any"}}):
        error = refused(dialect, without, tools=TOOLS, **choice)
        assert error.param == "tools"
        assert "does not carry tool calling" in error.message
    for fields in ({"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        assert judged(dialect, without, **fields).notes == ()
    assert judged(dialect, PLAIN, tools=TOOLS).notes == ()


def test_no_response_is_kept() -> None:
    error = refused(Dialect.RESPONSES, previous_response_id="resp_1")
    assert error.param == "previous_response_id"
    assert "no response is stored" in error.message
    assert judged(Dialect.RESPONSES, store=True).notes == ()


def test_the_other_arguments_of_the_template_stay() -> None:
    result = judged(Dialect.CHAT, chat_template_kwargs={"enable_thinking": False, "tone": "dry"})
    assert kwargs_of(result) == {"enable_thinking": True, "tone": "dry"}


def test_a_prompt_without_a_template_is_only_asked_for_its_budget() -> None:
    result = judged(Dialect.COMPLETIONS, thinking_token_budget=0, chat_template_kwargs={"enable_thinking": False})
    assert result.notes == (Note.THINKING_KEPT,)
    assert "thinking_token_budget" not in result.body


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 64},
        {"thinking_token_budget": -1},
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": None},
        {"enable_thinking": True},
        {"include_reasoning": False},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("dialect", TEMPLATED)
def test_what_leaves_thinking_on_is_left_alone(dialect: Dialect, fields: dict[str, Any]) -> None:
    assert judged(dialect, **fields).notes == ()


@pytest.mark.parametrize("dialect", CHATS)
def test_a_turn_is_opened_with_its_thought(dialect: Dialect) -> None:
    for value in (False, 0, "false"):
        result = judged(dialect, add_generation_prompt=value)
        assert result.notes == (Note.THINKING_KEPT,)
        assert "add_generation_prompt" not in result.body


@pytest.mark.parametrize(
    "constraint",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"response_format": "x"},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function"}},
    ],
)
def test_a_grammar_waits_for_the_thought(constraint: dict[str, Any]) -> None:
    result = judged(Dialect.CHAT, include_reasoning=False, **constraint)
    assert result.notes == (Note.THINKING_KEPT,)
    assert "include_reasoning" not in result.body
    assert (
        judged(Dialect.CHAT, include_reasoning=False, response_format={"type": "text"}, tool_choice="auto").notes == ()
    )


BEGUN = {"role": "assistant", "content": "The answer is"}


@pytest.mark.parametrize(
    ("last", "thought"),
    [
        (BEGUN, False),
        ({**BEGUN, "reasoning": " \n"}, False),
        ({**BEGUN, "content": "<think>\n\n</think>\n\nThe"}, False),
        ({**BEGUN, "content": [{"type": "text", "text": "<think></think>The"}]}, False),
        ({**BEGUN, "content": None}, False),
        ({**BEGUN, "reasoning": "so"}, True),
        ({**BEGUN, "reasoning_content": "so"}, True),
        ({**BEGUN, "content": "<think>so</think>The"}, True),
        ({**BEGUN, "content": [{"type": "text", "text": "<think>so</think>The"}]}, True),
    ],
)
def test_an_answer_is_continued_only_with_its_thought(last: dict[str, Any], thought: bool) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    for dialect, messages in ((Dialect.CHAT, [*MESSAGES, last]), (Dialect.BATCH_CHAT, [[*MESSAGES, last]])):
        if thought:
            assert judged(dialect, messages=messages, **fields).notes == ()
        else:
            error = refused(dialect, messages=messages, **fields)
            assert (error.code, error.param) == ("thinking_refused", "continue_final_message")
        assert judged(dialect, PLAIN, messages=messages, **fields).notes == ()
        assert judged(dialect, messages=messages).notes == ()


def test_an_unfinished_item_of_a_response_is_continued_only_with_its_thought() -> None:
    message = {"type": "message", "role": "assistant", "status": "incomplete", "content": "The"}
    thought = {"type": "reasoning", "summary": [], "content": []}
    assert refused(Dialect.RESPONSES, input=[message]).param == "input"
    assert refused(Dialect.RESPONSES, input=[{"role": "user", "content": "hi"}, message]).param == "input"
    assert judged(Dialect.RESPONSES, input=[thought, message]).notes == ()
    assert judged(Dialect.RESPONSES, input=[{**thought, "status": "in_progress"}]).notes == ()
    assert judged(Dialect.RESPONSES, input=[{**message, "status": "completed"}]).notes == ()


# Efforts (C10).

PLACES = {
    "reasoning_effort": Dialect.CHAT,
    "reasoning.effort": Dialect.RESPONSES,
    "output_config.effort": Dialect.ANTHROPIC,
    "chat_template_kwargs.reasoning_effort": None,
}


def nested(place: str, value: object) -> dict[str, Any]:
    outer, _, inner = place.partition(".")
    return {outer: {inner: value}} if inner else {outer: value}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("word", EFFORTS)
@pytest.mark.parametrize("dialect", TEMPLATED)
def test_an_effort_reaches_the_template_in_a_word_of_its_own(dialect: Dialect, word: str, place: str) -> None:
    result = judged(dialect, **nested(place, word))
    if result.changed:
        assert result.notes == (Note.EFFORT_MAPPED,)
        assert kwargs_of(result) == {"enable_thinking": True, "reasoning_effort": EFFORTS[word]}
    else:
        at_home = Dialect.CHAT if dialect is Dialect.BATCH_CHAT else dialect
        assert EFFORTS[word] == word
        assert PLACES[place] in (None, at_home)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("word", ["ultra", "", "High", 3, ["high"], {"a": 1}, True, "\r\nx: y" * 99, "\u00e9"])
@pytest.mark.parametrize("dialect", TEMPLATED)
def test_an_unknown_effort_is_refused_with_the_known_ones(dialect: Dialect, word: object, place: str) -> None:
    error = refused(dialect, **nested(place, word))
    assert (error.code, error.param) == ("unknown_effort", place)
    assert "Accepted: high, low, max, medium, minimal, xhigh." in error.message
    assert error.message.isprintable()
    assert len(error.message) < 350


def test_the_dialects_own_place_counts_before_the_templates() -> None:
    result = judged(Dialect.CHAT, reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"})
    assert kwargs_of(result)["reasoning_effort"] == "xhigh"


def test_an_effort_beside_a_switch_is_kept() -> None:
    result = judged(Dialect.ANTHROPIC, thinking={"type": "disabled"}, output_config={"effort": "medium"})
    assert kwargs_of(result) == {"enable_thinking": True, "reasoning_effort": "medium"}
    assert result.notes == (Note.THINKING_KEPT,)


def test_a_template_without_efforts_is_sent_any_word() -> None:
    config = Config(max_in_flight=12, max_model_len=4096, thinking="keep")
    assert judged(Dialect.CHAT, config, reasoning_effort="high").notes == ()


@pytest.mark.parametrize("value", ["x", [], 1, True])
def test_arguments_of_the_template_are_an_object(value: object) -> None:
    error = refused(Dialect.CHAT, reasoning_effort="high", chat_template_kwargs=value)
    assert error.param == "chat_template_kwargs"


def test_both_notes_are_given() -> None:
    result = judged(Dialect.CHAT, temperature=0, reasoning_effort="high", enable_thinking=False)
    assert result.notes == (Note.GREEDY_REPLACED, Note.THINKING_KEPT, Note.EFFORT_MAPPED)


def test_notes_fit_a_header() -> None:
    for note in Note:
        assert note.text.isascii()
        assert note.text.isprintable()
        assert 0 < len(note.text) <= 120
        assert note.value.isidentifier()


# Whatever comes in.

KEYS = [
    *RECIPE,
    "n",
    "best_of",
    "max_tokens",
    "max_output_tokens",
    "prompt",
    "input",
    "messages",
    "reasoning",
    "reasoning_effort",
    "output_config",
    "thinking",
    "thinking_token_budget",
    "enable_thinking",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
    "include_reasoning",
    "response_format",
    "structured_outputs",
    "json",
    "anyOf",
    "$ref",
    "tools",
    "tool_choice",
    "effort",
    "enabled",
    "type",
    "status",
    "content",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["none", "high", "disabled", "incomplete", "<think>", "0"])
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
)


@given(st.sampled_from(list(Dialect)), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6))
def test_any_object_is_judged_or_refused_and_settled_at_once(dialect: Dialect, body: dict[str, Any]) -> None:
    before = copy.deepcopy(body)
    try:
        result = judge(dialect, body, THINKING)
    except Rejected as error:
        result = None
        words = error.message
    assert body == before
    if result is None:
        assert words.isprintable()
        return
    assert 1 <= result.count <= THINKING.max_in_flight
    again = judge(dialect, result.body, THINKING)
    assert (again.changed, again.count, again.notes) == (False, result.count, ())
