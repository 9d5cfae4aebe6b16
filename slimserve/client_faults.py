"""What can go wrong between the client and a server, and the sentence for each.

Failed
|- Unreachable    no connection, or no answer in time
|  |- NoListener  the connection was refused
|  `- Silent      the deadline passed: while connecting, or with the connection taken and no answer given
|- HttpError      an answer whose status is not 200
|- BrokenStream   an answer that began and is cut short, or is not what the protocol says
`- Stopped        a `Stop` was requested
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from slimserve.errors import Failed, Finding

EXCERPT_CHARACTERS = 80


class Unreachable(Failed):
    """No connection, or no answer in time."""


class NoListener(Unreachable):
    """The connection was refused: nobody listens there."""


class Silent(Unreachable):
    """The deadline passed while connecting, or with the connection taken and no answer given."""


class HttpError(Failed):
    """The server answered with a status other than 200."""

    def __init__(self, status: int, finding: Finding) -> None:
        self.status = status
        super().__init__(finding)


class BrokenStream(Failed):
    """The answer is cut short, or is not what the protocol says."""


class Stopped(Failed):
    """A `Stop` was requested while the answer was awaited."""


@dataclass(frozen=True)
class Endpoint:
    """Where to ask, and whom.

    Args:
        base_url: the root of the API with its version, such as `http://127.0.0.1:8000/v1`.
        model: the name under which the server lists the model.
        api_key: sent as a bearer token; None sends none. Kept out of the representation.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)


def cut_short() -> Finding:
    """The finding for an answer whose end never came."""
    return Finding(
        "the connection ended before the answer was complete",
        "a complete answer closes with a finish reason: the server was stopped, or its engine died",
        "look at the end of the engine's log, whose path is printed when it starts, and ask again",
    )


def not_a_stream(endpoint: Endpoint, found: str, rule: str) -> Finding:
    """The finding for something that no server of this protocol sends."""
    return Finding(
        f"the server sent {found}",
        rule,
        f"check that {endpoint.base_url} is an OpenAI-compatible endpoint, with no proxy that rewrites its answers",
    )


def excerpt(text: str) -> str:
    """The beginning of a text that a server sent, quoted, its control characters escaped."""
    return repr(text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS] + "...")


def decode_json(raw: str | bytes) -> object:
    """`json.loads`, for which a server's nesting without end is one more text that is no JSON.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        decoded: object = json.loads(raw)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return decoded


def error_message(body: object) -> tuple[str, str]:
    """The message and the code of an OpenAI error body, each empty when there is none."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or error.get("type") or ""), str(error.get("code") or "")
    return (error if isinstance(error, str) else ""), ""


def status_finding(endpoint: Endpoint, status: int, reason: str, raw: bytes) -> Finding:
    """The finding for an answer whose status is not 200, from its OpenAI error body where it has one."""
    text = raw.decode(errors="replace").strip()
    try:
        message, code = error_message(decode_json(text))
    except ValueError:
        message, code = "", ""
    message = message or (excerpt(text) if text else "no explanation came with it")
    why, do = _status_advice(endpoint, status, code)
    return Finding(f"the server answered {status} {reason}".rstrip() + f": {message}", why, do)


_TO_COME = ("it is not ready yet", "wait until it is, as `slimserve --status` tells, and ask again")
_ANEW = ("its engine died and is started again", "wait until it is ready, as `slimserve --status` tells, and ask again")
_TO_END = ("it was told to stop, and does not come back by itself", "start it again: slimserve PROFILE --serve")
# Why and what to do, by the code of a 503: an endpoint of ours says by it where it stands.
ADVICE_BY_CODE = {
    "endpoint_starting": _TO_COME,
    "endpoint_fetching": _TO_COME,
    "endpoint_loading": _TO_COME,
    "endpoint_warming": _TO_COME,
    "endpoint_restarting": _ANEW,
    "engine_died": _ANEW,
    "endpoint_draining": _TO_END,
    "endpoint_stopped": _TO_END,
    "draining": _TO_END,
    "endpoint_failed": (
        "its engine crashed too often, and it does not come back by itself",
        "see why with `slimserve --status`, stop it, and start it again: slimserve PROFILE --serve",
    ),
    "too_many_connections": ("it has as many connections as it takes", "wait for a moment and ask again"),
}


def _status_advice(endpoint: Endpoint, status: int, code: str) -> tuple[str, str]:
    if status in (401, 403):
        sent = "the key that was sent is not the server's" if endpoint.api_key else "no key was sent"
        why = f"the server asks for an API key, and {sent}"
        return why, "set SLIMSERVE_API_KEY to one of its keys; `slimserve --add-key NAME` makes one"
    if status == 404:
        return (
            f"it serves no model named {endpoint.model!r}, or has no such route",
            f"compare with the names under {endpoint.base_url}/models",
        )
    if status == 429:
        return "it has as many requests in flight as it admits", "wait for a moment and ask again"
    if status == 503:
        return ADVICE_BY_CODE.get(code, ("it takes no requests at the moment", "wait for a moment and ask again"))
    if status >= 500:
        return (
            "it broke while it worked on the request",
            "look at the end of the engine's log, whose path is printed when it starts",
        )
    if status >= 400:
        return (
            "the server will not run this request as it is",
            "mend what its message names; a conversation that outgrew the context starts afresh with /clear",
        )
    return "only 200 carries an answer", f"check that {endpoint.base_url} is the endpoint itself and not a redirect"
