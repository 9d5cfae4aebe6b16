"""One streamed answer: its words, its reasoning kept apart, what it used, and how fast it came."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slimserve.client import Stop, stream_events
from slimserve.client_faults import BrokenStream, Endpoint, cut_short, not_a_stream
from slimserve.errors import Finding

# `reasoning` is the pinned engine's name; `reasoning_content` is the older one that other servers still send.
REASONING_FIELDS = ("reasoning", "reasoning_content")
# Up to here a float counts exactly; a number beyond it is no count of tokens, and may not fit into a float at all.
MOST_TOKENS = 1 << 53
LONE_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Usage:
    """What the server counted for one request, in tokens. `cached_tokens` is None when it does not tell."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclass
class Answer:
    """What has come of an answer so far; whole once `finish_reason` is there.

    Args:
        pieces: the content as it came, in order. Reasoning is never among it.
        thought: whether any reasoning came.
        called_tool: whether the model asked for a tool.
        finish_reason: why the server ended it; None while it has not.
        usage: the server's own count; None when it sent none.
        asked_at, first_at, last_at: `time.monotonic` of the request, of the first token and of the last, in seconds.
    """

    pieces: list[str] = field(default_factory=list)
    thought: bool = False
    called_tool: bool = False
    finish_reason: str | None = None
    usage: Usage | None = None
    asked_at: float = 0.0
    first_at: float | None = None
    last_at: float | None = None

    @property
    def text(self) -> str:
        """The answer's words as the server sent them."""
        return "".join(self.pieces)

    @property
    def has_text(self) -> bool:
        """Whether there is more than white space."""
        return any(piece.strip() for piece in self.pieces)

    @property
    def first_token_seconds(self) -> float | None:
        """From the request to the first token."""
        return None if self.first_at is None else self.first_at - self.asked_at

    @property
    def tokens_per_second(self) -> float | None:
        """Counted tokens after the first, over the time from the first to the last; None without a count."""
        if self.usage is None or self.first_at is None or self.last_at is None:
            return None
        seconds = self.last_at - self.first_at
        if self.usage.completion_tokens < 2 or seconds <= 0:
            return None
        return (self.usage.completion_tokens - 1) / seconds

    def fault(self) -> Finding | None:
        """Why a stream that ended without an error is still no answer; None when it is one."""
        if self.finish_reason is None:
            return cut_short()
        if self.finish_reason in ("abort", "error"):
            return Finding(
                f"the server gave the answer up (finish_reason {self.finish_reason})",
                "it stopped or failed while it generated",
                "look at the end of the engine's log, whose path is printed when it starts, and ask again",
            )
        if self.has_text:
            return None
        return _no_text(self)


def receive(
    answer: Answer,
    endpoint: Endpoint,
    messages: Sequence[dict[str, str]],
    *,
    words: Callable[[str], None],
    thoughts: Callable[[str], None],
    stop: Stop | None = None,
) -> None:
    """Ask, and fill `answer` while its pieces are handed on.

    The caller owns `answer`, so that what came is still there when an exception ends this early. No sampling field
    is sent: the profile's defaults live in the server, and a client that overrode them would make them a fiction.

    Args:
        messages: the conversation, the question last.
        words: called with each piece of content.
        thoughts: called with each piece of reasoning.

    Raises:
        UsageError: the endpoint's address or key cannot be sent.
        Failed: the answer broke off, or never began.
    """
    body: dict[str, object] = {
        "model": endpoint.model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer.asked_at = time.monotonic()
    with contextlib.closing(stream_events(endpoint, "/chat/completions", body, stop=stop)) as events:
        try:
            for event in events:
                _take(answer, event, endpoint, words, thoughts)
        except BrokenStream:
            # Some servers close after the finish reason without [DONE]; the answer itself is whole then.
            if answer.finish_reason is None:
                raise


def _take(
    answer: Answer,
    event: dict[str, object],
    endpoint: Endpoint,
    words: Callable[[str], None],
    thoughts: Callable[[str], None],
) -> None:
    now = time.monotonic()
    answer.usage = _usage(event.get("usage")) or answer.usage
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise BrokenStream(not_a_stream(endpoint, "an event without a list of choices", "each event carries one"))
    for choice in choices:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            raise BrokenStream(not_a_stream(endpoint, "a choice without a delta", "each streamed choice carries one"))
        thought = next((text for name in REASONING_FIELDS if (text := _text(delta, name, endpoint))), "")
        content = _text(delta, "content", endpoint)
        tool = bool(delta.get("tool_calls"))
        if thought or content or tool:
            answer.first_at = now if answer.first_at is None else answer.first_at
        # The end-of-sequence token is counted and has no text: it arrives with the finish reason.
        answer.last_at = now
        answer.called_tool |= tool
        finish_reason = choice.get("finish_reason")
        answer.finish_reason = finish_reason if isinstance(finish_reason, str) else answer.finish_reason
        if thought:
            answer.thought = True
            thoughts(thought)
        if content:
            answer.pieces.append(content)
            words(content)


def _text(delta: dict[str, object], name: str, endpoint: Endpoint) -> str:
    value = delta.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        found = f"a {name} of type {type(value).__name__}"
        raise BrokenStream(not_a_stream(endpoint, found, "it is a text or null"))
    # JSON can spell half of a surrogate pair, which no output encoding can carry.
    return LONE_SURROGATES.sub("\ufffd", value)


def _usage(told: object) -> Usage | None:
    if not isinstance(told, dict):
        return None
    prompt, completion = _count(told.get("prompt_tokens")), _count(told.get("completion_tokens"))
    if prompt is None or completion is None:
        return None
    details = told.get("prompt_tokens_details")
    return Usage(prompt, completion, _count(details.get("cached_tokens")) if isinstance(details, dict) else None)


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


def _no_text(answer: Answer) -> Finding:
    reason = f"finish_reason {answer.finish_reason}"
    if answer.called_tool:
        return Finding(
            f"the model asked for a tool and gave no answer ({reason})",
            "this client offers no tools, so nothing can run the call",
            "ask without wanting a tool, or use a client that has one",
        )
    if answer.thought and answer.finish_reason == "length":
        return Finding(
            f"no answer: thinking used the whole token budget ({reason})",
            "the limit on generated tokens, or the end of the context, was reached before the answer began",
            "ask something smaller, free the context (/clear in a chat), or serve with a longer one",
        )
    if answer.thought:
        return Finding(
            f"no answer: only reasoning came ({reason})",
            "the content is empty; a reasoning parser that does not fit the model takes the answer for thinking",
            "ask again; when it stays so, compare the profile's reasoning parser with the model's card",
        )
    if answer.finish_reason == "length":
        return Finding(
            f"no answer: the token budget was used up before any text ({reason})",
            "the limit on generated tokens, or the end of the context, was reached",
            "free the context (/clear in a chat), or serve with a longer one",
        )
    return Finding(
        f"no answer: the content is empty ({reason})",
        "the model ended its turn without a word",
        "ask again, or put it another way",
    )
