"""What the door itself answers: errors in the form of the dialect that was spoken, and plain JSON."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from slimserve.admission.asgi import Message
from slimserve.admission.rejection import Rejected

# Kinds of errors by status, as OpenAI names them, and Anthropic where it differs.
_OPENAI = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC = _OPENAI | {413: "request_too_large", 503: "overloaded_error"}

_CLOSE = ((b"connection", b"close"),)

# Bounds of Retry-After: nobody should ask more often, and nobody who could be served should wait for longer.
LEAST_RETRY_SECONDS, MOST_RETRY_SECONDS = 1, 60


def retry_seconds(estimate: float) -> int:
    """Retry-After for an estimate of the wait in seconds."""
    return max(LEAST_RETRY_SECONDS, min(MOST_RETRY_SECONDS, math.ceil(estimate)))


def error_body(rejected: Rejected, path: str = "") -> dict[str, Any]:
    """The error as JSON data: in Anthropic's form under /v1/messages, which has no place for a code, else in OpenAI's.

    Args:
        rejected: what is to be told.
        path: of the request.
    """
    status = rejected.status
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": rejected.message}}
    kind = _OPENAI.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": rejected.message, "type": kind, "param": rejected.param, "code": rejected.code}}


# The engine repeats what a client wrote, be it a megabyte; nobody reads more than this of an error.
MAX_MESSAGE_CHARACTERS = 16_000

# How the engine words what is about its own inside.
_TOO_LONG = re.compile(r"This model's maximum context length is|.*longer than the maximum model length")
_DEAD = "EngineCore"
_INNER = re.compile(r"\d+ validation errors? for \w+Response")
# An afterthought for programs, which have the field in `param`. It holds no parenthesis but its own.
_AFTERTHOUGHT = re.compile(r"\(parameter=\w++(?:, value=[^()]*+)?\)")
_CHECKED = re.compile(r"\d+ validation errors?(:| for \w+)\n")
# The field and what is wrong with it, in the two ways in which the engine prints pydantic's errors.
_WRONG_FIELD = re.compile(
    r"""'loc':\ '(?:body\.)?(?P<loc>[^']*)',\ 'msg':\ (?P<quote>['"])(?P<msg>.*?)(?P=quote)
    |^(?P<field>\S+)\n\ \ (?P<said>.*?)\ \[type=""",
    re.MULTILINE | re.VERBOSE,
)


# What ends an answer without any fault of the request; a port that is served again knows better when.
_AGAIN = {"Retry-After": "5"}
STOPPED = Rejected(
    503, "the endpoint was stopped before this answer was complete.", code="endpoint_stopped", headers=_AGAIN
)
DIED = Rejected(
    503,
    "the engine died before this answer was complete, and is started again. Send it again.",
    code="engine_died",
    headers=_AGAIN,
)


def engine_refusal(status: int, body: bytes, grammar: str | None = None, *, stopping: bool = False) -> Rejected:
    """What the engine answered instead of a result, as an error of this endpoint.

    Args:
        status: of the answer, 400 to 599.
        body: JSON, in either dialect's form; anything else is put into general words.
        grammar: the field of the request that holds a grammar, which the engine answers with a failure if it cannot
            follow it.
        stopping: whether the endpoint has been told to stop.
    """
    try:
        error = json.loads(body)["error"]
        message, param = _without_afterthought(str(error["message"])[:MAX_MESSAGE_CHARACTERS]), error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        message, param = "", None
    if stopping and status >= 500:
        return STOPPED
    if _DEAD in message:
        return DIED
    if status >= 500 or _INNER.match(message):
        if grammar is not None and status in (400, 500):
            return Rejected(
                400,
                f"{grammar}: the engine cannot follow this grammar; its log says why. Write it more plainly.",
                param=grammar,
                code="invalid_grammar",
            )
        return Rejected(
            max(status, 500),
            "the engine failed at this request; its log says why. Send it again: if that fails too, the request or the"
            " engine is at fault.",
            code="engine_error",
        )
    if _CHECKED.match(message):
        found = [match.groupdict() for match in _WRONG_FIELD.finditer(message)]
        wrong = {each["loc"] or each["field"]: each["msg"] or each["said"] for each in found}
        message = "; ".join(f"{field}: {said}" for field, said in wrong.items()) or message
        param = next(iter(wrong), param)
    elif _TOO_LONG.match(message):
        return Rejected(status, message, param=None, code="context_length_exceeded")
    code = "model_not_found" if status == 404 and "model" in message else "refused_by_engine"
    return Rejected(
        status,
        message or "the engine refused this request without a reason",
        param=param if isinstance(param, str) else None,
        code=code,
    )


def _without_afterthought(message: str) -> str:
    said, _, rest = message.rpartition("(")
    return said.rstrip() if _AFTERTHOUGHT.fullmatch("(" + rest) else message


def status_of(error: bytes) -> int:
    """The status that an error in a stream would have had as an answer of its own."""
    try:
        code = json.loads(error)["error"]["code"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return 500
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def answer(status: int, data: object, headers: Mapping[str, str] | None = None) -> tuple[Message, Message]:
    """The two ASGI messages of a JSON answer; the headers are the program's own, never a request's."""
    body = json.dumps(data).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    head += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    start = {"type": "http.response.start", "status": status, "headers": head}
    return start, {"type": "http.response.body", "body": body, "more_body": False}


@functools.lru_cache(64)
def raw_refusal(rejected: Rejected, path: str, more: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """As `raw_answer`, for one and the same refusal that is told to many."""
    return raw_answer(rejected, path, more=more)


def raw_answer(
    rejected: Rejected, path: str = "", *, more: Iterable[tuple[bytes, bytes]] = _CLOSE, with_body: bool = True
) -> bytes:
    """A whole HTTP/1.1 answer, for where no ASGI is spoken.

    Args:
        rejected: what is to be told.
        path: of the request.
        more: headers; that the connection is to be closed, if nothing else.
        with_body: False for HEAD.
    """
    start, body = answer(rejected.status, error_body(rejected, path), rejected.headers)
    lines = [b"HTTP/1.1 %d %s" % (rejected.status, HTTPStatus(rejected.status).phrase.encode())]
    lines += [b"%s: %s" % header for header in (*start["headers"], *more)]
    head = b"\r\n".join([*lines, b"", b""])
    return head + body["body"] if with_body else head
