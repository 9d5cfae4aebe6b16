"""A streamed answer, read frame by frame."""

from __future__ import annotations

import json
from typing import Any

from slimserve.client_faults import decode_json

# More than any answer or prompt has; with it the sums of a run are numbers that a receipt can hold.
MOST_TOKENS = 1 << 32
# What has no end of line by then is no frame, and would be held and gone through again and again.
LARGEST_FRAME = 16 << 20


def count_of(value: object) -> int | None:
    """A count of tokens; None where a server sends something else."""
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


class Answer:
    """What a stream of server-sent events says.

    Args:
        max_tokens: an answer of more chunks than this will not end by itself, and no more of it is read.
    """

    def __init__(self, max_tokens: int) -> None:
        self.arrivals: list[float] = []
        self.counts: list[int] = []
        self.pieces = 0
        self.text: list[str] = []
        self.usage: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.frames = 0
        self.done = False
        self.fault = ""
        self.unread = b""
        self.beginning = b""
        self._max_tokens = max_tokens
        self._tokens = 0

    @property
    def counted(self) -> bool:
        """Whether each arrival came with the server's count of tokens."""
        return bool(self.counts) and len(self.counts) == len(self.arrivals)

    def counted_as(self, name: str) -> int | None:
        """A count of the last usage, if it is one."""
        return count_of(self.usage.get(name))

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the server says it had in its cache; None where it cannot have had as many."""
        details = self.usage.get("prompt_tokens_details")
        cached = count_of(details.get("cached_tokens")) if isinstance(details, dict) else None
        prompt = self.counted_as("prompt_tokens")
        return cached if cached is not None and prompt is not None and cached <= prompt else None

    def read(self, moment: float, data: bytes) -> str:
        """Take what has arrived; returns why no more is wanted, or nothing."""
        if len(self.beginning) < 2000:
            self.beginning += data[:2000]
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._read_frame(moment, line[5:].strip())
                if self.pieces > self._max_tokens:
                    return "the answer goes on beyond the tokens asked for"
        return f"a frame of more than {LARGEST_FRAME} bytes" if len(self.unread) > LARGEST_FRAME else ""

    def complaint(self, headers: dict[str, str]) -> str:
        """The words of an answer that is an error, shortened."""
        try:
            said = decode_json(self.beginning)
        except ValueError:
            said = None
        error = said.get("error", said) if isinstance(said, dict) else None
        words = error.get("message") if isinstance(error, dict) else error
        text = words if isinstance(words, str) else self.beginning.decode("utf-8", "replace")
        return " ".join(text.split())[:200] or headers.get("content-type", "nothing said")

    def _read_frame(self, moment: float, data: bytes) -> None:
        self.frames += 1
        if data == b"[DONE]":
            self.done = True
            return
        try:
            self._take(moment, decode_json(data))
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            self.fault = self.fault or f"a frame is not what the API says: {data[:80].decode('utf-8', 'replace')}"

    def _take(self, moment: float, frame: Any) -> None:
        if (error := frame.get("error")) is not None:
            words = error.get("message", error) if isinstance(error, dict) else error
            self.fault = self.fault or f"an error in the stream: {str(words)[:200]}"
            return
        usage = frame.get("usage")
        if usage:
            if not isinstance(usage, dict):
                raise TypeError
            self.usage = usage
        choices = frame.get("choices")
        if not choices:
            return
        text = text_of(choices[0])
        tokens = count_of(usage.get("completion_tokens")) if usage else None
        if text:
            self.pieces += 1
            self.text.append(text)
        if text or (tokens is not None and tokens > self._tokens):
            self.arrivals.append(moment)
            if tokens is not None:
                self.counts.append(tokens)
                self._tokens = tokens
        self.finish_reason = _text(choices[0].get("finish_reason")) or self.finish_reason


def text_of(choice: dict[str, Any]) -> str:
    """What a chunk adds to the answer: text, thought, or parts of tool calls.

    Raises:
        TypeError, ValueError: it is no text, or half of a surrogate pair.
    """
    delta = choice.get("delta")
    if delta is None:
        return _text(choice.get("text"))
    text = _text(delta.get("content")) + (_text(delta.get("reasoning")) or _text(delta.get("reasoning_content")))
    if calls := delta.get("tool_calls"):
        text += json.dumps(calls, sort_keys=True)
    return text


def _text(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError
    if not value.isascii():
        value.encode()
    return value
