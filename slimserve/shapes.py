"""Dataclasses as the shape of files: plain data becomes objects, strictly, or every reason why not.

The registry's shapes are frozen dataclasses. Their annotations say all: `Annotated[int, Between(1, 8)]`, `Literal`, a
`StrEnum`, `X | None`, `tuple[X, ...]`, `dict[str, X]`, other dataclasses, generic ones too. Nothing is converted: a
text is no number, a number no boolean, an unknown key an error. pydantic does this and more, but its import alone takes
100 of the 250 ms that a listing may take, and turning its errors into sentences took as many lines as checking does.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeVar

from slimserve.records import dataclass

Loc = tuple[str | int, ...]
T = TypeVar("T")

_MISSING = object()
# More than anybody reads; looking for the nearest key of each of 60,000 would take seconds.
MAX_PROBLEMS = 100
_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Problem:
    """Something wrong at one key: what, why, and what to do. Whoever knows the file adds file and line."""

    loc: Loc
    what: str
    why: str
    do: str


class ShapeError(Exception):
    """Plain data does not have the shape that was asked for; `problems` says where and why."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{problem.what}: {problem.why}" for problem in problems))


class Constraint(Protocol):
    """What `Annotated` carries: a check of one value of the right type."""

    def complaint(self, value: Any) -> str | None:
        """Why `value` is not allowed, or None."""


@dataclass(frozen=True)
class Between:
    """A number from `low` to `high`, both allowed unless `open_ends`."""

    low: float
    high: float
    open_ends: bool = False

    def complaint(self, value: float) -> str | None:
        """Why `value` is not allowed, or None."""
        inside = self.low < value < self.high if self.open_ends else self.low <= value <= self.high
        words = "between {} and {}, both excluded" if self.open_ends else "from {} to {}"
        return None if inside else "it must be " + words.format(self.low, self.high)


@dataclass(frozen=True)
class Matching:
    """A text that a regular expression matches whole; `words` says what that means."""

    pattern: str
    words: str

    def complaint(self, value: str) -> str | None:
        """Why `value` is not allowed, or None."""
        return None if re.fullmatch(self.pattern, value) else f"it must be {self.words}"


@dataclass(frozen=True)
class Satisfying:
    """A value for which `check` returns None; else it returns the complaint."""

    check: Callable[[Any], str | None]

    def complaint(self, value: Any) -> str | None:
        """Why `value` is not allowed, or None."""
        return self.check(value)


def build(shape: type[T], data: Any) -> T:
    """Make an object of `shape` from plain data (None, bool, int, float, str, list, dict with text keys).

    Raises:
        ShapeError: with every problem, not the first alone.
    """
    problems: list[Problem] = []
    value = _decode(shape, data, (), problems)
    if problems:
        raise ShapeError(problems)
    return typing.cast(T, value)


def plain(value: Any, *, nulls: bool = True) -> Any:
    """An object as plain data that `build` takes back.

    Args:
        value: a dataclass, or anything that one holds.
        nulls: whether keys are kept whose value is None.
    """
    if dataclasses.is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: plain(part, nulls=nulls) for name, part in parts.items() if nulls or part is not None}
    if isinstance(value, dict):
        return {str(key): plain(part, nulls=nulls) for key, part in value.items()}
    if isinstance(value, StrEnum):
        return str(value)
    return [plain(part, nulls=nulls) for part in value] if isinstance(value, list | tuple) else value


MOST_NEAREST = 4
"""of names that are equally near"""


def nearest(name: str, valid: Iterable[str]) -> str:
    """`valid` in a sentence, the closest to `name` first when one is close; letters of either case are alike."""
    names = sorted(valid)
    likeness = {one: difflib.SequenceMatcher(None, one.casefold(), name.casefold()).ratio() for one in names}
    best = max(likeness.values(), default=0.0)
    close = [one for one in names if likeness[one] == best >= 0.6][:MOST_NEAREST]
    every = f"valid: {', '.join(names)}"
    return f"did you mean {' or '.join(close)}? {every}" if close else every


