"""What a battery asks, and of which answers it is content."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from harness.recall.conversation import Shape
from harness.recall.identity import TOLERANCE

# A document is as long as it was asked for, and up to a sentence more; words are not all as long as those counted.
LONGER = 1.2
# Of one turn: question, note and template.
QUESTION_TOKENS = 100
TOOL_ANSWERS = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """A battery.

    Args:
        shapes: of the conversations; `pairs` of each.
        pairs: of conversations, of each shape and sampling.
        greedy: ask a second set without sampling: only a verification launch lets that through.
        known: questions with known answers.
        tool_conversations: of two round trips each; 0 for a model without tools.
        tool_context_tokens: of their documents.
        churn_tokens: of unrelated prompts, sent to evict everything before conversations are resumed; 0: none are.
        restores: after that the server has the beginnings back from somewhere, and does not compute them anew.
        max_tokens: of an answer, its thought included.
        concurrency: conversations that go on at the same time. What is compared is asked alone.
        floor: the rate that the intervals are held against.
        previous_ceiling: how often a later turn may get the answer to the turn before.
        tolerance: of logprobs, natural logarithm.
    """

    shapes: tuple[Shape, ...] = (Shape(4096),)
    pairs: int = 5
    greedy: bool = False
    known: int = 20
    tool_conversations: int = 6
    tool_context_tokens: int = 1024
    churn_tokens: int = 0
    restores: bool = False
    max_tokens: int = 2048
    concurrency: int = 4
    floor: float = 0.6
    previous_ceiling: float = 0.02
    tolerance: float = TOLERANCE

    @property
    def longest_tokens(self) -> int:
        """That a conversation may take, its answers included; with all of them at their longest."""
        turns = [(shape.context_tokens, shape.turns + 1) for shape in self.shapes]
        if self.tool_conversations:
            turns.append((self.tool_context_tokens, TOOL_ANSWERS))
        return max(round(context * LONGER) + count * (self.max_tokens + QUESTION_TOKENS) for context, count in turns)

    def to_json(self) -> dict[str, Any]:
        """As a receipt carries them."""
        return asdict(self)


# What a model of a hundred million parameters can do at all: find the one code in a few sentences, about every second
# time. With two it takes either. See docs/recall.md.
SMALL = Settings(
    shapes=tuple(
        Shape(90, depths=(depth,), turns=1, notes=False, distractors=0, places=False, complete=True)
        for depth in (0.1, 0.5, 0.9)
    ),
    pairs=2,
    tool_conversations=0,
    max_tokens=24,
    concurrency=2,
    floor=0.2,
    previous_ceiling=0.2,
)
# What a few million parameters can do that were trained to find things in a long text: all of it but tools. On two
# cores it takes about a minute.
MEDIUM = Settings(
    shapes=(Shape(1024), Shape(2048)),
    pairs=2,
    tool_conversations=0,
    max_tokens=32,
    concurrency=2,
)
PRESETS = {"standard": Settings(), "medium": MEDIUM, "small": SMALL}
