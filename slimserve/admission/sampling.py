"""Never greedy: which requests ask for it, and what becomes of them."""

from __future__ import annotations

from typing import Any

from slimserve.admission.config import Config
from slimserve.admission.notes import Note
from slimserve.admission.numbers import RANGES, number, shown
from slimserve.admission.rejection import Rejected
from slimserve.policies import GREEDY_TEMPERATURE, GREEDY_TOP_P

# A candidate of 0.9 times the best one's probability is drawn at GREEDY_TEMPERATURE with 0.9 ** (1 / 0.05) = 12% of its
# odds; from this bound on min_p leaves fewer candidates than that.
GREEDY_MIN_P = 0.9

# They are one recipe: a temperature tuned for one top_p, beside another, is neither the client's sampling nor the
# model's. So all of them go together, and the profile's own apply. Penalties, `seed` and `n` stay: they are not
# what makes it greedy.
RECIPE = ("temperature", "top_p", "top_k", "min_p", "use_beam_search")


def never_greedy(body: dict[str, Any], config: Config) -> tuple[dict[str, Any], tuple[Note, ...]]:
    """The body as it may be sampled; a new one when it had to change.

    Raises:
        Rejected: it asks for greedy sampling, and the profile refuses that.
    """
    field = greedy_field(body)
    if field is None or config.greedy == "verification":
        return body, ()
    if config.greedy == "refuse":
        raise Rejected(
            400,
            f"{field} = {shown(body[field])} asks for greedy sampling, which this endpoint refuses: it makes models "
            f"repeat themselves without end. Leave {', '.join(RECIPE[:-1])} out for the model's own sampling.",
            param=field,
            code="greedy_refused",
        )
    return {key: value for key, value in body.items() if key not in RECIPE}, (Note.GREEDY_REPLACED,)


def greedy_field(body: dict[str, Any]) -> str | None:
    """The first field by which `body` leaves one candidate for each token, or None.

    Raises:
        Rejected: a field that decides it is of the wrong type.
    """
    if body.keys().isdisjoint(RECIPE):
        return None
    values = {field: number(body, field, RANGES[field]) for field in RECIPE[:-1]}
    temperature, top_p, top_k, min_p = (values[field] for field in RECIPE[:-1])
    if temperature is not None and temperature < GREEDY_TEMPERATURE:
        return "temperature"
    if top_k == 1:
        return "top_k"
    if top_p is not None and top_p < GREEDY_TOP_P:
        return "top_p"
    if min_p is not None and min_p >= GREEDY_MIN_P:
        return "min_p"
    beams = body.get("use_beam_search")
    if not isinstance(beams, bool | None):
        # The engine takes "yes" and 1 for true.
        raise Rejected(
            400,
            f"use_beam_search is {shown(beams)}; it must be true or false.",
            param="use_beam_search",
            code="invalid_value",
        )
    return "use_beam_search" if beams else None
