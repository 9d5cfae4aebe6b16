"""The one exception of the door: a request that is answered with an error instead of being passed on."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

# OpenAI's names for kinds of errors, by status; Anthropic's dialect has its own table in `replies`.
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Rejected(Exception):
    """A request that the engine never sees.

    Args:
        status: of the answer, 400 to 599.
        message: what is wrong, why, and what to do; it goes to the client as it is, so no secret is in it.
        param: the field of the body that is meant.
        code: a stable word for programs, such as `slots_exhausted`.
        headers: extra headers of the answer, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = HTTPStatus(status)
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's `error.type`."""
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
