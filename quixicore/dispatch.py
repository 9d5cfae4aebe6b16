"""Who sits in each group of seats: the engine's own operation, unless a profile says otherwise and why.

A reference sits where the engine has nothing that runs: on a processor, under the model that needs it. A kernel of ours
will sit where a receipt shows that it wins; there is none yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quixicore.engine import GROUPS, Seat

ENGINE, REFERENCE = "engine", "reference"
SITTERS = (ENGINE, REFERENCE)
NEEDS_REFERENCES = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")
"""Architectures whose operations the engine has for cards alone."""


def refusals(choice: Mapping[str, str], architecture: str, *, on_cards: bool) -> Iterator[tuple[str, str, str, str]]:
    """What a profile may not say of its seats.

    Args:
        choice: who sits in each group that it names.
        architecture: of its model.
        on_cards: its platform has GPUs.

    Yields:
        a group, and what is wrong with it, why, and what to do.
    """
    for group, sitter in choice.items():
        if group not in GROUPS:
            yield group, f"there are no seats called {group}", f"there are {', '.join(GROUPS)}", "name one of them"
        elif sitter not in SITTERS:
            why = f"nobody of that name can sit there: {', '.join(SITTERS)} can"
            yield group, f"seats.{group} = {sitter}", why, "name one of them"
        elif sitter == REFERENCE and on_cards:
            why = "a reference says what is right and is slow; on cards the engine has kernels"
            yield group, f"seats.{group} = {sitter} on cards", why, "remove it"
    if architecture in NEEDS_REFERENCES and not on_cards:
        for group in GROUPS:
            if choice.get(group) != REFERENCE:
                why = f"the engine's operations of {architecture} run on cards alone"
                yield group, f"seats.{group} is not {REFERENCE}", why, f"state {REFERENCE}"


def who_sits(choice: Mapping[str, str]) -> dict[str, str]:
    """Who sits in every group."""
    return {group: choice.get(group, ENGINE) for group in GROUPS}


def ours(choice: Mapping[str, str]) -> tuple[Seat, ...]:
    """The seats that ours are to take."""
    return tuple(seat for group, seats in GROUPS.items() if choice.get(group) == REFERENCE for seat in seats)
