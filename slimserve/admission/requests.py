"""What a request may ask for: judged once, between its body and the engine.

Whatever the engine coerces, cuts down or ignores in silence is either put into words here (400) or changed, and then
noted. What it refuses by itself in OpenAI's form is left to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimserve.admission.config import Config
from slimserve.admission.grammars import check_grammars
from slimserve.admission.names import check_names
from slimserve.admission.notes import Note
from slimserve.admission.numbers import MAX_INTEGER, Range, check_numbers, shown, whole
from slimserve.admission.rejection import Rejected
from slimserve.admission.routes import Dialect
from slimserve.admission.sampling import never_greedy
from slimserve.admission.thinking import always_thinking

_OUTPUT = {
    Dialect.CHAT: ("max_completion_tokens", "max_tokens"),
    Dialect.BATCH_CHAT: ("max_completion_tokens", "max_tokens"),
    Dialect.COMPLETIONS: ("max_tokens",),
    Dialect.RESPONSES: ("max_output_tokens",),
    Dialect.ANTHROPIC: ("max_tokens",),
}

# Fields of a request that speak to parts of the engine which no client has business with.
_INTERNAL = {
    "kv_transfer_params": "it steers the engine's cache transfer, and can bring a prompt past the chat template",
    "ec_transfer_params": "it steers the engine's cache transfer",
}


@dataclass(frozen=True, slots=True)
class Judged:
    """A request as the engine gets it.

    Args:
        body: the JSON object to send.
        changed: whether it differs from the one that came in.
        count: sequences that it generates at once, all of them in flight.
        notes: what was changed.
        grammar: the field that holds a grammar; None: none does.
    """

    body: dict[str, Any]
    changed: bool
    count: int
    notes: tuple[Note, ...] = ()
    grammar: str | None = None


def judge(dialect: Dialect, body: dict[str, Any], config: Config) -> Judged:
    """Decide about one request.

    Args:
        dialect: whose body it is.
        body: the parsed JSON object, free of NaN and infinities; it is not changed.

    Raises:
        Rejected: 400, or 404 for its model, with the field that is meant.
    """
    check_names(body)
    check_numbers(body)
    _check_output(dialect, body, config.max_model_len)
    _check_internal(body)
    _check_carried(dialect, body, config)
    grammar = check_grammars(body)
    count = _count(dialect, body, config.max_in_flight)
    sampled, greedy_notes = never_greedy(body, config)
    thought, thinking_notes = always_thinking(dialect, sampled, config)
    return Judged(thought, thought is not body, count, (*greedy_notes, *thinking_notes), grammar)


def _check_output(dialect: Dialect, body: dict[str, Any], max_model_len: int) -> None:
    for field in _OUTPUT[dialect]:
        # 0 is for completions that echo their prompt; the engine refuses it elsewhere.
        tokens = whole(body, field, Range(0, MAX_INTEGER, whole=True))
        if tokens is not None and tokens > max_model_len:
            raise Rejected(
                400,
                f"{field} = {tokens} is beyond the context of {max_model_len} tokens, which prompt and answer share. "
                f"Ask for less, or leave {field} out to use what the prompt leaves over.",
                param=field,
                code="context_length_exceeded",
            )


def _check_internal(body: dict[str, Any]) -> None:
    for field, why in _INTERNAL.items():
        if body.get(field) is not None:
            raise Rejected(
                400, f"{field} is not served here: {why}. Leave it out.", param=field, code="unsupported_field"
            )
    if body.get("background") not in (None, False):
        raise Rejected(
            400,
            "background is not served here: work that outlives its request would hold no slot. Stream the answer.",
            param="background",
            code="unsupported_field",
        )


def _check_carried(dialect: Dialect, body: dict[str, Any], config: Config) -> None:
    """Refuse what needs a part of the engine that this profile does without."""
    if not config.tools and body.get("tools") and _choice(body) != "none":
        message = "tools: this profile does not carry tool calling. Leave tools and tool_choice out."
        raise Rejected(400, message, param="tools", code="unsupported_field")
    if config.thinking is None:
        thinking = body.get("thinking")
        enabled = dialect is Dialect.ANTHROPIC and isinstance(thinking, dict) and thinking.get("type") == "enabled"
        budget = body.get("thinking_token_budget") not in (None, -1)
        if enabled or budget:
            field = "thinking" if enabled else "thinking_token_budget"
            message = f"{field}: this profile's model does not think. Leave {field} out."
            raise Rejected(400, message, param=field, code="unsupported_field")
    # `store` is true in clients that do not mean it, since it is so where nothing is said.
    if body.get("previous_response_id") is not None:
        raise Rejected(
            400,
            "previous_response_id is not served here: no response is stored. Send the whole conversation as input.",
            param="previous_response_id",
            code="unsupported_field",
        )


def _choice(body: dict[str, Any]) -> object:
    choice = body.get("tool_choice")
    return choice.get("type") if isinstance(choice, dict) else choice


def _count(dialect: Dialect, body: dict[str, Any], cap: int) -> int:
    """Sequences that the request generates at once.

    Raises:
        Rejected: more than can ever be in flight.
    """
    if dialect not in (Dialect.CHAT, Dialect.COMPLETIONS, Dialect.BATCH_CHAT):
        return 1  # the others have no `n`
    n = whole(body, "n", Range(1, MAX_INTEGER, whole=True)) or 1
    # Nothing reads it any more; it once asked for candidates beyond `n`.
    if body.get("best_of") not in (None, n):
        raise Rejected(
            400,
            f"best_of is {shown(body['best_of'])}, and the engine would ignore it: it generates n sequences and "
            "returns them all. Leave it out.",
            param="best_of",
            code="unsupported_field",
        )
    prompts = _prompts(dialect, body)
    count = max(1, prompts) * n
    if count > cap:
        field = "n" if n > prompts else "messages" if dialect is Dialect.BATCH_CHAT else "prompt"
        asked = f"n = {n}" if prompts <= 1 else f"{prompts} prompts x n = {n}"
        raise Rejected(
            400,
            f"{asked}: {count} sequences at once, and this endpoint has at most {cap} in flight. Ask for fewer in each "
            "request.",
            param=field,
            code="too_many_sequences",
        )
    return count


def _prompts(dialect: Dialect, body: dict[str, Any]) -> int:
    if dialect is Dialect.CHAT:
        return 1
    if dialect is Dialect.BATCH_CHAT:
        conversations = body.get("messages")
        return len(conversations) if isinstance(conversations, list) else 1
    count = 0
    for field in ("prompt", "prompt_embeds"):
        value = body.get(field)
        # A list of token ids is one prompt; a list of texts or of such lists is several.
        if isinstance(value, list) and value and not isinstance(value[0], int | float):
            count += len(value)
        elif value is not None:
            count += 1
    return count
