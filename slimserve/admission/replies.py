"""What the door itself answers: errors in the form of the dialect that was spoken, and plain JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from slimserve.admission.asgi import Message
from slimserve.admission.rejection import Rejected

# Kinds of errors by status, as OpenAI names them, and Anthropic where it differs.
_OPENAI = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC = _OPENAI | {413: "request_too_large", 503: "overloaded_error"}

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


def answer(status: int, data: object, headers: Mapping[str, str] | None = None) -> tuple[Message, Message]:
    """The two ASGI messages of a JSON answer; the headers are the program's own, never a request's."""
    body = json.dumps(data).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    head += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    start = {"type": "http.response.start", "status": status, "headers": head}
    return start, {"type": "http.response.body", "body": body, "more_body": False}


def closing_answer(rejected: Rejected, path: str = "", *, with_body: bool = True) -> bytes:
    """A whole HTTP/1.1 answer, after which the connection is to be closed, for where no ASGI is spoken."""
    start, body = answer(rejected.status, error_body(rejected, path), rejected.headers)
    lines = [b"HTTP/1.1 %d %s" % (rejected.status, HTTPStatus(rejected.status).phrase.encode())]
    lines += [b"%s: %s" % header for header in start["headers"]]
    head = b"\r\n".join([*lines, b"connection: close", b"", b""])
    return head + body["body"] if with_body else head
