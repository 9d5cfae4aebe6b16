"""Sentences of natural text for the documents in which markers are hidden."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator

from harness.corpus import paragraphs

# Shorter ones are headings and exclamations, and a longer one would make a depth imprecise.
WORDS = range(6, 61)


@functools.cache
def corpus_sentences() -> tuple[str, ...]:
    """The sentences of the corpus without digits, so that every number in a document is one of ours.

    Raises:
        Failed: the corpus is not there, or not the one that came with the program.
    """
    found = (each for paragraph in paragraphs("austen") for each in re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph))
    return tuple(each for each in found if len(each.split()) in WORDS and not re.search(r"\d", each))


def sentences(random_numbers: random.Random) -> Iterator[str]:
    """The corpus from a random place on, and round and round."""
    all_of_them = corpus_sentences()
    index = random_numbers.randrange(len(all_of_them))
    while True:
        yield all_of_them[index]
        index = (index + 1) % len(all_of_them)


def passage(random_numbers: random.Random, words: int) -> list[str]:
    """Sentences of at least so many words together, in their order; none is longer than a sixth of it, or than 12."""
    longest = max(12, words // 6)  # a depth in between two sentences is as exact as they are short
    result: list[str] = []
    count = 0
    for sentence in sentences(random_numbers):
        if count >= words:
            break
        if len(sentence.split()) <= longest:
            result.append(sentence)
            count += len(sentence.split())
    return result
