"""One request of the battery, and all of its answer that is judged."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from harness.answer import count_of
from slimserve.client import Stop, stream_events
from slimserve.client_faults import BrokenStream, Endpoint, HttpError, Stopped

TOP_LOGPROBS = 10


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer.

    Args:
        text: as the server spells it.
        logprob: natural logarithm of its probability.
        top: the likeliest tokens at this place, with theirs.
    """

    text: str
    logprob: float
    top: dict[str, float]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call.

    Args:
        id: which the result refers to.
        name: of the function.
        arguments: as the server sent them; JSON, if it is right.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What came.

    Args:
        text: the content alone, without any thought.
        calls: tool calls.
        tokens: with their logprobs, where those were asked for and sent.
        finish_reason: None when the stream ended without one.
        prompt_tokens, completion_tokens, cached_tokens: from `usage`; None where it does not say.
        status: of HTTP.
        error: why there is no answer; empty when there is one.
    """

    text: str = ""
    calls: tuple[Call, ...] = ()
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    status: int = 200
    error: str = ""


def ask(
    endpoint: Endpoint,
    messages: list[dict[str, Any]],
    *,
    max_tokens: int,
    greedy: bool = False,
    logprobs: bool = False,
    tools: list[dict[str, Any]] | None = None,
    deadline_seconds: float = 900.0,
) -> Answer:
    """Ask once. A refusal, a broken stream and a passed deadline are answers too: they have an `error`.

    Without `greedy` no sampling is asked for, so that the server's own applies.

    Raises:
        Unreachable: nobody listens there, or connecting took too long.
        UsageError: the endpoint's address or key cannot be sent.
    """
    body: dict[str, object] = {
        "model": endpoint.model,
        "messages": messages,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if greedy:
        body["temperature"] = 0
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
    if tools:
        body |= {"tools": tools, "tool_choice": "auto"}
    collected = _Collected()
    stop = Stop()
    timer = threading.Timer(deadline_seconds, stop.request)
    timer.daemon = True
    timer.start()
    try:
        for event in stream_events(endpoint, "/chat/completions", body, stop=stop):
            collected.take(event)
        return collected.answer()
    except Stopped:
        return Answer(error=f"no complete answer within {deadline_seconds:g} s")
    except HttpError as refused:
        return Answer(status=refused.status, error=refused.findings[0].what)
    except BrokenStream as broken:
        return Answer(error=broken.findings[0].what)
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError):
        return Answer(error="the server sent events of another shape than the protocol's")
    finally:
        timer.cancel()


class _Collected:
    """The pieces of one answer."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.calls: dict[int, dict[str, str]] = {}
        self.tokens: list[Token] = []
        self.finish: str | None = None
        self.usage: dict[str, Any] = {}

    def take(self, event: dict[str, Any]) -> None:
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            self.text.append(delta.get("content") or "")
            self.finish = choice.get("finish_reason") or self.finish
            for piece in delta.get("tool_calls") or []:
                call = self.calls.setdefault(piece.get("index", 0), {"id": "", "name": "", "arguments": ""})
                function = piece.get("function") or {}
                call["id"] = piece.get("id") or call["id"]
                call["name"] += function.get("name") or ""
                call["arguments"] += function.get("arguments") or ""
            for token in (choice.get("logprobs") or {}).get("content") or []:
                top = {each["token"]: float(each["logprob"]) for each in token.get("top_logprobs") or []}
                self.tokens.append(Token(token["token"], float(token["logprob"]), top))

    def answer(self) -> Answer:
        return Answer(
            text="".join(self.text),
            calls=tuple(Call(**call) for _, call in sorted(self.calls.items())),
            tokens=tuple(self.tokens),
            finish_reason=self.finish,
            prompt_tokens=count_of(self.usage.get("prompt_tokens")),
            completion_tokens=count_of(self.usage.get("completion_tokens")),
            cached_tokens=count_of((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")),
        )
