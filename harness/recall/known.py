"""Questions whose answers every model knows, so that a server which says anything at all has to say something true."""

from __future__ import annotations

import re

# The question, and what a right answer contains, whatever else it says.
KNOWN: tuple[tuple[str, str], ...] = (
    ("What is the capital of France?", r"\bparis\b"),
    ("What is the capital of Italy?", r"\brome\b"),
    ("What is the capital of Japan?", r"\btokyo\b"),
    ("What is the capital of Germany?", r"\bberlin\b"),
    ("What is the capital of Spain?", r"\bmadrid\b"),
    ("What is the capital of Egypt?", r"\bcairo\b"),
    ("What is the capital of Russia?", r"\bmoscow\b"),
    ("What is the capital of England?", r"\blondon\b"),
    ("How many days are there in a week?", r"\b(7|seven)\b"),
    ("How many months are there in a year?", r"\b(12|twelve)\b"),
    ("Which planet do people live on?", r"\bearth\b"),
    ("Which star is at the centre of our solar system?", r"\bsun\b"),
    ("What is frozen water called?", r"\bice\b"),
    ("Who wrote the play Romeo and Juliet?", r"\bshakespeare\b"),
    ("Which gas do people need to breathe?", r"\boxygen\b"),
    ("What do bees make?", r"\bhoney\b"),
    ("Which ocean lies between Europe and America?", r"\batlantic\b"),
    ("On which continent is China?", r"\basia\b"),
    ("On which continent is Kenya?", r"\bafrica\b"),
    ("What is 2 + 2?", r"\b(4|four)\b"),
    ("What is the opposite of hot?", r"\bcold\b"),
    ("Which animal says meow?", r"\bcats?\b"),
    ("Which day comes after Monday?", r"\btuesday\b"),
    ("Which month comes after January?", r"\bfebruary\b"),
)
SUFFIX = " Answer in a few words."


def is_right(question: str, text: str) -> bool:
    """Whether `text` answers one of KNOWN."""
    return re.search(dict(KNOWN)[question], text.lower()) is not None
