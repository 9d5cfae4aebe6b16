"""Conversations with markers hidden in them, in pairs that begin alike and then differ.

A conversation is a document with facts at chosen depths, and questions about them, one a turn. Each turn may carry a
note with a further fact right before its question, so that the end of what an engine has cached is asked for as well.
The two of a pair have the same text and the same questions up to the digits of the markers in the second half of the
document and in the notes: an engine that takes the one's cache for the other's answers with the other's marker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from harness.recall.markers import Draw, Fact
from harness.recall.text import passage

Message = dict[str, Any]
Kind = Literal["code", "place"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What conversations look like.

    Args:
        context_tokens: how long the document is, about; the exact number is in the results.
        depths: where its facts stand, 0 to 1.
        turns: questions that are asked one after the other while it is fresh; odd.
        notes: each turn carries a further fact right before its question, and every second question asks for that of
            the turn before.
        distractors: void codes of the same places, strewn over the document.
        places: the question of the third turn is turned round: whose code is this?
        complete: a question is a sentence that breaks off before the code, for models too small to see what is asked.
    """

    context_tokens: int
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    turns: int = 5
    notes: bool = True
    distractors: int = 4
    places: bool = True
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """What one turn asks.

    Args:
        kind: the code of a place, or the place of a code.
        fact: what it asks for.
        complete: it is a sentence to complete.
    """

    kind: Kind
    fact: Fact
    complete: bool = False

    @property
    def expected(self) -> str:
        """What a right answer contains."""
        return self.fact.code if self.kind == "code" else self.fact.label

    @property
    def text(self) -> str:
        """The words of the question."""
        if self.kind == "code" and self.complete:
            return f"Complete the sentence with the number from the text: The code of the {self.fact.label} is"
        if self.kind == "code":
            return f"What is the code of the {self.fact.label}? Answer with the code alone."
        return f"Which place has the code {self.fact.code}? Answer with the place alone."


@dataclass
class Conversation:
    """One conversation, and how far it got.

    Args:
        id: unique within a battery; the two of a pair differ in the last letter.
        salt: the letters that it begins with.
        document: with the facts in it.
        facts: of the document, in the order of `Shape.depths`.
        notes: one fact a turn, or none.
        void: codes that are said to be void.
        questions: one a turn, and one more for after an eviction.
        answers: what the model said, turn by turn.
    """

    id: str
    salt: str
    document: str
    facts: tuple[Fact, ...]
    notes: tuple[Fact, ...]
    void: tuple[str, ...]
    questions: tuple[Question, ...]
    answers: list[str] = field(default_factory=list)

    @property
    def codes(self) -> frozenset[str]:
        """Every marker that it contains."""
        return frozenset(fact.code for fact in (*self.facts, *self.notes)) | frozenset(self.void)

    def messages(self, turn: int, salt: str | None = None) -> list[Message]:
        """The messages that ask the question of `turn` (from 0), with the answers that were given before.

        Args:
            turn: at most `len(self.answers)`.
            salt: another beginning, under which nothing of it is cached.
        """
        result = [system(salt or self.salt)]
        for index in range(turn + 1):
            parts = [self.document] if index == 0 else []
            if self.notes:
                parts.append(statement(self.notes[index]))
            parts.append(self.questions[index].text)
            result.append({"role": "user", "content": "\n\n".join(parts)})
            if index < turn:
                result.append({"role": "assistant", "content": self.answers[index]})
        return result


def system(salt: str) -> Message:
    """The first message. Its letters come first, so that no two beginnings share more than a template's own."""
    return {"role": "system", "content": f"{salt}. You answer questions about the text that the user gives you."}


def statement(fact: Fact) -> str:
    """The sentence that says it."""
    return f"The code of the {fact.label} is {fact.code}."


def build_pair(name: str, shape: Shape, words: int, draw: Draw, shift: int) -> tuple[Conversation, Conversation]:
    """Two conversations that share everything up to the markers in the second half of the document.

    Args:
        name: of the pair.
        shape: of both.
        words: of the document.
        draw: of markers, places and text.
        shift: by which the depths are rotated, so that pairs ask for each depth about equally often.
    """
    labels = draw.labels(len(shape.depths) + (shape.turns + 1) * shape.notes)
    count = len(shape.depths)
    facts = [Fact(label, draw.code(), depth) for label, depth in zip(labels, shape.depths, strict=False)]
    notes = [Fact(label, draw.code(), None) for label in labels[count:]]
    other_facts = [replace(fact, code=draw.code()) if index >= count // 2 else fact for index, fact in enumerate(facts)]
    other_notes = [replace(note, code=draw.code()) for note in notes]
    void = [draw.code() for _ in range(shape.distractors)]
    places = [draw.random.random() for _ in void]
    text = passage(draw.random, words)
    salt = draw.salt()

    def conversation(letter: str, facts: list[Fact], notes: list[Fact]) -> Conversation:
        strewn = [(fact.depth or 0.0, statement(fact)) for fact in facts]
        for index, (place, code) in enumerate(zip(places, void, strict=True)):
            strewn.append((place, f"Long ago the {labels[index % count]} had the number {code}, which is void now."))
        document = "\n".join(_strew(text, strewn))
        questions = tuple(_questions(shape, facts, notes, shift))
        return Conversation(f"{name}{letter}", salt, document, tuple(facts), tuple(notes), tuple(void), questions)

    return conversation("a", facts, notes), conversation("b", other_facts, other_notes)


def _strew(text: list[str], strewn: list[tuple[float, str]]) -> Iterator[str]:
    """`text` with each sentence of `strewn` at its depth."""
    rest = sorted(strewn, key=lambda pair: pair[0])
    whole, before = sum(len(sentence) for sentence in text), 0
    for sentence in text:
        # Before or after this sentence, whichever is nearer.
        while rest and rest[0][0] * whole <= before + len(sentence) / 2:
            yield rest.pop(0)[1]
        yield sentence
        before += len(sentence)
    yield from (sentence for _, sentence in rest)


def _questions(shape: Shape, facts: list[Fact], notes: list[Fact], shift: int) -> Iterator[Question]:
    """One question for each turn and one more; never the same fact in two turns that follow each other."""
    index = shift
    for turn in range(shape.turns + 1):
        if notes and turn % 2:
            yield Question("code", notes[turn - 1], shape.complete)
        else:
            kind: Kind = "place" if shape.places and turn == 2 else "code"
            yield Question(kind, facts[index % len(facts)], shape.complete)
            # Two steps at a time: what is asked for next does not stand beside what was asked for last.
            index += 2 if len(facts) % 2 else 1
