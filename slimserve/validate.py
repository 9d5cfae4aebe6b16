"""Strict validation: a document and a pydantic model give an object, or every problem with file and line."""

from __future__ import annotations

import difflib
import itertools
import json
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

import pydantic

from slimserve.errors import Finding, RegistryError
from slimserve.yaml_source import Document, Loc

M = TypeVar("M", bound=pydantic.BaseModel)


class Strict(pydantic.BaseModel):
    """Base of everything that comes from a file: frozen, strict, unknown keys fatal."""

    # Only the classes that files are read into are ever compiled: the rest is built as part of them.
    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def validate(model: type[M], document: Document) -> M:
    """Check `document` against `model`.

    Args:
        model: the shape that the file must have.
        document: what `read_document` returned.

    Returns:
        The object.

    Raises:
        RegistryError: with all problems, each with file, line, key path and the valid set where there is one.
    """
    if not isinstance(document.data, dict):
        found = "nothing" if document.data is None else f"a {_kind(document.data)}"
        raise RegistryError(
            Finding(
                f"holds {found}",
                "a mapping of keys is expected",
                f"give the keys {_names(model.model_fields)}",
                document.where(),
            )
        )
    try:
        # Through JSON, where strict mode takes a list for a tuple and a string for an enumeration, and nothing else.
        return model.model_validate_json(json.dumps(document.data), strict=True)
    except pydantic.ValidationError as error:
        raise RegistryError(
            *(_finding(model, document, dict(item)) for item in error.errors(include_url=False))
        ) from None


def nearest(name: str, valid: Iterable[str]) -> str:
    """`valid` in a sentence, the closest to `name` first when one is close."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}? valid: {', '.join(names)}" if close else f"valid: {', '.join(names)}"


def dotted(loc: Loc) -> str:
    """A location as a key path: `engine.max_num_seqs.value`, `gpus[0].name`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _finding(model: type[pydantic.BaseModel], document: Document, item: dict[str, Any]) -> Finding:
    loc: Loc = tuple(part for part in item["loc"] if part != "[key]")
    path, kind, context = dotted(loc), item["type"], item.get("ctx", {})
    where = document.where(loc)
    if kind == "extra_forbidden":
        owner = _model_at(model, loc[:-1])
        valid = nearest(str(loc[-1]), owner.model_fields) if owner else ""
        return Finding(f"unknown key {path}", "nothing would read it, so it would be lost in silence", valid, where)
    if kind == "missing":
        expected = _expected(_annotation_at(model, loc))
        return Finding(
            f"{path} is missing",
            f"{_description(model, loc) or 'nothing is assumed for it'}",
            f"add it: {expected}",
            where,
        )
    if kind == "value_error":
        return Finding(
            f"{path or 'the file'}: {context['error']}", "the file contradicts itself", "mend the values", where
        )
    shown = json.dumps(item.get("input"), default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    expected = _expected(_annotation_at(model, loc))
    if kind == "literal_error":
        return Finding(
            f"{path} = {shown} is not one of the known values",
            "only these are understood",
            f"use {context['expected']}",
            where,
        )
    reason = item["msg"][0].lower() + item["msg"][1:]
    return Finding(f"{path} = {shown} is not valid", reason, f"give {expected}", where)


def _unwrap(annotation: Any) -> Any:
    """The type behind Annotated and `X | None`."""
    while True:
        if hasattr(annotation, "__metadata__"):
            annotation = annotation.__origin__
        elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
            annotation = next(arg for arg in typing.get_args(annotation) if arg is not type(None))
        else:
            return annotation


def _annotation_at(model: type[pydantic.BaseModel], loc: Loc) -> Any:
    current: Any = model
    for part in loc:
        current = _unwrap(current)
        if isinstance(current, type) and issubclass(current, pydantic.BaseModel):
            field = current.model_fields.get(str(part))
            if field is None:
                return None
            current = field.annotation
        elif typing.get_origin(current) is dict:
            current = typing.get_args(current)[1]
        elif typing.get_origin(current) in (list, tuple):
            current = typing.get_args(current)[0]
        else:
            return None
    return _unwrap(current)


def _model_at(model: type[pydantic.BaseModel], loc: Loc) -> type[pydantic.BaseModel] | None:
    found = _annotation_at(model, loc)
    return found if isinstance(found, type) and issubclass(found, pydantic.BaseModel) else None


def _description(model: type[pydantic.BaseModel], loc: Loc) -> str:
    owner = _model_at(model, loc[:-1])
    return attribute_docs(owner).get(str(loc[-1]), "") if owner else ""


def attribute_docs(model: type[pydantic.BaseModel]) -> dict[str, str]:
    """The docstring below each field of `model`, on one line.

    Read from the source when somebody asks, since pydantic's own way costs every start a fifth of a second.
    """
    import ast
    import inspect
    import textwrap

    owner = model.__pydantic_generic_metadata__["origin"] or model
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    if not isinstance(body, ast.ClassDef):
        return {}
    docs: dict[str, str] = {}
    for field, text in itertools.pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            # The only bare expressions in these classes are the fields' docstrings.
            docs[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _expected(annotation: Any) -> str:
    """What a reader should write, in words."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return f"a mapping with {_names(annotation.model_fields)}"
    if origin is dict or annotation is dict:
        return "a mapping"
    if origin in (list, tuple) or annotation in (list, tuple):
        return "a list"
    return (
        _WORDS.get(annotation, "a value of the right kind")
        if isinstance(annotation, type)
        else "a value of the right kind"
    )


def _names(fields: dict[str, Any]) -> str:
    return ", ".join(name for name, field in fields.items() if field.is_required()) or ", ".join(fields)


def _kind(value: object) -> str:
    return {list: "list", str: "text", int: "number", float: "number", bool: "boolean"}.get(
        type(value), type(value).__name__
    )
