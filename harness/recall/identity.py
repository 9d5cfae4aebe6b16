"""Whether two answers to the same request are the same, as far as an engine can be held to it.

Between a prompt that was computed whole and one whose beginning came from a cache the order of additions differs, and
with it the last bits of the logits. So logprobs are compared within a tolerance, and two texts may part at a near-tie:
where both tokens are as likely as each other within the tolerance, in both answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.recall.asking import Answer, Token

TOLERANCE = 0.3
"""Natural logarithm. Logits of 16 to 32 lie 0.125 apart in bf16: two steps of them, and a little for the sum."""
LIKELY = -3.0
"""Tokens less likely than e^-3 (5%) in both answers are not compared: no text depends on them, and their logits are
the smallest."""

Outcome = Literal["same", "near-tie", "different", "not compared"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to one request.

    Args:
        conversation: whose request it was.
        paths: how the two were asked, such as `cold` and `hit`.
        what: the first token's logprobs, or the text.
        outcome: `near-tie` counts as the same.
        difference: the greatest of the logprobs compared; None for a text that is the same.
        reason: in words, when it is not the same.
    """

    conversation: str
    paths: tuple[str, str]
    what: Literal["first token", "text"]
    outcome: Outcome
    difference: float | None = None
    reason: str = ""


def compare_first(conversation: str, paths: tuple[str, str], one: Answer, two: Answer, tolerance: float) -> Comparison:
    """The logprobs of the first token, of all tokens that are likely in either."""
    if not one.tokens or not two.tokens or not one.tokens[0].top or not two.tokens[0].top:
        return Comparison(conversation, paths, "first token", "not compared", None, "the server sent no logprobs")
    first, second = one.tokens[0].top, two.tokens[0].top
    greatest, token = max([*_differences(first, second), *_differences(second, first), (0.0, "")])
    if greatest <= tolerance:
        return Comparison(conversation, paths, "first token", "same", round(greatest, 4))
    reason = f"the logprob of {token!r} differs by {greatest:.3f}, more than {tolerance:g}"
    return Comparison(conversation, paths, "first token", "different", round(greatest, 4), reason)


def compare_text(conversation: str, paths: tuple[str, str], one: Answer, two: Answer, tolerance: float) -> Comparison:
    """Token for token, up to the first near-tie: from there on two right answers may go different ways."""
    if one.error or two.error:
        return Comparison(conversation, paths, "text", "not compared", None, "one of the answers is missing")
    if one.text == two.text and one.calls == two.calls:
        return Comparison(conversation, paths, "text", "same")
    for index, (first, second) in enumerate(zip(one.tokens, two.tokens, strict=False)):
        if first.text == second.text:
            continue
        gap = max(_gap(first, second.text), _gap(second, first.text))
        if gap <= tolerance:
            return Comparison(conversation, paths, "text", "near-tie", round(gap, 4), f"at token {index}")
        reason = f"token {index} is {first.text!r} in one and {second.text!r} in the other"
        return Comparison(conversation, paths, "text", "different", round(gap, 4) if gap < 100 else None, reason)
    return Comparison(conversation, paths, "text", "different", None, f"{one.text[:40]!r} and {two.text[:40]!r}")


def _differences(one: dict[str, float], two: dict[str, float]) -> list[tuple[float, str]]:
    """For each token that is likely in `one`: how far it is from there to `two`."""
    # A token that is not among the other's likeliest is at most as likely as the last of those.
    least = min(two.values(), default=-100.0)
    return [(abs(logprob - two.get(token, least)), token) for token, logprob in one.items() if logprob >= LIKELY]


def _gap(taken: Token, other: str) -> float:
    return abs(taken.logprob - taken.top.get(other, -1000.0))
