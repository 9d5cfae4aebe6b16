"""Where one request ends in what a client sends: so that the parser is never given bytes of two at once."""

from __future__ import annotations

from slimserve.admission.rejection import Rejected

BLANK_LINE = b"\r\n\r\n"


class Cutter:
    """Cuts the bytes of a connection behind whatever may end a request."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = b""

    def end_of_piece(self, data: bytes, start: int, body_left: int | None) -> int:
        """How far the parser may be fed in one go, at most to a request's end.

        Args:
            data: what came.
            start: of the piece.
            body_left: bytes of a body of known length that are still to come; None or 0: there is none.
        """
        if body_left:
            return min(len(data), start + body_left)
        # A head, a chunked body and its trailers all end with a blank line, which may come in two parts.
        seam = self._last + data[start : start + 3]
        if (at := seam.find(BLANK_LINE)) >= 0:
            end = start + at + len(BLANK_LINE) - len(self._last)
        elif (at := data.find(BLANK_LINE, start)) >= 0:
            end = at + len(BLANK_LINE)
        else:
            end = len(data)
        self._last = (self._last + data[max(start, end - 3) : end])[-3:]
        return end


def declared_length(headers: list[tuple[bytes, bytes]], version: str) -> int | None:
    """Bytes of the body by its head; None: there is none, or its coding says where it ends.

    Args:
        headers: names in lower case, as the parser has checked them.
        version: of HTTP.

    Raises:
        Rejected: 400, the body comes in a coding that is not understood.
    """
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or version == "1.0"):
        raise Rejected(
            400,
            "this transfer coding is not understood: send the body plain, with its length or chunked",
            code="unsupported_transfer_coding",
        )
    return next((int(value) for name, value in headers if name == b"content-length"), None)


def invalid() -> Rejected:
    """The refusal of what no request looks like."""
    return Rejected(400, "this is not a valid HTTP request", code="invalid_http")
