"""The committed schemas are those that the program generates, and they say what the program says."""

from __future__ import annotations

import json

import pytest

from slimserve import paths, schema


@pytest.mark.parametrize("name", schema.FILES)
def test_the_committed_schema_is_current(name: str) -> None:
    committed = (paths.profiles_folder() / name).read_text()
    assert committed == schema.schema_text(schema.FILES[name]), "run: python -m slimserve.schema"


def test_unknown_keys_are_errors_in_an_editor_too() -> None:
    data = json.loads(schema.schema_text(schema.FILES["schema.json"]))
    assert data["$ref"] == "#/$defs/Profile"
    assert all(part["additionalProperties"] is False for part in data["$defs"].values())


def test_keys_carry_their_meaning() -> None:
    data = json.loads(schema.schema_text(schema.FILES["schema.json"]))
    assert "decode slots" in data["$defs"]["Engine"]["properties"]["max_num_seqs"]["description"]


@pytest.mark.parametrize("folder", ["", "models", "platforms"])
def test_each_file_names_its_schema_for_editors(folder: str) -> None:
    for path in (paths.profiles_folder() / folder).glob("*.yaml"):
        if path.name != "sources.yaml":
            assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n"), path
