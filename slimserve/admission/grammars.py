"""Grammars in a request: bounded before the engine builds them, which takes memory and minutes for what is a line.

A grammar may stand in `structured_outputs`, `response_format`, `text.format`, `output_config.format`, and in the
schemas of tools wherever those rule what is said. What is counted here are the things that its cost follows: how often
something repeats, how much there is, how deep it is. What is wrong otherwise, the engine's own parser says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from slimserve.admission.numbers import shown
from slimserve.admission.rejection import Rejected

# At these bounds the engine's compiler takes seconds of one core with a vocabulary of 50,000 tokens; at ten times as
# much, minutes. Schemas within OpenAI's own bounds (5,000 properties, 10 levels, 120,000 characters) fit.
MAX_REPEATS = 1 << 16
MAX_VALUES = 10_000
MAX_CHARACTERS = 1 << 17
MAX_LEVELS = 64

Path = tuple[str, ...]

_PLACES: tuple[Path, ...] = (
    ("structured_outputs",),
    ("response_format",),
    ("text", "format"),
    ("output_config", "format"),
    ("output_format",),
)
# Without any of these there is no grammar.
_SPEAKING = frozenset({path[0] for path in _PLACES} | {"tools", "tool_choice"})
_REPEATS = frozenset(
    "minItems maxItems minContains maxContains minLength maxLength minProperties maxProperties".split()
)
# JSON data of the schema's author, in which a keyword is none.
_DATA = frozenset(("const", "enum", "default", "examples"))
_REMARKS = frozenset(("description", "title", "$comment", "default", "examples"))
# A schema or a tag may be written as JSON, or as a text that holds it.
_AS_TEXT = frozenset(("json", "structural_tag"))
_PATTERNS = frozenset(("pattern", "regex", "grammar"))
# What a schema is wherever it is met, without a step further into the value: a circle of these describes nothing.
_SAME = ("allOf", "anyOf", "oneOf")

# {3}, {3,} and {3,5} of expressions and EBNF; ~3 and ~3..5 of Lark. Nothing that was taken is given back: blanks
# without a brace behind them would else be shared out between the steps in every way there is.
_REPEATED = re.compile(r"\{\s*+(\d*+)\s*+,?+\s*+(\d*+)\s*+\}|~\s*+(\d++)(?:\s*+\.\.\s*+(\d++))?+")


def check_grammars(body: Mapping[str, Any]) -> str | None:
    """Refuse a grammar that is too large.

    Args:
        body: the parsed JSON object.

    Returns:
        The first field that holds a grammar; None: there is none.

    Raises:
        Rejected: 400, with the field that is meant.
    """
    if body.keys().isdisjoint(_SPEAKING):
        return None
    found = {".".join(path): value for path in _PLACES if (value := _value(body, path)) is not None}
    found = {field: value for field, value in found.items() if isinstance(value, dict) and value.get("type") != "text"}
    tools = list(_schemas(body.get("tools"))) if _tools_rule(body) else []
    if tools:
        found["tools"] = tools
    for field, grammar in found.items():
        _check_size(field, grammar)
        for root in tools if field == "tools" else _roots(grammar):
            _check_circles(field, root)
    return next(iter(found), None)


def _value(body: Mapping[str, Any], path: Path) -> Any:
    value: Any = body
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _schemas(tools: object) -> Iterator[Any]:
    """Of the tools, in any of the forms in which they come."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            function = tool.get("function")
            for holder in (tool, function if isinstance(function, dict) else {}):
                yield from (holder[key] for key in ("parameters", "input_schema") if isinstance(holder.get(key), dict))


def _tools_rule(body: Mapping[str, Any]) -> bool:
    """Whether the engine makes a grammar of the tools: a call has to come, only one may, or one is strict.

    Otherwise they only stand in the prompt, and may say what they like.
    """
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "none":
        return False
    if kind not in (None, "auto") or body.get("parallel_tool_calls") is False:
        return True
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        return True
    tools = body.get("tools")
    return any(
        isinstance(tool, dict)
        and (tool.get("strict") or (isinstance(tool.get("function"), dict) and tool["function"].get("strict")))
        for tool in (tools if isinstance(tools, list) else ())
    )


