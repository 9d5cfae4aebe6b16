"""Names in a request, of its model and its tools: bounded before the engine repeats them in errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slimserve.admission.rejection import Rejected

# No model and no tool is called so; OpenAI's own bound for tools is 64.
MAX_NAME_CHARACTERS = 256


def check_names(body: Mapping[str, Any]) -> None:
    """Refuse names of a length that none has.

    Args:
        body: the parsed JSON object, of any route.

    Raises:
        Rejected: 404 for the model's, 400 for another, with the field that is meant.
    """
    model = body.get("model")
    if isinstance(model, str) and len(model) > MAX_NAME_CHARACTERS:
        message = (
            f"model is a name of {len(model)} characters, and no model served here has one of more than "
            f"{MAX_NAME_CHARACTERS}. GET /v1/models tells the name."
        )
        raise Rejected(404, message, param="model", code="model_not_found")
    for field, name in _names(body):
        if isinstance(name, str) and len(name) > MAX_NAME_CHARACTERS:
            message = f"{field} has a name of {len(name)} characters; it may have {MAX_NAME_CHARACTERS}. Shorten it."
            raise Rejected(400, message, param=field, code="invalid_value")


def _names(body: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    tools = body.get("tools")
    holders = [("tools", each) for each in (tools if isinstance(tools, list) else ())]
    for field, holder in (*holders, ("tool_choice", body.get("tool_choice"))):
        if isinstance(holder, dict):
            yield from ((field, holder.get(key)) for key in ("name", "type"))
            function = holder.get("function")
            yield field, function.get("name") if isinstance(function, dict) else None
        else:
            yield field, holder
