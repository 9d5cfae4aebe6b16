"""Grammars in a request: what is too much is refused before the engine builds it, wherever it stands."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from slimserve.admission.config import Config
from slimserve.admission.grammars import (
    MAX_CHARACTERS,
    MAX_LEVELS,
    MAX_REPEATS,
    MAX_VALUES,
    check_grammars,
)
from slimserve.admission.rejection import Rejected
from slimserve.admission.requests import judge
from slimserve.admission.routes import Dialect

OVER = MAX_REPEATS + 1


def tool(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **more}}


def places(schema: Any) -> dict[str, dict[str, Any]]:
    """A body for each place in which a schema may stand, by the field that a refusal has to name."""
    named = {"name": "x", "schema": schema}
    return {
        "structured_outputs": {"structured_outputs": {"json": schema}},
        "response_format": {"response_format": {"type": "json_schema", "json_schema": named}},
        "text.format": {"text": {"format": {"type": "json_schema", **named}}},
        "output_config.format": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        "tools": {"tools": [tool(schema)], "tool_choice": "required"},
    }


def refusal(body: dict[str, Any]) -> Rejected:
    with pytest.raises(Rejected) as caught:
        check_grammars(body)
    assert caught.value.status == 400
    assert caught.value.message.isascii()
    return caught.value


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels // 2):
        schema = {"properties": {"a": schema}}
    return schema


TOO_MUCH: list[Any] = [
    {"type": "array", "minItems": 1_000_000_000},
    {"type": "array", "items": {"type": "string", "maxLength": OVER}},
    {"properties": {"a": {"minProperties": 1e300}}},
    {"$defs": {"a": {"anyOf": [{"minLength": OVER}]}}, "$ref": "#/$defs/a"},
    {"type": "string", "pattern": f"^(ab){{2,{OVER}}}$"},
    {"type": "string", "pattern": f"a{{{OVER},}}"},
    {"type": "string", "pattern": "a{" + "9" * 10_000 + "}"},
    {"patternProperties": {f"^x{{{OVER}}}$": {}}},
    {"enum": list(range(MAX_VALUES + 1))},
    {"enum": ["x" * (MAX_CHARACTERS + 1)]},
    {"properties": {f"{number:0100}": {} for number in range(MAX_CHARACTERS // 100 + 1)}},
    deep(MAX_LEVELS + 8),
]
CIRCLES: list[Any] = [
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}, {"type": "integer"}]},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    {"properties": {"x": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": {"oneOf": [{"$ref": "#/$defs/a~1b"}]}}},
    {"properties": {"x": {"$ref": "#/properties/x"}}},
]
FINE: list[Any] = [
    {"type": "array", "minItems": MAX_REPEATS, "items": {"type": "string", "maxLength": MAX_REPEATS}},
    {"properties": {"child": {"$ref": "#"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    {"$defs": {"node": {"properties": {"all": {"items": {"$ref": "#/$defs/node"}}}}}, "$ref": "#/$defs/node"},
    {"$defs": {"a": {}, "b": {"anyOf": [{"$ref": "#/$defs/a"}] * 3}}, "allOf": [{"$ref": "#/$defs/b"}]},
    {"properties": {"minItems": {"const": OVER}, "pattern": {"type": "string"}, "schema": {"$ref": "#"}}},
    {"const": {"minItems": OVER, "$ref": "#"}, "description": "x" * (MAX_CHARACTERS + 1)},
    {"properties": {f"p{number}": {"type": "string"} for number in range(3000)}},
    {"$ref": "https://example.org/elsewhere"},
    {"$ref": "#/$defs/nowhere"},
    {"maximum": 1 << 53, "minimum": -(1 << 53)},
    deep(MAX_LEVELS - 8),
]


@pytest.mark.parametrize("schema", TOO_MUCH, ids=lambda schema: json.dumps(schema)[:40])
def test_what_is_too_much_is_refused_in_every_place(schema: Any) -> None:
    for field, body in places(schema).items():
        error = refusal(body)
        assert (error.code, error.param) == ("grammar_too_large", field)
        assert field in error.message
        assert any(str(bound) in error.message for bound in (MAX_REPEATS, MAX_VALUES, MAX_CHARACTERS, MAX_LEVELS))


@pytest.mark.parametrize("schema", CIRCLES, ids=json.dumps)
def test_a_circle_without_a_way_out_is_refused_in_every_place(schema: Any) -> None:
    for field, body in places(schema).items():
        error = refusal(body)
        assert (error.code, error.param) == ("invalid_grammar", field)


@pytest.mark.parametrize("schema", FINE, ids=lambda schema: json.dumps(schema)[:40])
def test_what_the_engine_can_follow_passes_in_every_place(schema: Any) -> None:
    for field, body in places(schema).items():
        before = copy.deepcopy(body)
        assert check_grammars(body) == field
        assert body == before


@pytest.mark.parametrize(
    "form",
    [
        {"json": json.dumps({"minItems": OVER})},
        {"json": json.dumps({"anyOf": [{"$ref": "#"}]})},
        {"regex": f"a{{{OVER}}}"},
        {"regex": f"a{{1, {OVER} }}"},
        {"regex": "a" * (MAX_CHARACTERS + 1)},
        {"grammar": f'root ::= "a"{{1,{OVER}}}'},
        {"grammar": f'start: "a"~{OVER}'},
        {"grammar": f'start: "a"~1..{OVER}'},
        {"choice": ["x"] * (MAX_VALUES + 1)},
        {"choice": ["x" * (MAX_CHARACTERS + 1)]},
        {"structural_tag": json.dumps({"structures": [{"begin": "<", "schema": {"minItems": OVER}, "end": ">"}]})},
    ],
    ids=lambda form: json.dumps(form)[:40],
)
def test_the_other_kinds_have_the_same_bounds(form: dict[str, Any]) -> None:
    assert refusal({"structured_outputs": form}).param == "structured_outputs"


@pytest.mark.parametrize(
    "form",
    [
        {"json": "{"},
        {"json": "[" * 100_000},
        {"json": 3},
        {"regex": "a{1,3}|x{,5}|{}|{,}"},
        {"regex": ["x"]},
        {"grammar": 'root ::= "a"{3}'},
        {"choice": ["yes", "no"]},
        {"json_object": True},
    ],
    ids=lambda form: json.dumps(form)[:40],
)
def test_what_is_wrong_otherwise_is_left_to_the_engine(form: dict[str, Any]) -> None:
    assert check_grammars({"structured_outputs": form}) == "structured_outputs"


def test_a_tag_of_the_response_s_format_is_a_grammar_too() -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"minItems": OVER}}}
    assert refusal({"response_format": tag}).param == "response_format"


LARGE = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 1_000_000}}}


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [tool(LARGE)], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [tool(LARGE, strict=True)]},
        {"tools": [tool(LARGE)], "parallel_tool_calls": False},
        {"tools": [{"type": "function", "name": "f", "parameters": LARGE, "strict": True}]},
        {"tools": [{"name": "f", "input_schema": LARGE}], "tool_choice": {"type": "any"}},
        {
            "tools": [{"name": "f", "input_schema": LARGE}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
    ],
    ids=json.dumps,
)
def test_tools_that_rule_the_answer_are_grammars(body: dict[str, Any]) -> None:
    assert refusal(body).param == "tools"


@pytest.mark.parametrize("choice", [None, "auto", "none", {"type": "auto"}, {"type": "none"}])
def test_tools_that_only_stand_in_the_prompt_may_say_what_they_like(choice: object) -> None:
    body = {"tools": [tool(LARGE), {"name": "f", "input_schema": LARGE}, 3], "tool_choice": choice}
    assert check_grammars(body) is None


@pytest.mark.parametrize("body", [{}, {"response_format": {"type": "text"}}, {"text": "x"}, {"tools": 3}, {"text": {}}])
def test_most_requests_have_none(body: dict[str, Any]) -> None:
    assert check_grammars(body) is None


def test_the_door_asks() -> None:
    config = Config(max_in_flight=1, max_model_len=100)
    body = {"prompt": "x", "structured_outputs": {"json": {"minItems": 1_000_000_000}}}
    with pytest.raises(Rejected):
        judge(Dialect.COMPLETIONS, body, config)
    assert judge(Dialect.COMPLETIONS, {"structured_outputs": {"regex": "a"}}, config).grammar == "structured_outputs"