def _roots(form: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas of a format: those that `#` in their references means."""
    for path in (("json",), ("schema",), ("json_schema",), ("json_schema", "schema")):
        value = _value(form, path)
        value = _parsed(value) if path == ("json",) else value
        if isinstance(value, dict):
            yield value


def _check_size(field: str, grammar: Any) -> None:
    """Walk a grammar, level by level."""
    values = characters = 0
    level: list[tuple[Any, bool]] = [(grammar, True)]
    for _ in range(MAX_LEVELS):
        below: list[tuple[Any, bool]] = []
        for value, keywords in level:
            values += len(value)
            if isinstance(value, dict):
                for key, inner in value.items():
                    characters += len(key) + (len(inner) if isinstance(inner, str) and key not in _REMARKS else 0)
                    if keywords:
                        inner = _keyword(field, key, inner)
                    if isinstance(inner, dict | list):
                        below.append((inner, keywords and key not in _DATA))
            else:
                characters += sum(len(inner) for inner in value if isinstance(inner, str))
                below += [(inner, keywords) for inner in value if isinstance(inner, dict | list)]
        if values > MAX_VALUES:
            raise _too_much(field, f"more than {MAX_VALUES} values", "Describe less of the answer.")
        if characters > MAX_CHARACTERS:
            raise _too_much(field, f"more than {MAX_CHARACTERS} characters", "Describe less of the answer.")
        if not below:
            return
        level = below
    raise _too_much(field, f"more than {MAX_LEVELS} levels", "Nest it less deeply.")


def _keyword(field: str, key: str, value: Any) -> Any:
    """Check one keyword's own value; a text that holds JSON is taken for it."""
    if key in _REPEATS:
        if isinstance(value, int | float) and value > MAX_REPEATS:
            raise _too_often(field, key, value)
    elif key in _PATTERNS and isinstance(value, str):
        _check_pattern(field, key, value)
    elif key == "patternProperties" and isinstance(value, dict):
        for pattern in value:
            _check_pattern(field, key, pattern)
    elif key in _AS_TEXT and isinstance(value, str):
        value = _parsed(value)
    return value


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value  # no JSON: the engine says so


def _check_pattern(field: str, key: str, pattern: str) -> None:
    if len(pattern) > MAX_CHARACTERS:
        raise _too_much(field, f"more than {MAX_CHARACTERS} characters", "Describe less of the answer.")
    for match in _REPEATED.finditer(pattern):
        for digits in match.groups():
            if digits and (len(digits) > 20 or int(digits) > MAX_REPEATS):
                raise _too_often(field, key, int(digits[:20]))


def _check_circles(field: str, root: dict[str, Any]) -> None:
    """Refuse a schema that is only ever said to be itself.

    Args:
        field: that holds it.
        root: what `#` in its references means.
    """
    done: set[int] = set()
    for start in _inside(root):
        # Depth first, with the way back on the stack, so that no depth of the schema is one of ours.
        stack: list[tuple[int, Iterator[dict[str, Any]]]] = [(id(start), _same(root, start))]
        on_way = {id(start)}
        while stack:
            here, rest = stack[-1]
            following = next((each for each in rest if id(each) not in done), None)
            if following is None:
                stack.pop()
                on_way.discard(here)
                done.add(here)
            elif id(following) in on_way:
                raise Rejected(
                    400,
                    f"{field}: a $ref leads back to itself without a step into the value, so that it describes nothing."
                    " Put what it stands for between the two, such as an object with a property.",
                    param=field,
                    code="invalid_grammar",
                )
            else:
                stack.append((id(following), _same(root, following)))
                on_way.add(id(following))


def _inside(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every object of a schema but those that are data."""
    stack: list[Any] = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            yield value
        inner = [value[key] for key in value if key not in _DATA] if isinstance(value, dict) else value
        stack += [each for each in inner if isinstance(each, dict | list)]


def _same(root: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas that `schema` stands for without a step further into the value."""
    if isinstance(reference := schema.get("$ref"), str) and (target := _resolve(root, reference)) is not None:
        yield target
    for key in _SAME:
        members = schema.get(key)
        yield from (each for each in (members if isinstance(members, list) else ()) if isinstance(each, dict))


def _resolve(root: dict[str, Any], reference: str) -> dict[str, Any] | None:
    """What a reference inside of the schema means; None: nothing, or it leads elsewhere, which the engine refuses."""
    if not reference.startswith("#"):
        return None
    value: Any = root
    for step in reference[1:].split("/")[1:]:
        value = value.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else None


def _too_often(field: str, key: str, value: float) -> Rejected:
    how = f"{field}: {key} repeats something {shown(value)} times"
    return _rejected(
        field, f"{how}; a grammar may repeat at most {MAX_REPEATS} times. Leave the bound out or lower it."
    )


def _too_much(field: str, what: str, do: str) -> Rejected:
    return _rejected(field, f"{field}: the grammar has {what}, which is the bound here. {do}")


def _rejected(field: str, message: str) -> Rejected:
    return Rejected(400, message, param=field, code="grammar_too_large")
