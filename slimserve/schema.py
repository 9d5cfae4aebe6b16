"""JSON schemas of the registry's files, so that an editor completes and checks them, and other programs read them.

python -m slimserve.schema          write profiles/schema.json, and those of models, platforms and receipts
"""

from __future__ import annotations

import inspect
import json
import typing
from pathlib import Path
from typing import Any

from harness.receipt import Receipt
from slimserve import paths
from slimserve.model import Model
from slimserve.platform import Platform
from slimserve.profile import Profile
from slimserve.shapes import Between, Constraint, Matching, attribute_docs, choices, fields_of, split

FILES: dict[str, type] = {
    "schema.json": Profile,
    "models/schema.json": Model,
    "platforms/schema.json": Platform,
    "receipts/schema.json": Receipt,
}
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string"}


def schema_text(shape: type) -> str:
    """The JSON schema of one kind of file, with the fields' docstrings as descriptions."""
    parts: dict[str, Any] = {}
    top = _schema(shape, parts)
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "$defs": parts}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _schema(annotation: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """The schema of one annotation; those of plain dataclasses go to `parts` and are referred to."""
    kind, constraints, optional = split(annotation)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if allowed := choices(kind):
        schema: dict[str, Any] = {"enum": list(allowed)}
    elif fields_of(kind) and origin is not None:  # generic: each use has a type of its own
        schema = _object(kind, parts)
    elif fields_of(kind):
        if kind.__name__ not in parts:
            parts[kind.__name__] = {}  # taken before its fields are looked at
            parts[kind.__name__] = _object(kind, parts)
        schema = {"$ref": f"#/$defs/{kind.__name__}"}
    elif origin is dict:
        schema = {"type": "object", "additionalProperties": _schema(arguments[1], parts)}
        names = _schema(arguments[0], parts)
        if "pattern" in names:
            schema["propertyNames"] = {"pattern": names["pattern"]}
    elif origin is tuple and arguments[-1] is Ellipsis:
        schema = {"type": "array", "items": _schema(arguments[0], parts)}
    elif origin is tuple:
        schema = {"type": "array", "prefixItems": [_schema(part, parts) for part in arguments], "items": False}
        schema["minItems"] = len(arguments)
    else:
        schema = {"type": _SCALARS[kind]}
    for constraint in constraints:
        schema |= _limits(constraint)
    return {"anyOf": [schema, {"type": "null"}]} if optional else schema


def _limits(constraint: Constraint) -> dict[str, Any]:
    """A constraint in the words of JSON schema; those that it has no words for are left to the program."""
    if isinstance(constraint, Matching):
        return {"pattern": f"^(?:{constraint.pattern.removeprefix('(?s)')})$", "description": constraint.words}
    if isinstance(constraint, Between) and constraint.open_ends:
        return {"exclusiveMinimum": constraint.low, "exclusiveMaximum": constraint.high}
    return {"minimum": constraint.low, "maximum": constraint.high} if isinstance(constraint, Between) else {}


def _object(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    docs = attribute_docs(kind)
    properties = {}
    for field in fields_of(kind):
        properties[field.name] = _schema(field.annotation, parts)
        if field.name in docs:
            properties[field.name]["description"] = docs[field.name]
    return {
        "type": "object",
        "description": inspect.cleandoc((typing.get_origin(kind) or kind).__doc__ or "").partition("\n")[0],
        "properties": properties,
        "required": [field.name for field in fields_of(kind) if field.required],
        "additionalProperties": False,
    }


def main() -> None:
    """Write the schemas into the registry."""
    folder = paths.profiles_folder()
    for name, shape in FILES.items():
        (folder / Path(name)).write_text(schema_text(shape))


if __name__ == "__main__":
    main()
