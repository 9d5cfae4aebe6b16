"""Who comes through the door: every row of the table, with and without a key, and no key in what is left behind."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from slimserve.admission.config import Config
from slimserve.admission.keys import digest
from slimserve.admission.middleware import Admission
from slimserve.admission.routes import ANY, TABLE, Access

KEY = "sk-slim-a-key-that-must-not-show"
WRONG = "sk-slim-another-that-must-not-show"
Headers = list[tuple[bytes, bytes]]
BEARER: Headers = [(b"authorization", b"Bearer " + KEY.encode())]


class Engine:
    """What is behind the door: says `through` to everything."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append((scope["method"], scope["path"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b'"through"'})


class Door:
    """A door with an engine behind it, called in process."""

    def __init__(self, **options: Any) -> None:
        self.engine = Engine()
        self.admission = Admission(self.engine, Config(max_in_flight=4, max_model_len=1000, **options))

    def ask(
        self, method: str, path: str, headers: Headers | None = None, **scope: Any
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """Status, headers and body of the answer."""
        body = b'{"messages": []}'
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        request = {
            "type": "http",
            "method": method,
            "path": path,
            "root_path": "",
            "query_string": b"",
            "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 40000),
            "headers": own + (headers or []),
        }
        asyncio.run(self.admission(request | scope, receive, send))
        answered = dict(sent[0]["headers"])
        return sent[0]["status"], answered, b"".join(message.get("body", b"") for message in sent[1:])


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"alice sha256:{digest(KEY)}\n")
    file.chmod(0o600)
    return file


@pytest.mark.parametrize("row", sorted(TABLE))
def test_each_row_is_what_the_table_says(row: tuple[str, str], keys_file: Path) -> None:  # C7, C8
    method, path = row
    access, door = TABLE[row].access, Door(keys_file=str(keys_file))
    method = "POST" if method == ANY else method
    without, _, body = door.ask(method, path)
    assert without == {Access.OPEN: 200, Access.KEYED: 401, Access.CLOSED: 404}[access], body
    with_wrong, _, _ = door.ask(method, path, [(b"x-api-key", WRONG.encode())])
    assert with_wrong == without
    assert door.engine.seen == ([row, row] if access is Access.OPEN else [])
    with_key, _, body = door.ask(method, path, BEARER)
    assert with_key == (404 if access is Access.CLOSED else with_key)
    assert (row in door.engine.seen) == (access is not Access.CLOSED and with_key == 200)
    assert with_key not in (401, 403)


def test_the_first_key_closes_a_door_that_was_open(keys_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimserve.admission.keys.REREAD_SECONDS", 0)
    later = keys_file.rename(keys_file.with_name("later"))
    door = Door(keys_file=str(keys_file), keys_file_awaited=True)
    assert door.ask("GET", "/v1/models")[0] == 200
    later.rename(keys_file)
    assert door.ask("GET", "/v1/models")[0] == 401
    assert door.ask("GET", "/v1/models", BEARER)[0] == 200


def test_a_refusal_has_the_form_of_its_dialect(keys_file: Path) -> None:
    door = Door(keys_file=str(keys_file))
    status, headers, body = door.ask("POST", "/v1/chat/completions")
    error = json.loads(body)["error"]
    assert (status, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
    assert headers[b"www-authenticate"] == b"Bearer"
    anthropic = json.loads(door.ask("POST", "/v1/messages")[2])
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "authentication_error")


@settings(max_examples=500)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"]),
    path=st.one_of(
        st.text(max_size=30), st.sampled_from(sorted(path for _, path in TABLE)).map(lambda path: path + "/")
    ),
)
def test_what_is_not_in_the_table_does_not_reach_the_engine(method: str, path: str) -> None:
    door = Door(key_hashes={"environment": digest(KEY)})
    status, _, _ = door.ask(method, path, BEARER)
    assert status == 404 or (method, path) in TABLE
    assert not door.engine.seen or (method, path) in TABLE


def test_a_prefix_that_the_router_would_cut_off_is_denied() -> None:
    door = Door()
    assert door.ask("POST", "/v1/models/invocations", root_path="/v1/models")[0] == 404
    assert door.ask("GET", "/v1/models", root_path="/v1/models")[0] == 404
    assert not door.engine.seen


def test_a_websocket_is_closed() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": BEARER, "server": ("127.0.0.1", 8000)}
    door = Door()
    asyncio.run(door.admission(scope, asyncio.Event().wait, send))  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert not door.engine.seen


# Web pages.


def test_without_keys_a_page_that_was_not_named_gets_nothing() -> None:  # C9
    door = Door()
    for origin in (b"http://evil.example:8000", b"null", b"", b"http://127.0.0.1:8000"):
        status, headers, body = door.ask("GET", "/v1/models", [(b"origin", origin)])
        assert status == 403
        assert json.loads(body)["error"]["code"] == "origin_not_allowed"
        assert not [name for name in headers if name.startswith(b"access-control")]
    assert door.ask("OPTIONS", "/v1/models", [(b"origin", b"http://evil.example")])[0] == 405
    assert not door.engine.seen
    assert door.ask("GET", "/v1/models")[0] == 200


@pytest.mark.parametrize("keyed", [False, True])
def test_a_page_that_was_named_may_call(keyed: bool) -> None:
    hashes = {"environment": digest(KEY)} if keyed else {}
    door = Door(origins=("http://chat.example",), key_hashes=hashes)
    page = [(b"origin", b"http://chat.example")]
    preflight = [
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", b"authorization,content-type"),
    ]
    status, headers, _ = door.ask("OPTIONS", "/v1/chat/completions", page + preflight)
    assert (status, headers[b"access-control-allow-origin"]) == (200, b"http://chat.example")
    status, headers, _ = door.ask("GET", "/v1/models", page + (BEARER if keyed else []))
    assert (status, headers[b"access-control-allow-origin"]) == (200, b"http://chat.example")
    if keyed:  # the page can read why
        status, headers, _ = door.ask("GET", "/v1/models", page)
        assert (status, headers[b"access-control-allow-origin"]) == (401, b"http://chat.example")
    other = [(b"origin", b"http://evil.example")]
    assert door.ask("OPTIONS", "/v1/chat/completions", other + preflight)[0] == 400
    assert b"access-control-allow-origin" not in door.ask("GET", "/v1/models", other)[1]


# What is left behind.


def test_no_key_shows_anywhere(keys_file: Path, caplog: pytest.LogCaptureFixture) -> None:  # C9
    caplog.set_level(logging.DEBUG)
    door = Door(keys_file=str(keys_file), key_hashes={"environment": digest("sk-env-that-must-not-show")})
    left = []
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/models", "/invocations", "/nowhere"):
        for key in (KEY, WRONG, "sk-env-that-must-not-show", KEY + "\xfc", KEY + " " + WRONG, KEY * 100):
            for headers in (
                [(b"authorization", b"Bearer " + key.encode("latin-1"))],
                [(b"x-api-key", key.encode("latin-1"))],
            ):
                for method in ("GET", "POST"):
                    left.append(repr(door.ask(method, path, headers)))
    keys_file.write_text(KEY)  # the slip of whoever pastes the key itself
    door.admission._keyring._due = 0.0
    left.append(repr(door.ask("GET", "/v1/models", BEARER)))
    left += [caplog.text, generate_latest().decode(), repr(door.admission.config), door.admission.config.to_text()]
    assert "the keys stay as they were" in caplog.text
    assert "that-must-not-show" not in "".join(left)
