"""The table of routes against the app that the pinned engine really builds from our arguments."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_support import NAMES, parse
from server_support import KEY, Server

from slimserve.admission import routes


def build(profile_id: str) -> Any:
    """The engine's app for the arguments of a profile; without our middleware, which is not a route."""
    _, _, arguments = parse(profile_id)
    from vllm.entrypoints.launchers.app import build_app

    arguments.middleware = []
    return build_app(arguments, ("generate",), None)


@pytest.fixture(scope="module")
def app() -> Any:
    return build("smollm2-135m-bf16-cpu")


def declared(app: Any) -> Iterator[tuple[str, str]]:
    """Every (method, path) of an app, in the form of the table."""
    from starlette.routing import Mount, Route

    for route in app.routes:
        if isinstance(route, Mount):
            yield routes.ANY, route.path + "/{path:path}"
        elif isinstance(route, Route):
            assert route.methods, f"{route.path} takes every method"
            yield from ((method, route.path) for method in route.methods)
        else:
            yield type(route).__name__, getattr(route, "path", "?")


def taken_by(app: Any, method: str, path: str) -> Any:
    """The route that the engine's router hands a request to."""
    from starlette.routing import Match

    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    return next((route for route in app.router.routes if route.matches(dict(scope))[0] is Match.FULL), None)


@pytest.mark.parametrize("profile_id", NAMES)
def test_the_table_is_the_app(profile_id: str) -> None:  # C7
    found = set(declared(build(profile_id)))
    assert not found - set(routes.TABLE), "routes that nobody has decided about"
    assert not set(routes.TABLE) - found, "rows about routes that are no more"


def test_the_tasks_are_the_real_engines(server: Server) -> None:
    assert re.search(r"Supported tasks: [(\[]'generate',?[)\]]\n", server.engine_log.read_text())


def home(server: Server) -> Path:
    return Path(server.environment["HOME"])


def ask(server: Server, method: str, path: str, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        body = b"{}" if method == "POST" else None
        connection.request(method, path, body, {"content-type": "application/json", **headers})
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_running_endpoint_keeps_to_the_table(server: Server) -> None:  # C7, C8
    for (method, path), row in routes.TABLE.items():
        request = ("POST" if method == routes.ANY else method, path.replace("{path:path}", "x"))
        without = ask(server, *request, {})
        with_wrong = ask(server, *request, {"authorization": f"Bearer {KEY}x"})
        with_key = ask(server, *request, {"x-api-key": KEY})
        if row.access is routes.Access.KEYED:
            assert (without, with_wrong) == (401, 401), request
            assert with_key in (200, 400), request
        else:
            expected = 200 if row.access is routes.Access.OPEN else 404
            assert {without, with_wrong, with_key} == {expected}, request
    assert ask(server, "POST", "/v1%2Fchat/completions", {}) == 401
    for path in ("/v1/chat/completions/", "//v1/chat/completions", "/v1/chat/completions%0A", "/x/../invocations"):
        assert ask(server, "POST", path, {"x-api-key": KEY}) == 404


def test_no_key_is_in_an_argument_list_an_engines_environment_or_a_file(server: Server) -> None:  # C9
    ask(server, "GET", "/v1/models", {"x-api-key": KEY})
    ask(server, "GET", "/v1/models", {"x-api-key": "sk-a-wrong-one"})
    secrets = (KEY.encode(), b"sk-a-wrong-one")
    engines = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments, environment = ((process / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue  # it is gone, or somebody else's
        assert not any(secret in arguments for secret in secrets)
        if environment.find(b"SLIMSERVE_ENGINE_TAG=") >= 0 and str(home(server)).encode() in environment:
            engines += 1
            assert not any(secret in environment for secret in secrets), arguments
    assert engines >= 2
    for file in home(server).rglob("*"):
        if file.is_file():
            assert not any(secret in file.read_bytes() for secret in secrets), file
    assert not any(secret.decode() in line for secret in secrets for line in server.words)


def test_the_router_goes_by_the_path_alone(app: Any) -> None:
    assert not app.root_path


def test_a_new_route_would_be_found(app: Any) -> None:
    from fastapi import FastAPI

    changed = FastAPI(openapi_url=None)
    changed.router.routes.extend(app.router.routes)
    changed.add_api_route("/v1/chat/completions/new", lambda: None, methods=["POST"])
    changed.add_api_websocket_route("/v1/realtime", lambda: None)
    changed.mount("/static", FastAPI())
    new = {("POST", "/v1/chat/completions/new"), ("APIWebSocketRoute", "/v1/realtime"), ("*", "/static/{path:path}")}
    assert set(declared(changed)) - set(routes.TABLE) == new


ODD = st.sampled_from(["/", "//", "/.", "/..", "\n", "\r", "\0", " ", ";x", "?", "#", "%", "%2F", "\u00df", "x", "S"])
METHODS = st.sampled_from(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "get", "Post", ""])


@st.composite
def paths(draw: st.DrawFn) -> str:
    """Paths near those of the table, as `scope["path"]` has them."""
    path = draw(st.sampled_from(sorted(path for _, path in routes.TABLE)))
    path = path.replace("{response_id}", "resp_1").replace("{path:path}", "x")
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(path)))
        kind = draw(st.sampled_from(["insert", "drop", "case", "encode", "join"]))
        if kind == "insert":
            path = path[:at] + draw(ODD) + path[at:]
        elif kind == "drop":
            path = path[:at] + path[at + 1 :]
        elif kind == "case":
            path = path[:at] + path[at:].swapcase()
        elif kind == "encode":
            path = unquote(quote(path, safe="").replace("%2F", "/", at % 3))
        else:
            path += draw(st.sampled_from(sorted(path for _, path in routes.TABLE)))
    return path


@settings(max_examples=2000)
@given(method=METHODS, path=paths())
def test_what_is_admitted_is_what_the_router_runs(app: Any, method: str, path: str) -> None:
    row = routes.find(method, path)
    if row is None or row.access is routes.Access.CLOSED:
        return
    taken = taken_by(app, method, path)
    assert taken is not None
    assert taken.path == path
    assert method in taken.methods


def test_the_router_matches_more_than_the_table(app: Any) -> None:
    # What makes the exact lookup necessary: a pattern that ends in `$` also matches before a last line feed.
    assert taken_by(app, "POST", "/v1/completions\n") is not None
    assert routes.find("POST", "/v1/completions\n") is None
    assert taken_by(app, "GET", "/metrics/x") is not None
    assert routes.find("GET", "/metrics/x") is None
