"""Numbers in a request: what is no number, or out of range, is refused here, in words.

The engine coerces texts and booleans ("0" is temperature 0.0, `true` is n = 1), cuts some values down in silence, and
lets others through to its sampler or its transport, which cannot hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimserve.admission.rejection import Rejected

MAX_INTEGER = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a field may have.

    Args:
        low: the least one.
        high: the greatest one.
        whole: whether it must be a whole number; 1.0 is one.
        above: whether `low` itself is excluded.
    """

    low: float
    high: float
    whole: bool = False
    above: bool = False

    def holds(self, value: object) -> bool:
        """Whether `value` is a number, and one of these."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not self.low <= value <= self.high:
            return False
        return not (self.above and value == self.low) and not (self.whole and value != int(value))

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} {'above' if self.above else 'from'} {self.low} {'up to' if self.above else 'to'} {self.high}"


RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
    # 0 and -1 both mean that it is off.
    "top_k": Range(-1, MAX_INTEGER, whole=True),
    "min_p": Range(0, 1),
    # The engine takes any positive one; beyond these the logits overflow or all but vanish.
    "repetition_penalty": Range(0.01, 2),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    # The engine coerces or overflows elsewhere in its processes, instead of answering.
    "seed": Range(-(1 << 63), (1 << 63) - 1, whole=True),
    "min_tokens": Range(0, MAX_INTEGER, whole=True),
    "stream_interval": Range(1, MAX_INTEGER, whole=True),
    "thinking_token_budget": Range(-1, MAX_INTEGER, whole=True),
}


def number(body: Mapping[str, Any], field: str, allowed: Range) -> Any:
    """The value of `field`, an int or a float; None when it is absent or null.

    Raises:
        Rejected: it is no number, or outside of `allowed`.
    """
    value = body.get(field)
    if value is None or allowed.holds(value):
        return value
    raise Rejected(400, f"{field} is {shown(value)}; it must be {allowed}.", param=field, code="invalid_value")


def whole(body: Mapping[str, Any], field: str, allowed: Range) -> int | None:
    """As `number`, for a range of whole ones."""
    value = number(body, field, allowed)
    return None if value is None else int(value)


def check_numbers(body: Mapping[str, Any]) -> None:
    """Refuse every sampling value that is wrong in itself.

    Raises:
        Rejected: the first one that is.
    """
    for field in body:
        if allowed := RANGES.get(field):
            number(body, field, allowed)


def shown(value: object) -> str:
    """A value of the request in a message: short, and free of its texts."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, int) and abs(value) > MAX_INTEGER**4:
        return "a number of very many digits"  # printing one takes time in the square of its length
    if isinstance(value, int | float):
        return repr(value)
    return "a text" if isinstance(value, str) else "a list" if isinstance(value, list) else "an object"
