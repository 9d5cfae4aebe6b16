"""Every route of the engine's app, and what the door makes of it: open, keyed or closed. What is not here is denied.

The app is the pinned engine's, built with the tasks and flags that we launch it with; a test walks the real one and
fails on a route that this table lacks, and on a row that the app has no more.

A path counts as the router sees it, `scope["path"]`: decoded, case and all. It is looked up whole, so that nothing
which the router would still match in some other way (a trailing slash, a line feed at the end, a mount, a parameter)
gets in. Closed rows are here to show that each was decided on; whether a lookup finds one or nothing, the answer is
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from slimserve.admission.rejection import Rejected


class Access(StrEnum):
    """Who may take a route."""

    OPEN = "open"
    KEYED = "keyed"
    CLOSED = "closed"


class Dialect(StrEnum):
    """The form of a request that generates, and of its answer."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"
    BATCH_CHAT = "batch_chat"


@dataclass(frozen=True, slots=True)
class Route:
    """What the door makes of one method on one path.

    Args:
        access: who may take it; `KEYED` is open to all where no key is asked for.
        dialect: how it generates, which takes a slot; None: it does not.
        why: the reason.
    """

    access: Access
    dialect: Dialect | None
    why: str


# The method of a mounted application, which takes them all.
ANY = "*"

_GENERATES: Mapping[str, tuple[Dialect, str]] = {
    "/v1/chat/completions": (Dialect.CHAT, "what most clients speak"),
    "/v1/chat/completions/batch": (Dialect.BATCH_CHAT, "several conversations at once; each counts towards the cap"),
    "/v1/completions": (Dialect.COMPLETIONS, "plain continuation, and prompts given as token ids"),
    "/v1/responses": (Dialect.RESPONSES, "OpenAI's newer form, which its agents speak"),
    "/v1/messages": (Dialect.ANTHROPIC, "Anthropic's form, which its agents speak"),
}

_KEYED: Mapping[tuple[str, str], str] = {
    ("GET", "/v1/models"): "clients ask it for the name of the model",
    ("POST", "/v1/messages/count_tokens"): "agents measure their context before they send it",
    ("POST", "/tokenize"): "exact counts of tokens; it costs CPU time, so strangers do not get it",
    ("POST", "/detokenize"): "the way back from /tokenize",
    ("GET", "/version"): "tells a stranger which faults to try; whoever has a key may know",
}

_WORKS_UNASKED = "generates without the rules that the other dialects are held to, and nothing here speaks it"
_RENDERS = "shows the chat template and tokens of a request; the engine itself answers 403 unless scaled out"
_DESCRIBES = "describes every route, closed ones too, and the page loads scripts from elsewhere"
_FORGETS = "answers are not kept between requests; whoever guesses an id would read or stop another's"
_SCALES = "changes the engine while it serves"

_CLOSED: Mapping[str, tuple[str, ...]] = {
    "/ping": ("GET", "POST", "a hosting service's name for /health; one way to ask is enough"),
    "/invocations": ("POST", "takes any dialect's body, so a second way in that none of the rules would see"),
    "/v1/systemone": ("POST", _WORKS_UNASKED),
    "/generative_scoring": ("POST", _WORKS_UNASKED),
    "/inference/v1/generate": ("POST", _WORKS_UNASKED),
    "/inference/v1/abort_requests": ("POST", "ends requests by id, whosever they are"),
    "/v1/responses/{response_id}": ("GET", _FORGETS),
    "/v1/responses/{response_id}/cancel": ("POST", _FORGETS),
    "/v1/chat/completions/render": ("POST", _RENDERS),
    "/v1/completions/render": ("POST", _RENDERS),
    "/v1/responses/render": ("POST", _RENDERS),
    "/v1/messages/render": ("POST", _RENDERS),
    "/v1/chat/completions/derender": ("POST", _RENDERS),
    "/v1/completions/derender": ("POST", _RENDERS),
    "/metrics": ("GET", "belongs to the operator; the operator page shows it on loopback"),
    "/metrics/{path:path}": (ANY, "the same, mounted"),
    "/load": ("GET", "the engine does not count it as we launch it; the door's own numbers are the operator's"),
    "/kv_event_sources": ("GET", "names addresses inside the engine"),
    "/scale_elastic_ep": ("POST", _SCALES),
    "/is_scaling_elastic_ep": ("POST", _SCALES),
    "/openapi.json": ("GET", "HEAD", _DESCRIBES),
    "/docs": ("GET", "HEAD", _DESCRIBES),
    "/docs/oauth2-redirect": ("GET", "HEAD", _DESCRIBES),
    "/redoc": ("GET", "HEAD", _DESCRIBES),
}


def _table() -> dict[tuple[str, str], Route]:
    table = {("GET", "/health"): Route(Access.OPEN, None, "balancers and monitors ask it, without a secret to keep")}
    table |= {
        ("POST", path): Route(Access.KEYED, dialect, f"generates: {why}") for path, (dialect, why) in _GENERATES.items()
    }
    table |= {key: Route(Access.KEYED, None, why) for key, why in _KEYED.items()}
    for path, (*methods, why) in _CLOSED.items():
        table |= {(method, path): Route(Access.CLOSED, None, why) for method in methods}
    return table


# (method, path as the app declares it) -> what the door makes of it.
TABLE: Mapping[tuple[str, str], Route] = MappingProxyType(_table())


def no_such_route(method: str, path: str) -> Rejected:
    """What a request is told for which there is no row, or a closed one."""
    methods = sorted(known for (known, at), route in TABLE.items() if at == path and route.access is not Access.CLOSED)
    if not methods or method in methods:
        return Rejected(404, f"there is no route {path[:80]!a} here, or it is closed", code="no_such_route")
    allowed = ", ".join(methods)
    return Rejected(405, f"{path} takes {allowed}", code="method_not_allowed", headers={"Allow": allowed})


def find(method: str, path: str) -> Route | None:
    """The row for a request; None when there is none, which is to be denied as a closed one is.

    The path must be all that the router goes by: with a `root_path` in the scope the router would cut that off first.

    Args:
        method: as in `scope["method"]`, upper case.
        path: as in `scope["path"]`, decoded.
    """
    return TABLE.get((method, path))
