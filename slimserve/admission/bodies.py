"""A request's body: read within a limit and a deadline, and taken for JSON strictly.

Every refusal is a 4xx with its reason. What passes is the very JSON that the engine's own reader would see: one object,
in UTF-8, with finite numbers, of a depth that no reader stumbles over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from typing import Any

from slimserve.admission.asgi import Headers, Receive
from slimserve.admission.rejection import Rejected

# A body has so long to come, and a second more for each so many bytes that came: a slow line is served, a trickle is
# not, and neither can hold its slot for long without sending.
BODY_SECONDS = 10.0
BYTES_PER_SECOND = 64 << 10
# So much of a body that nobody waits for may still come in behind the answer; beyond it the connection is closed.
SMALL_BODY_BYTES = 64 << 10
MAX_DEPTH = 100
# Objects and lists in one body, which the engine's reader turns into its own, one by one, while all else waits. A
# conversation of ten thousand turns has as many.
MAX_CONTAINERS = 50_000

_JSON_TYPE = re.compile(rb'application/json(?:\s*;\s*charset\s*=\s*"?utf-?8"?)?\s*;?', re.IGNORECASE)
_OPENING = re.compile(rb"[\[{]")


class Gone(Exception):
    """The client closed its connection before its request was complete."""


def declared_bytes(headers: Headers) -> int | None:
    """What Content-Length says; None: nothing, the body is chunked or there is none."""
    for name, value in headers:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


def is_small(headers: Headers) -> bool:
    """Whether the body, if there is one, is little, of a stated length, and waits for nobody's leave to come."""
    length = 0
    for name, value in headers:
        if name == b"content-length":
            length = int(value) if value.isdigit() else SMALL_BODY_BYTES + 1
        elif name in (b"transfer-encoding", b"expect"):
            return False
    return length <= SMALL_BODY_BYTES


async def read(receive: Receive, headers: Headers, limit: int) -> bytes:
    """The whole body.

    Args:
        receive: ASGI's.
        headers: of the request.
        limit: bytes at most.

    Raises:
        Rejected: 413 when it is too large, 408 when it came too slowly.
        Gone: the client went away.
    """
    if (declared_bytes(headers) or 0) > limit:
        raise _too_large(limit)
    loop = asyncio.get_running_loop()
    begin = loop.time()
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout_at(begin + BODY_SECONDS) as deadline:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                if piece := message.get("body", b""):
                    pieces.append(piece)
                    size += len(piece)
                if size > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
                deadline.reschedule(begin + BODY_SECONDS + size / BYTES_PER_SECOND)
    except TimeoutError:
        raise Rejected(
            408,
            f"the body came too slowly, {size} bytes so far: send it within {BODY_SECONDS:g} s, and a second more for "
            f"each {BYTES_PER_SECOND >> 10} KiB",
            code="body_timeout",
        ) from None


def _too_large(limit: int) -> Rejected:
    return Rejected(413, f"the body is larger than the {limit} bytes that are accepted here", code="body_too_large")


async def drop(receive: Receive, limit: int, seconds: float) -> None:
    """Read what comes and forget it, until the body's end, the client's going away, `limit` bytes or `seconds`."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while size < limit:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                size += len(message.get("body", b""))


def check_type(headers: Headers) -> None:
    """See that the body is declared as plain JSON.

    Raises:
        Rejected: 415.
    """
    kinds = [value for name, value in headers if name == b"content-type"]
    if len(kinds) != 1 or not _JSON_TYPE.fullmatch(kinds[0].strip()):
        raise Rejected(
            415, "the body must be JSON in UTF-8: send `Content-Type: application/json`", code="unsupported_media_type"
        )
    if any(name == b"content-encoding" and value.strip().lower() != b"identity" for name, value in headers):
        raise Rejected(415, "a compressed body is not accepted: send it plain", code="unsupported_encoding")


def parse(body: bytes) -> dict[str, Any]:
    """The body as one JSON object.

    Raises:
        Rejected: 400 with the reason.
    """
    try:
        data = _DECODER.decode(body.decode())
        if b"\\ud" in body or b"\\uD" in body:
            # Half of a surrogate pair is a string that no tokenizer can encode.
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise _bad(f"it is not UTF-8: byte {error.start} does not belong") from None
    except UnicodeEncodeError:
        raise _bad("it escapes half of a surrogate pair") from None
    except json.JSONDecodeError as error:
        raise _bad(f"it is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _bad(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        # `_refuse_constant`, `_finite`, and integers of thousands of digits.
        raise _bad(error.args[0] if isinstance(error, _Number) else "a number in it is too long") from None
    if not isinstance(data, dict):
        raise _bad("it must be one JSON object")
    if len(_OPENING.findall(body)) > MAX_DEPTH:
        _check_shape(data)
    return data


def dump(data: dict[str, Any]) -> bytes:
    """A body that was changed, as bytes."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()


def with_length(headers: Headers, size: int) -> list[tuple[bytes, bytes]]:
    """The headers for a body of another size."""
    kept = [item for item in headers if item[0] not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(size).encode())]


class _Number(ValueError):
    pass


def _refuse_constant(name: str) -> float:
    raise _Number(f"{name} is not a number that JSON knows")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Number("a number in it is too large")
    return value


# One for all: the json module would make a new one for each body.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _check_shape(data: object) -> None:
    level: list[Any] = [data]
    count = 0
    for _ in range(MAX_DEPTH):
        count += len(level)
        if count > MAX_CONTAINERS:
            raise _bad(f"it has more than {MAX_CONTAINERS} objects and lists, such as messages and tools")
        inside = (item.values() if isinstance(item, dict) else item for item in level)
        level = [value for values in inside for value in values if type(value) in (dict, list)]
        if not level:
            return
    raise _bad(f"it is nested deeper than {MAX_DEPTH} levels")


def _bad(reason: str) -> Rejected:
    return Rejected(400, f"the body cannot be read: {reason}", code="invalid_body")
