"""Answers that are nothing but a thought: the token budget was used up before the answer began.

A thinking model whose answer is cut off by its length before the first word has spent it all on thinking, whether the
thought is shown, left out by request, or never closed. Such an answer looks like a failure without a reason (content
null), so the door says what happened.

Streams are read line by line with searches for a few byte patterns: inside a JSON text every quote is escaped, so a
pattern that begins with one matches a key of the engine's own and never a word of the model's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slimserve.admission.routes import Dialect

# Longer answers than this are no thoughts cut short; they are not kept for a look at their end.
MAX_KEPT_BYTES = 16 << 20

# A text that is more than white space.
_WORDS = rb'"(?:\\[nrt]| )*(?:[^"\\ ]|\\[^nrt])'
_CHOICE = re.compile(rb'"choices":\[\{"index":(\d+)')
_CHAT_ANSWER = re.compile(rb'"content":' + _WORDS + rb'|"tool_calls":\[\{|"function_call":\{')
_CHAT_CUT = b'"finish_reason":"length"'
_ANTHROPIC_ANSWER = re.compile(rb'"type":"text_delta","text":' + _WORDS + rb'|"content_block":\{"type":"tool_use"')
_ANTHROPIC_CUT = b'"stop_reason":"max_tokens"'
_RESPONSES_ENDS = (b"event: response.completed", b"event: response.incomplete")


@dataclass(slots=True)
class Answer:
    """What was seen of one answer."""

    answered: bool = False
    cut: bool = False

    @property
    def exhausted(self) -> bool:
        """Whether it was cut short before its first word."""
        return self.cut and not self.answered


class Watch:
    """One answer of a thinking model as it passes by.

    Args:
        dialect: its form.
        streamed: whether it comes as server-sent events.
        count: answers in it (`n`).
    """

    def __init__(self, dialect: Dialect, streamed: bool, count: int = 1) -> None:
        self._dialect = dialect
        self._streamed = streamed
        self._count = count
        self._kept = bytearray()
        self._seen: dict[bytes, Answer] = {}
        self._whole = False
        self._final = False
        # Completions have no field for a thought.
        self._settled = dialect is Dialect.COMPLETIONS

    def feed(self, chunk: bytes) -> None:
        """The next bytes of the body, cut wherever the server likes."""
        if self._settled:
            return
        self._kept += chunk
        if len(self._kept) > MAX_KEPT_BYTES:
            self._settle()
        elif self._streamed and b"\n" in chunk:
            *lines, rest = self._kept.split(b"\n")
            self._kept = rest
            for line in lines:
                if not self._settled:
                    self._read(bytes(line))

    @property
    def exhausted(self) -> bool:
        """Whether some answer so far was cut short, without a word or a tool call."""
        if not self._streamed:
            return not self._settled and _exhausted(self._dialect, bytes(self._kept))
        return self._whole or any(answer.exhausted for answer in self._seen.values())

    def _settle(self) -> None:
        self._settled = True
        self._kept.clear()

    def _read(self, line: bytes) -> None:
        if self._dialect is Dialect.RESPONSES:
            self._read_response(line)
        elif line.startswith(b"data: {"):
            if self._dialect is Dialect.ANTHROPIC:
                self._note(b"", _ANTHROPIC_ANSWER.search(line), _ANTHROPIC_CUT in line)
            elif choice := _CHOICE.search(line):
                self._note(choice[1], _CHAT_ANSWER.search(line), _CHAT_CUT in line)

    def _note(self, index: bytes, answered: object, cut: bool) -> None:
        answer = self._seen.setdefault(index, Answer())
        answer.cut |= cut
        if answered and not answer.answered:
            answer.answered = True
            if sum(each.answered for each in self._seen.values()) >= self._count:
                self._settle()

    def _read_response(self, line: bytes) -> None:
        """The last event holds the whole response, as if it had not been streamed."""
        if self._final and line.startswith(b"data: "):
            self._whole = _exhausted(self._dialect, line[6:], inside="response")
        self._final = line.rstrip() in _RESPONSES_ENDS


def _exhausted(dialect: Dialect, body: bytes, inside: str | None = None) -> bool:
    """Whether the JSON `body`, or its member `inside`, holds an answer that is a thought cut short."""
    if not any(word in body for word in (b'"length"', b'"max_tokens"', b'"incomplete"')):
        return False
    try:
        whole = json.loads(body)
    except (ValueError, RecursionError):
        return False  # an answer cut off by the connection, not by the budget
    if inside is not None and isinstance(whole, dict):
        whole = whole.get(inside)
    if not isinstance(whole, dict):
        return False
    return any(answer.exhausted for answer in _PARTS[dialect](whole))


def _chat(whole: dict[str, Any]) -> Iterator[Answer]:
    for choice in whole.get("choices") or []:
        message = choice.get("message") or {}
        answered = _words(message.get("content")) or message.get("tool_calls") or message.get("function_call")
        yield Answer(bool(answered), choice.get("finish_reason") == "length")


def _response(whole: dict[str, Any]) -> Iterator[Answer]:
    items = [item for item in whole.get("output") or [] if isinstance(item, dict)]
    answers = [item for item in items if item.get("type") not in ("reasoning", "message")] + [
        part
        for item in items
        if item.get("type") == "message"
        for part in item.get("content") or []
        if _words(part.get("text")) or _words(part.get("refusal"))
    ]
    yield Answer(bool(answers), whole.get("status") == "incomplete")


def _message(whole: dict[str, Any]) -> Iterator[Answer]:
    blocks = [block for block in whole.get("content") or [] if isinstance(block, dict)]
    answered = any(block.get("type") == "tool_use" or _words(block.get("text")) for block in blocks)
    yield Answer(answered, whole.get("stop_reason") == "max_tokens")


def _words(text: object) -> bool:
    return isinstance(text, str) and bool(text.strip())


_PARTS = {
    Dialect.CHAT: _chat,
    Dialect.BATCH_CHAT: _chat,
    Dialect.RESPONSES: _response,
    Dialect.ANTHROPIC: _message,
}
