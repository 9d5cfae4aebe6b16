"""JSON schemas of the registry's files, so that an editor completes and checks them while they are written.

python -m slimserve.schema          write profiles/schema.json, models/schema.json and platforms/schema.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic

from slimserve import paths
from slimserve.model import Model
from slimserve.platform import Platform
from slimserve.profile import Profile
from slimserve.validate import attribute_docs

FILES: dict[str, type[pydantic.BaseModel]] = {
    "schema.json": Profile,
    "models/schema.json": Model,
    "platforms/schema.json": Platform,
}


def schema_text(kind: type[pydantic.BaseModel]) -> str:
    """The JSON schema of one kind of file, with the fields' docstrings as descriptions."""
    schema = kind.model_json_schema()
    parts = _short_names(schema)
    for owner in _models(kind):
        for name, text in attribute_docs(owner).items():
            for part in parts.get(owner.__name__.partition("[")[0], ()):
                if name in part.get("properties", {}):
                    part["properties"][name]["description"] = text
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


def _short_names(schema: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Give the definitions of a generic class plain numbered names, in place; returns the parts by class name."""
    parts: dict[str, list[dict[str, Any]]] = {schema["title"]: [schema]}
    names: dict[str, str] = {}
    for name, part in schema.get("$defs", {}).items():
        kind = name.partition("_")[0]
        parts.setdefault(kind, []).append(part)
        names[name] = kind if name == kind else f"{kind}{len(parts[kind])}"
    for name, short in names.items():
        schema["$defs"][short] = schema["$defs"].pop(name)
        schema["$defs"][short]["title"] = short

    def rename(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                node["$ref"] = "#/$defs/" + names[node["$ref"].removeprefix("#/$defs/")]
            for child in node.values():
                rename(child)
        elif isinstance(node, list):
            for child in node:
                rename(child)

    rename(schema)
    return parts


def _models(kind: type[pydantic.BaseModel]) -> list[type[pydantic.BaseModel]]:
    """`kind` and every model that its fields hold."""
    found: list[type[pydantic.BaseModel]] = []

    def visit(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
            if annotation not in found:
                found.append(annotation)
                for field in annotation.model_fields.values():
                    visit(field.annotation)
            return
        for argument in getattr(annotation, "__args__", ()):
            visit(argument)

    visit(kind)
    return found


def main() -> None:
    """Write the schemas into the registry."""
    folder = paths.profiles_folder()
    for name, kind in FILES.items():
        (folder / Path(name)).write_text(schema_text(kind))


if __name__ == "__main__":
    main()
