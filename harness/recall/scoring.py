"""From answers to rates: what an answer is, how often it is right, and what that proves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from harness.recall.conversation import Question
from harness.recall.markers import codes_in, labels_in

Path = Literal["cold", "hit", "resumed"]
Verdict = Literal["pass", "fail", "inconclusive"]
Outcome = Literal["right", "previous", "leak", "other", "several", "none", "repeats", "empty", "wrong call", "failed"]

OUTCOMES: dict[str, str] = {
    "right": "the answer to this turn's question, and no other marker",
    "previous": "the answer to the turn before",
    "leak": "a marker of another conversation, which this one never contained",
    "other": "another marker of the same conversation, or a number of seven digits that was nowhere",
    "several": "the right marker among others",
    "none": "text without any marker, or without the known answer",
    "repeats": "one character over and over",
    "empty": "no content: nothing at all, or a thought alone",
    "wrong call": "no tool call, or one with other arguments",
    "failed": "no answer: refused, broken off, or too late",
}
Z = 1.959964
"""Of the normal distribution, for 95%."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One question and what became of it.

    Args:
        conversation: its id.
        kind: code, place, known, call (of a tool) or slip (its result).
        path: how much of the prompt the engine had to have in its cache: nothing, its beginning, or what an eviction
            left of it.
        sampling: the server's own, or greedy.
        context_tokens: asked for; 0 where there is no document.
        depth: of the fact, 0 to 1; None for a note or where there is no document.
        note: the fact is a note's.
        turn: from 0.
        expected: what a right answer contains.
        outcome: one of OUTCOMES.
        text: the beginning of the answer.
        prompt_tokens, cached_tokens: from `usage`.
        reason: what is wrong, where the outcome does not say it.
    """

    conversation: str
    kind: Literal["code", "place", "known", "call", "slip"]
    path: Path
    sampling: Literal["own", "greedy"]
    context_tokens: int
    depth: float | None
    note: bool
    turn: int
    expected: str
    outcome: Outcome
    text: str
    prompt_tokens: int | None
    cached_tokens: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """How often the probes of one kind were right.

    Args:
        name: what they have in common.
        right, asked: counts.
        low, high: Wilson's interval of the rate, 95%.
        required: the battery passes only if this group does; another one may only not fail.
        verdict: `pass` when the whole interval lies at or above the floor, `fail` when it lies below.
    """

    name: str
    right: int
    asked: int
    low: float
    high: float
    required: bool
    verdict: Verdict


def wilson(right: int, asked: int) -> tuple[float, float]:
    """The 95% interval of a rate.

    Source: Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927), 209-212.
    """
    if not asked:
        return 0.0, 1.0
    rate = right / asked
    middle = rate + Z * Z / (2 * asked)
    half = Z * math.sqrt(rate * (1 - rate) / asked + Z * Z / (4 * asked * asked))
    scale = 1 + Z * Z / asked
    # At the ends the interval touches 0 and 1 exactly; rounding would leave it a hair off.
    low = 0.0 if right == 0 else (middle - half) / scale
    return low, 1.0 if right == asked else (middle + half) / scale


def judge_rate(right: int, asked: int, floor: float) -> Verdict:
    """Whether a rate is proved to be at least `floor`, or below it."""
    low, high = wilson(right, asked)
    return "pass" if low >= floor else "fail" if high < floor else "inconclusive"


def outcome_of(
    text: str, question: Question, previous: Question | None, own: frozenset[str], others: frozenset[str]
) -> Outcome:
    """What an answer about a marker is.

    Args:
        text: the answer.
        question: that it should answer.
        previous: the question of the turn before; None in the first.
        own: the markers of this conversation.
        others: those of all other conversations that this one does not contain.
    """
    if bare := _bare(text):
        return bare
    codes, labels = codes_in(text), labels_in(text)
    if any(code in others and code not in own for code in codes):
        return "leak"
    found = codes if question.kind == "code" else labels
    if question.expected in found:
        return "right" if len(found) == 1 else "several"
    if previous is not None and previous.expected in (codes if previous.kind == "code" else labels):
        return "previous"
    return "other" if found else "none"


def outcome_of_slip(text: str, slip: str, own: frozenset[str], others: frozenset[str]) -> Outcome:
    """What an answer is that should report the number on a slip; it may name the code of the locker besides."""
    if bare := _bare(text):
        return bare
    codes = codes_in(text)
    if any(code in others and code not in own for code in codes):
        return "leak"
    return "right" if slip in codes else "other" if codes else "none"


def _bare(text: str) -> Literal["empty", "repeats"] | None:
    letters = "".join(text.split())
    if not letters:
        return "empty"
    return "repeats" if len(letters) >= 8 and len(set(letters)) == 1 else None


def groups_of(probes: list[Probe], floor: float) -> list[Group]:
    """The rates of everything that a fault may be confined to."""
    recall = [probe for probe in probes if probe.kind in ("code", "place")]
    result = [
        *_by(recall, floor, True, lambda probe: f"path {probe.path}"),
        *_by(probes, floor, True, lambda probe: "tools" if probe.kind in ("call", "slip") else None),
        *_by(probes, floor, True, lambda probe: "known answers" if probe.kind == "known" else None),
        *_by(recall, floor, False, lambda probe: f"sampling {probe.sampling}"),
        *_by(recall, floor, False, lambda probe: f"context {probe.context_tokens}"),
        *_by(recall, floor, False, lambda probe: None if probe.note else f"depth {probe.depth:g}"),
        *_by(recall, floor, False, lambda probe: "note of the turn before" if probe.note else None),
        *_by(recall, floor, False, lambda probe: "first turn" if probe.turn == 0 else "later turns"),
        *_by(recall, floor, False, lambda probe: "asked for the place" if probe.kind == "place" else None),
    ]
    return result


def rates_of(probes: list[Probe]) -> dict[str, Group]:
    """The groups that have to pass, by the names that a receipt gives them; no floor is in their numbers."""
    named = {group.name.removeprefix("path ").replace(" ", "-"): group for group in groups_of(probes, 0.5)}
    return {name: group for name, group in named.items() if group.required}


def _by(probes: Iterable[Probe], floor: float, required: bool, name_of: Callable[[Probe], str | None]) -> list[Group]:
    counts: dict[str, list[bool]] = {}
    for probe in probes:
        if (name := name_of(probe)) is not None:
            counts.setdefault(name, []).append(probe.outcome == "right")
    result = []
    for name, rights in sorted(counts.items()):
        right, asked = sum(rights), len(rights)
        low, high = wilson(right, asked)
        result.append(
            Group(name, right, asked, round(low, 4), round(high, 4), required, judge_rate(right, asked, floor))
        )
    return result


def tokens_of(probes: list[Probe]) -> dict[str, dict[str, Any]]:
    """For each path: the prompts' lengths, and how much of them `usage` says was cached (None: it does not say)."""
    result: dict[str, dict[str, Any]] = {}
    for path in ("cold", "hit", "resumed"):
        chosen = [probe for probe in probes if probe.path == path and probe.kind in ("code", "place")]
        prompts = [probe.prompt_tokens for probe in chosen if probe.prompt_tokens is not None]
        cached = [probe.cached_tokens for probe in chosen if probe.cached_tokens is not None]
        if chosen:
            result[path] = {
                "asked": len(chosen),
                "prompt_tokens": sum(prompts) if prompts else None,
                "longest_prompt_tokens": max(prompts) if prompts else None,
                "cached_tokens": sum(cached) if cached else None,
                "asked_with_cached_tokens": sum(count > 0 for count in cached) if cached else None,
            }
    return result
