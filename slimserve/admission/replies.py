"""What the door itself answers: errors in the form of the dialect that was spoken, and plain JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slimserve.admission.rejection import Rejected

# Anthropic's names for kinds of errors, by status.
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(rejected: Rejected, path: str = "") -> dict[str, Any]:
    """The error as JSON data: in Anthropic's form under /v1/messages, else in OpenAI's.

    Args:
        rejected: what is to be told.
        path: of the request.
    """
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC.get(rejected.status, "invalid_request_error" if rejected.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": rejected.message}}
    error = {"message": rejected.message, "type": rejected.kind, "param": rejected.param, "code": rejected.code}
    return {"error": error}


def answer(
    status: int, data: object, headers: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two ASGI messages of a JSON answer; the headers are the program's own, never a request's."""
    body = json.dumps(data).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    head += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    start = {"type": "http.response.start", "status": int(status), "headers": head}
    return start, {"type": "http.response.body", "body": body, "more_body": False}
