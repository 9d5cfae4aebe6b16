"""Prompts of natural text with exact numbers of tokens, none of which begins like another.

A prompt begins at the beginning of a paragraph and goes on as the work does, stretch after stretch in an order that the
seed gives. No two prompts of a source have the same first `OPENING` tokens, so that no cache of prefixes can answer for
one with what it kept of another. Nothing is used twice before everything has been used once.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from harness import corpus
from slimserve.errors import Failed, Finding

Form = Literal["ids", "text"]
# Fewer than any engine's cache block has: two prompts never share one.
OPENING = 8
# Paragraphs are read in stretches of about so many characters before the seed's order goes elsewhere.
STRETCH_CHARACTERS = 8_000
BREAK = "\n\n"
MAX_TOKENS = 1 << 20


@dataclass(frozen=True)
class Prompt:
    """What is sent.

    Args:
        ids: the token ids, what the tokenizer adds of its own (such as a token that begins a text) included.
        text: what is sent instead, where ids are not taken: it is encoded to `ids`; else empty.
    """

    ids: tuple[int, ...]
    text: str


class PromptSource:
    """A seeded supply of prompts for one tokenizer.

    Args:
        tokenizer_path: the model's `tokenizer.json`.
        seed: another seed gives another order of the same text.
        form: "ids" counts the ids that are sent as they are; "text" yields texts whose encoding, tried out, has the
            exact number of tokens.
        works: of the corpus.

    Raises:
        Failed: the tokenizer or the corpus cannot be read.
    """

    def __init__(
        self, tokenizer_path: Path, seed: int | str, form: Form = "ids", works: Sequence[str] = corpus.WORKS
    ) -> None:
        self._tokenizer = load_tokenizer(tokenizer_path)
        self._form, self._seed = form, seed
        self._stretches = tuple(stretch for work in works for stretch in _stretches(corpus.paragraphs(work)))
        self._paragraphs = sum(map(len, self._stretches))
        self._openings: set[tuple[int, ...]] = set()
        self._lap = -1
        self._reading: Iterator[str] = iter(())
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Hash over everything taken so far, in its order: lengths, ids and bytes of each prompt."""
        return self._hash.hexdigest()

    @property
    def laps(self) -> int:
        """How often the whole corpus has been used up; over 0, stretches of text occur in several prompts."""
        return max(self._lap, 0)

    def take(self, count: int, tokens: int) -> tuple[Prompt, ...]:
        """`count` prompts of exactly `tokens` tokens each, that begin like nothing that was taken before.

        Raises:
            ValueError: a prompt of so many tokens cannot be told from others, or is longer than any context.
            Failed: the corpus has no beginning left that is new.
        """
        if not OPENING <= tokens <= MAX_TOKENS:
            raise ValueError(f"{tokens} tokens: a prompt has {OPENING} to {MAX_TOKENS}")
        return tuple(self._taken(tokens, new=True) for _ in range(count))

    def go_on(self, tokens: int) -> Prompt:
        """Text of exactly `tokens` tokens to follow a prompt that is taken: its beginning need not be new."""
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError(f"{tokens} tokens: a continuation has 1 to {MAX_TOKENS}")
        return self._taken(tokens, new=False)

    def join(self, parts: Sequence[Prompt]) -> Prompt:
        """What was taken, one after the other, as one prompt; of texts it is known by encoding them together."""
        if self._form == "ids":
            return Prompt(tuple(token for part in parts for token in part.ids), "")
        text = "".join(part.text for part in parts)
        return Prompt(tuple(self._encode(text, new=True)), text)

    def _taken(self, tokens: int, new: bool) -> Prompt:
        # In a lap every paragraph comes up once: after so many refusals there is no other left to try.
        for _ in range(self._paragraphs):
            first = self._paragraph() + BREAK
            if new and tuple(self._encode(first, new)[:OPENING]) in self._openings:
                continue
            prompt = self._read(first, tokens, new)
            if prompt is None:
                continue
            if new:
                self._openings.add(prompt.ids[:OPENING])
            ids = struct.pack(f"<{len(prompt.ids)}I", *prompt.ids)
            text = prompt.text.encode()
            self._hash.update(struct.pack("<QQ", len(ids), len(text)) + ids + text)
            return prompt
        what = f"no prompt of {tokens} tokens is left that begins like none before"
        raise Failed(Finding(what, f"{len(self._openings)} have been taken", "ask for fewer, or use more works"))

    def _encode(self, text: str, new: bool) -> list[int]:
        # What a tokenizer adds of its own belongs to the beginning of a prompt.
        return list(self._tokenizer.encode(text, add_special_tokens=new).ids)

    def _read(self, first: str, tokens: int, new: bool) -> Prompt | None:
        """`first` and what follows it, cut after `tokens` tokens; None if a text cannot be cut just there."""
        pieces, counted = [first], len(self._encode(first, new))
        ids: list[int] = []
        while len(ids) < tokens:
            while counted < tokens:
                pieces.append(self._paragraph() + BREAK)
                counted += len(self._encode(pieces[-1], new=False))
            ids = self._encode("".join(pieces), new)
            counted = len(ids)  # pieces may grow together where they meet
        if self._form == "ids":
            return Prompt(tuple(ids[:tokens]), "")
        # A text that is cut between two tokens may be encoded otherwise than the whole was: what counts is what comes
        # of encoding it.
        text = self._tokenizer.decode(ids[:tokens], skip_special_tokens=True)
        again = tuple(self._encode(text, new))
        return Prompt(again, text) if len(again) == tokens else None

    def _paragraph(self) -> str:
        paragraph = next(self._reading, None)
        if paragraph is None:
            self._lap += 1
            self._reading = self._lap_of(self._lap)
            paragraph = next(self._reading)
        return paragraph

    def _lap_of(self, lap: int) -> Iterator[str]:
        """All paragraphs, stretch after stretch, in an order of its own for each lap."""

        def rank(number: int) -> bytes:
            # Not `random`: whose shuffles are those of a Python version.
            return hashlib.sha256(f"{self._seed}/{lap}/{number}".encode()).digest()

        for number in sorted(range(len(self._stretches)), key=rank):
            yield from self._stretches[number]


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in `path`, which neither cuts nor fills what it encodes.

    Raises:
        Failed: it cannot be read.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special, for a missing file too
        why = f"{error}"
        do = "fetch the weights, of which it is one: slimserve PROFILE --fetch"
        raise Failed(Finding(f"{path} is no tokenizer that can be used", why, do)) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _stretches(paragraphs: Sequence[str]) -> Iterator[tuple[str, ...]]:
    stretch: list[str] = []
    for paragraph in paragraphs:
        stretch.append(paragraph)
        if sum(map(len, stretch)) >= STRETCH_CHARACTERS:
            yield tuple(stretch)
            stretch = []
    if stretch:
        yield tuple(stretch)
