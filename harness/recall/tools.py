"""Round trips through a tool: the model has to call it with what it read, and to report what came back."""

from __future__ import annotations

import json
from typing import Any

from harness.recall.asking import Answer, Call
from harness.recall.conversation import Message
from slimserve.client_faults import decode_json

NAME = "open_locker"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "Opens the locker with the given code and returns the number on the slip inside.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "the code, seven digits"}},
                "required": ["code"],
            },
        },
    }
]


def request(label: str) -> str:
    """What the user asks for in one round."""
    return f"Open the locker with the code of the {label}, and tell me the number on the slip inside."


def wrong_call(answer: Answer, code: str) -> str:
    """What is wrong with the call that should open the locker with `code`; empty when it is right."""
    if not answer.calls:
        return "no tool was called"
    if len(answer.calls) > 1:
        return f"{len(answer.calls)} calls instead of one"
    [call] = answer.calls
    if call.name != NAME:
        return f"the tool called is {call.name!r}"
    try:
        arguments = decode_json(call.arguments)
    except ValueError:
        return f"the arguments are no JSON: {call.arguments[:40]!r}"
    if not isinstance(arguments, dict) or list(arguments) != ["code"]:
        return f"the arguments are not those of the tool: {call.arguments[:40]!r}"
    if str(arguments["code"]).strip() != code:
        return f"the code is {str(arguments['code'])[:20]!r} instead of {code!r}"
    if answer.finish_reason != "tool_calls":
        return f"finish_reason is {answer.finish_reason!r} instead of 'tool_calls'"
    return ""


def round_trip(answer: Answer, slip: str) -> list[Message]:
    """The call and its result, as the next request has to carry them."""
    calls = [_as_sent(call) for call in answer.calls]
    result = {"role": "tool", "tool_call_id": answer.calls[0].id, "content": json.dumps({"slip": slip})}
    return [{"role": "assistant", "content": answer.text or None, "tool_calls": calls}, result]


def _as_sent(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
