"""Heads of requests that were refused by them: where the same bytes begin a request again, they mean the same.

Those who are refused in a flood mostly come back, and many of them in the same words. What is known need not be parsed;
it is judged anew each time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from slimserve.admission.frames import BLANK_LINE

MOST = 64
MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Head:
    """What a head says.

    Args:
        method, path, headers: as the parser gave them.
        length: of the body, in bytes.
    """

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    length: int


class Heads:
    """The last of them that differ."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Head] = OrderedDict()

    def of(self, data: bytes) -> Head | None:
        """The known head of `data`, if that is one whole request and no more."""
        end = data.find(BLANK_LINE, 0, MOST_BYTES) + len(BLANK_LINE)
        known = self._known.get(data[:end])
        return known if known is not None and end + known.length == len(data) else None

    def learn(self, data: bytes, head: Head) -> None:
        """Know `head` from now on, if `data` is one whole request and no more."""
        end = data.find(BLANK_LINE, 0, MOST_BYTES) + len(BLANK_LINE)
        if end >= len(BLANK_LINE) + 1 and end + head.length == len(data):
            self._known[data[:end]] = head
            if len(self._known) > MOST:
                self._known.popitem(last=False)
