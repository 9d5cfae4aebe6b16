"""Markers: facts of seven digits, drawn when a battery runs, and how an answer is searched for them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

DIGITS = 7
HELD_OUT = 7
"""Markers are multiples of this. What trains a model of ours draws from the others: no marker of a battery was seen."""
MARKER_SPACE = 10**DIGITS // HELD_OUT - 10 ** (DIGITS - 1) // HELD_OUT
"""How many markers there are: one guessed is right once in 1.3 million times."""

# Plain nouns that every tokenizer knows, none of which is a part of another.
LABELS = tuple(
    """anchor bakery barn beacon bridge brewery cabin cellar chapel cottage dairy farm ferry forge fountain garden
    granary harbour inn jetty kennel kiln library lighthouse market mill mine museum nursery orchard palace pier prison
    quarry school stable tannery theatre tower vault vineyard warehouse well windmill workshop yard""".split()
)

_WHOLE = re.compile(rf"(?<!\d)\d{{{DIGITS}}}(?!\d)")
# What models put between digits: 1,234,567 and 123 4567 and 123-4567.
_BETWEEN = re.compile(r"(?<=\d)[,\s\u00a0\u202f_-](?=\d)")


@dataclass(frozen=True, slots=True)
class Fact:
    """What a conversation says once: the code of a place.

    Args:
        label: the place.
        code: the marker.
        depth: where in the document it stands, 0 its beginning and 1 its end; None: in a note before a question.
    """

    label: str
    code: str
    depth: float | None


class Draw:
    """Draws markers, none of them twice: each belongs to one conversation alone, or to a pair that shares it.

    Args:
        seed: of the random numbers.
        training: markers that no battery draws.
    """

    def __init__(self, seed: int, *, training: bool = False) -> None:
        self.random = random.Random(seed)
        self._training = training
        self._drawn: set[str] = set()

    def code(self) -> str:
        """A marker that was not drawn before."""
        while True:
            code = self.random.randrange(10 ** (DIGITS - 1), 10**DIGITS)
            if not self._training:
                code -= code % HELD_OUT
            if (code % HELD_OUT == 0) != self._training and len(str(code)) == DIGITS and str(code) not in self._drawn:
                self._drawn.add(str(code))
                return str(code)

    def salt(self) -> str:
        """Sixteen letters, with which no other conversation begins."""
        return "".join(self.random.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=16))

    def labels(self, count: int) -> list[str]:
        """So many different places."""
        return self.random.sample(LABELS, count)


def codes_in(text: str) -> list[str]:
    """The markers in `text`, each once, in the order in which they come."""
    return list(dict.fromkeys(_WHOLE.findall(text) or _WHOLE.findall(_BETWEEN.sub("", text))))


def labels_in(text: str) -> list[str]:
    """The places in `text`, each once, in the order in which they come."""
    words = re.findall(r"[a-z]+", text.lower())
    return [word for word in dict.fromkeys(words) if word in LABELS]
