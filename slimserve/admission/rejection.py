"""The one exception of the door: a request that is answered with an error instead of being passed on."""

from __future__ import annotations

from collections.abc import Mapping


class Rejected(Exception):
    """A request that the engine never sees.

    Args:
        status: of the answer, 400 to 599.
        message: what is wrong, why, and what to do; it goes to the client as it is, so no secret is in it.
        code: a stable word for programs and counters, such as `too_many_in_flight`.
        param: the field of the body that is meant.
        headers: extra headers of the answer, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}