def dotted(loc: Loc) -> str:
    """A location as a key path: `engine.max_num_seqs.value`, `gpus[0].name`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True)
class Field:
    """One key of a shape."""

    name: str
    annotation: Any
    required: bool


def fields_of(annotation: Any) -> tuple[Field, ...]:
    """The keys of a dataclass, generic or not; empty for every other type."""
    return _fields(annotation)


@functools.cache
def _fields(annotation: Any) -> tuple[Field, ...]:
    owner = typing.get_origin(annotation) or annotation
    if not (isinstance(owner, type) and dataclasses.is_dataclass(owner)):
        return ()
    parameters = dict(zip(getattr(owner, "__parameters__", ()), typing.get_args(annotation), strict=False))
    hints = typing.get_type_hints(owner, include_extras=True)
    nothing = dataclasses.MISSING
    return tuple(
        Field(
            field.name,
            parameters.get(hints[field.name], hints[field.name]),
            field.default is nothing and field.default_factory is nothing,
        )
        for field in dataclasses.fields(owner)
    )


def attribute_docs(annotation: Any) -> dict[str, str]:
    """The text below each field of a dataclass, on one line; read from the source when somebody asks."""
    import ast
    import inspect
    import textwrap

    owner = typing.get_origin(annotation) or annotation
    if not fields_of(annotation):
        return {}
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    docs: dict[str, str] = {}
    for field, text in itertools.pairwise(body.body if isinstance(body, ast.ClassDef) else []):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs


@functools.cache
def split(annotation: Any) -> tuple[Any, tuple[Constraint, ...], bool]:
    """The bare type of an annotation, the constraints on it, and whether null is allowed."""
    constraints: tuple[Constraint, ...] = ()
    optional = False
    while True:
        if hasattr(annotation, "__metadata__"):
            constraints += annotation.__metadata__
            annotation = annotation.__origin__
        elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
            optional = True
            (annotation,) = (part for part in typing.get_args(annotation) if part is not type(None))
        else:
            return annotation, constraints, optional


@functools.cache
def choices(kind: Any) -> tuple[Any, ...]:
    """The plain values that a bare type names one by one; empty for every other type."""
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return tuple(member.value for member in kind)
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def expected(annotation: Any) -> str:
    """What belongs there, in words."""
    kind, _, _ = split(annotation)
    origin = typing.get_origin(kind)
    if named := choices(kind):
        return "one of " + ", ".join(map(str, named))
    if hasattr(kind, "EXPECTED"):  # a shape whose rule is more than the list of its keys
        return str(kind.EXPECTED)
    if fields := fields_of(kind):
        names = [field.name for field in fields if field.required] or [field.name for field in fields]
        return f"a mapping with {', '.join(names)}"
    return {dict: "a mapping", tuple: "a list"}.get(origin, "") or _SCALARS[kind]


def _decode(annotation: Any, data: Any, loc: Loc, problems: list[Problem]) -> Any:
    """The value for `data`, or `_MISSING` when a problem was added."""
    kind, constraints, optional = split(annotation)
    if data is None and optional:
        return None
    origin = typing.get_origin(kind)
    before = len(problems)
    value: Any
    if allowed := choices(kind):
        if any(data == choice and type(data) is type(choice) for choice in allowed):
            value = data if origin is Literal else kind(data)
        else:
            _refuse(loc, data, "it is not one of the known values", f"use {' or '.join(map(str, allowed))}", problems)
    elif fields_of(kind):
        value = _decode_object(kind, data, loc, problems)
    elif origin is dict and isinstance(data, dict):
        value = _decode_dict(kind, data, loc, problems)
    elif origin is tuple and isinstance(data, list):
        value = _decode_list(kind, data, loc, problems)
    elif kind is float and type(data) is int and abs(data) <= sys.float_info.max:
        value = float(data)
    elif type(data) is kind:
        value = data
    else:
        value = data
        given = f"{called(data)} {'beyond every float ' if kind is float and type(data) is int else ''}is given"
        _refuse(loc, data, given, f"give {expected(annotation)}", problems)
    if len(problems) > before:
        return _MISSING
    for constraint in constraints:
        complaint = constraint.complaint(value)
        if complaint:
            _refuse(loc, data, complaint, f"give {expected(annotation)} within that", problems)
            return _MISSING
    return value


def _decode_object(kind: Any, data: Any, loc: Loc, problems: list[Problem]) -> Any:
    before = len(problems)
    if not isinstance(data, dict):
        _refuse(loc, data, f"{called(data)} is given", f"give {expected(kind)}", problems)
        return _MISSING
    fields = {field.name: field for field in fields_of(kind)}
    values: dict[str, Any] = {}
    for key, part in data.items():
        if len(problems) >= MAX_PROBLEMS:
            return _MISSING
        if key in fields:
            values[key] = _decode(fields[key].annotation, part, (*loc, key), problems)
        else:
            path = dotted((*loc, key))
            why = "nothing would read it, so it would be lost in silence"
            problems.append(Problem((*loc, key), f"unknown key {path}", why, nearest(key, fields)))
    for field in fields.values():
        if field.required and field.name not in data:
            path = dotted((*loc, field.name))
            why = attribute_docs(kind).get(field.name, "nothing is assumed for it")
            do = f"add it: {expected(field.annotation)}"
            problems.append(Problem((*loc, field.name), f"{path} is missing", why, do))
    if len(problems) > before:
        return _MISSING
    try:
        return (typing.get_origin(kind) or kind)(**values)
    except ValueError as error:  # what only the object as a whole can get wrong: `__post_init__`
        text = f"{dotted(loc) or 'the file'}: {error}"
        problems.append(Problem(loc, text, "the file contradicts itself", f"give {expected(kind)}"))
        return _MISSING


def _decode_dict(kind: Any, data: dict[str, Any], loc: Loc, problems: list[Problem]) -> dict[Any, Any]:
    key_type, value_type = typing.get_args(kind)
    numbers = split(key_type)[0] is int
    result = {}
    for key, part in data.items():
        # Keys of files are texts; those that number something are decimal.
        read = int(key) if numbers and re.fullmatch(r"0|[1-9][0-9]{0,9}", key) else key
        name = _decode(key_type, read, (*loc, key), problems)
        value = _decode(value_type, part, (*loc, key), problems)
        if name is not _MISSING:
            result[name] = value
    return result


def _decode_list(kind: Any, data: list[Any], loc: Loc, problems: list[Problem]) -> tuple[Any, ...]:
    parts = typing.get_args(kind)
    if parts[-1] is Ellipsis:
        parts = (parts[0],) * len(data)
    elif len(parts) != len(data):
        _refuse(loc, data, f"{len(data)} items are given", f"give {len(parts)}", problems)
    pairs = enumerate(zip(parts, data, strict=False))
    return tuple(_decode(part, item, (*loc, index), problems) for index, (part, item) in pairs)


def _refuse(loc: Loc, data: Any, why: str, do: str, problems: list[Problem]) -> None:
    shown = json.dumps(data)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    problems.append(Problem(loc, f"{dotted(loc) or 'the file'} = {shown} is not valid", why, do))


def called(data: Any) -> str:
    """What kind of plain data this is, in words."""
    if data is None:
        return "nothing"
    if isinstance(data, str | list | dict):
        return {str: "a text", list: "a list", dict: "a mapping"}[type(data)]
    return {bool: "a boolean", int: "a whole number"}.get(type(data), "a number")
