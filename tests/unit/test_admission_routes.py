"""The table of routes by itself; tests/engine/test_routes_real.py holds it against the engine's app."""

from __future__ import annotations

import pytest

from slimserve.admission.routes import TABLE, Access, Dialect, Route, find


def paths_of(access: Access) -> set[str]:
    return {path for (_, path), row in TABLE.items() if row.access is access}


def test_a_stranger_gets_the_health_and_nothing_else() -> None:
    assert paths_of(Access.OPEN) == {"/health"}


def test_what_a_key_opens() -> None:
    assert paths_of(Access.KEYED) == {
        "/v1/models",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
        "/version",
    }


@pytest.mark.parametrize(
    "path", ["/invocations", "/metrics", "/docs", "/openapi.json", "/v1/responses/{response_id}", "/ping", "/load"]
)
def test_second_ways_in_and_administration_are_closed(path: str) -> None:  # C7
    assert {row.access for (_, at), row in TABLE.items() if at == path} == {Access.CLOSED}


def test_every_dialect_takes_a_key_and_a_slot() -> None:  # C8
    generating = [row for row in TABLE.values() if row.dialect is not None]
    assert sorted(str(row.dialect) for row in generating) == sorted(Dialect)
    assert all(row.access is Access.KEYED for row in generating)
    assert all(method == "POST" for (method, _), row in TABLE.items() if row.dialect is not None)


def test_only_generation_takes_a_slot() -> None:  # C4
    for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/version")):
        row = find(method, path)
        assert isinstance(row, Route)
        assert row.dialect is None


def test_every_row_has_a_reason() -> None:
    assert all(len(row.why) > 15 for row in TABLE.values())


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", ""),
        ("POST", "/v1/models"),
        ("HEAD", "/health"),
        ("OPTIONS", "/v1/chat/completions"),
        ("post", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/"),
        ("POST", "/v1//chat/completions"),
        ("POST", "//v1/chat/completions"),
        ("POST", "/v1/Chat/completions"),
        ("POST", "/v1/chat/completions\n"),
        ("POST", "/v1/chat/completions?x"),
        ("POST", "/v1/x/../chat/completions"),
        ("POST", "/v1/chat%2Fcompletions"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/responses/resp_1"),
        ("GET", "/metrics/"),
        ("GET", "/static/docs.js"),
        ("POST", "/collective_rpc"),
    ],
)
def test_what_is_not_in_the_table_is_denied(method: str, path: str) -> None:
    assert find(method, path) is None
