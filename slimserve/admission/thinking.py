"""Thinking always on, and `reasoning_effort` in words that the chat template knows.

Clients write both in many places: OpenAI's, Anthropic's, the template's own arguments, other servers' top-level fields
that this engine would ignore in silence. All are read in all dialects, so that one wish has one answer wherever it
stands. A wish that has to change is written down again in the one place that every dialect of the engine hands to the
template, `chat_template_kwargs`, whose words no schema restricts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slimserve.admission.config import Config
from slimserve.admission.notes import Note
from slimserve.admission.numbers import shown
from slimserve.admission.rejection import Rejected
from slimserve.admission.routes import Dialect

Path = tuple[str, ...]

# A budget below this ends a thought within its first sentence: that is off by another name.
MIN_BUDGET_TOKENS = 64

_KWARGS = "chat_template_kwargs"
_OFF = "none"

# Where the engine reads the effort, by dialect.
_OWN: Mapping[Dialect, Path] = {
    Dialect.CHAT: ("reasoning_effort",),
    Dialect.BATCH_CHAT: ("reasoning_effort",),
    Dialect.RESPONSES: ("reasoning", "effort"),
    Dialect.ANTHROPIC: ("output_config", "effort"),
}
_EFFORTS: tuple[Path, ...] = (
    ("reasoning_effort",),
    ("reasoning", "effort"),
    ("output_config", "effort"),
    (_KWARGS, "reasoning_effort"),
)
# Switches of templates and of other servers: anything but true is off, whatever a template's language makes of it.
_SWITCHES: tuple[Path, ...] = (
    ("enable_thinking",),
    (_KWARGS, "enable_thinking"),
    (_KWARGS, "thinking"),
    ("reasoning", "enabled"),
)

# Fields without any of which a request says nothing of thinking; most say nothing.
_SPEAKING = frozenset(
    {path[0] for path in (*_SWITCHES, *_EFFORTS)}
    | {"thinking", "thinking_token_budget", "continue_final_message", "add_generation_prompt", "include_reasoning"}
)


def always_thinking(dialect: Dialect, body: dict[str, Any], config: Config) -> tuple[dict[str, Any], tuple[Note, ...]]:
    """The body as the model may answer it; a new one when it had to change.

    A model that does not think gets the body as it is: the engine drops what its template does not read.

    Raises:
        Rejected: the effort is no word that is known, or the request cannot be answered with thinking, or asks for none
            and the profile refuses that.
    """
    if config.thinking is None or (dialect is not Dialect.RESPONSES and body.keys().isdisjoint(_SPEAKING)):
        return body, ()
    off = list(_off(dialect, body))
    if off and config.thinking == "refuse":
        raise Rejected(
            400,
            f"{_dotted(off[0])} switches thinking off, which this endpoint refuses: the model is served thinking. "
            f"{_ask_for_less(config)}",
            param=_dotted(off[0]),
            code="thinking_refused",
        )
    if dialect is Dialect.COMPLETIONS:
        # The prompt is text as the client wrote it; there is no template to tell anything.
        return _without(body, off), (Note.THINKING_KEPT,) if off else ()
    if not isinstance(body.get(_KWARGS), dict | None):
        raise Rejected(
            400, f"{_KWARGS} is {shown(body[_KWARGS])}; it must be an object.", param=_KWARGS, code="invalid_value"
        )
    _check_continuation(dialect, body)
    place, word = _effort(dialect, body, config)
    meaning = config.efforts.get(word, word) if word is not None else None
    read = (None, _OWN[dialect], (_KWARGS, "reasoning_effort"))
    mapped = word != meaning or place not in read
    if not off and not mapped:
        return body, ()
    changed = _without(body, [*off, *_EFFORTS])
    kwargs = {**(changed.get(_KWARGS) or {}), "enable_thinking": True}
    changed = {**changed, _KWARGS: kwargs if meaning is None else {**kwargs, "reasoning_effort": meaning}}
    kept = (Note.THINKING_KEPT,) if off else ()
    return changed, (*kept, Note.EFFORT_MAPPED) if mapped else kept


def _off(dialect: Dialect, body: dict[str, Any]) -> Iterator[Path]:
    """Every path by which `body` switches thinking off."""
    budget = body.get("thinking_token_budget")
    if budget is not None and 0 <= budget < MIN_BUDGET_TOKENS:
        yield ("thinking_token_budget",)
    if dialect is Dialect.COMPLETIONS:
        return
    for path in _SWITCHES:
        if _present(body, path) and _value(body, path) is not True:
            yield path
    for path in _EFFORTS:
        if _value(body, path) == _OFF:
            yield path
    thinking = body.get("thinking")
    if thinking is False or (isinstance(thinking, dict) and thinking.get("type") == "disabled"):
        yield ("thinking",)
    if dialect in (Dialect.CHAT, Dialect.BATCH_CHAT):
        # Without the opening of its turn, which holds that of its thought, the model goes on with somebody else's text.
        if not body.get("continue_final_message") and body.get("add_generation_prompt", True) is not True:
            yield ("add_generation_prompt",)
        # A grammar then holds from the first token on, and a thought is not of the grammar.
        if body.get("include_reasoning", True) is not True and _constrained(body):
            yield ("include_reasoning",)


def _constrained(body: dict[str, Any]) -> bool:
    """Whether a grammar rules the answer: one that is given, or that of a tool call which has to come."""
    form = body.get("response_format")
    free = form is None or (isinstance(form, dict) and form.get("type") == "text")
    forced = body.get("tool_choice") not in (None, "none", "auto")
    return not free or forced or body.get("structured_outputs") is not None


def _effort(dialect: Dialect, body: dict[str, Any], config: Config) -> tuple[Path | None, str | None]:
    """Where the effort is stated that counts, and the word; the dialect's own place before the others."""
    for path in (_OWN[dialect], *_EFFORTS):
        word = _value(body, path)
        if word is None or word == _OFF:
            continue
        known = sorted(config.efforts)
        if not isinstance(word, str) or (known and word not in config.efforts):
            shown_word = ascii(word[:40]) if isinstance(word, str) else shown(word)
            accepted = ", ".join(known) if known else "a text"
            raise Rejected(
                400,
                f"{_dotted(path)} is {shown_word}, which the model's template does not know. Accepted: {accepted}.",
                param=_dotted(path),
                code="unknown_effort",
            )
        return path, word
    return None, None


def _check_continuation(dialect: Dialect, body: dict[str, Any]) -> None:
    """Refuse to go on with an answer that was begun without a thought: the template closes an empty one before it.

    Raises:
        Rejected: there is nothing that could be changed to make the model think first.
    """
    if dialect is Dialect.RESPONSES:
        param, begun, thought = "input", *_begun_response(body.get("input"))
    else:
        param, begun = "continue_final_message", body.get("continue_final_message") not in (None, False)
        conversations = body.get("messages") if dialect is Dialect.BATCH_CHAT else [body.get("messages")]
        thought = all(map(_last_has_thought, conversations if isinstance(conversations, list) else []))
    if begun and not thought:
        raise Rejected(
            400,
            f"{param}: the answer to continue was begun without thinking, and this model is served thinking. Send its "
            "reasoning along, or let the model begin its answer itself.",
            param=param,
            code="thinking_refused",
        )


def _begun_response(items: object) -> tuple[bool, bool]:
    """Whether the last item is an unfinished one, and whether it has a thought before it."""
    last = items[-1] if isinstance(items, list) and items else None
    if not isinstance(last, dict) or last.get("status") not in ("in_progress", "incomplete"):
        return False, False
    before = items[-2] if isinstance(items, list) and len(items) > 1 else None
    return True, any(isinstance(item, dict) and item.get("type") == "reasoning" for item in (last, before))


def _last_has_thought(messages: object) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict):
        return True  # no message at all: the engine says so
    stated = last.get("reasoning") or last.get("reasoning_content")
    if isinstance(stated, str) and stated.strip():
        return True
    content = last.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    _, opened, rest = str(content or "").partition("<think>")
    return bool(opened and rest.partition("</think>")[0].strip())


def _ask_for_less(config: Config) -> str:
    return f"reasoning_effort takes {', '.join(sorted(config.efforts))}." if config.efforts else "Leave it out."


def _dotted(path: Path) -> str:
    return ".".join(path)


def _present(body: Mapping[str, Any], path: Path) -> bool:
    for key in path[:-1]:
        inner = body.get(key)
        if not isinstance(inner, dict):
            return False
        body = inner
    return path[-1] in body


def _value(body: Mapping[str, Any], path: Path) -> Any:
    for key in path[:-1]:
        inner = body.get(key)
        if not isinstance(inner, dict):
            return None
        body = inner
    return body.get(path[-1])


def _without(body: dict[str, Any], paths: list[Path]) -> dict[str, Any]:
    """A copy without these paths; `body` itself when none of them is in it."""
    for path in paths:
        if _present(body, path):
            key, *inner = path
            body = (
                {**body, key: _without(body[key], [tuple(inner)])} if inner else {k: body[k] for k in body if k != key}
            )
    return body
