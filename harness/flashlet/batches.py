"""Texts as tensors: padded to one length, with the tokens that are worth learning marked, made by several processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, IterableDataset

from harness.flashlet.shape import BEGIN_TURN, CONFIG, END_TURN, SPECIAL
from harness.flashlet.text import sample
from quixicore.ops.ngram.reference import multipliers
from slimserve.geometry.ngram import head_sizes
from slimserve.geometry.shape import Ngram

_PAD = CONFIG["pad_token_id"]
_PROSE_WEIGHT = 0.1
"""of a token that is no part of an answer: it is to be learned too, but there are twenty of them for one that counts"""


@dataclass(frozen=True)
class Batch:
    """B texts of T tokens.

    Args:
        tokens: [B, T] int64, padded behind the end.
        rows: [B, T, S] int64, rows of the n-gram table.
        weights: [B, T] float32: how much it counts that this token is foretold; 0 for padding.
        answers: [B, T] bool: it is part of an answer, or ends it.
    """

    tokens: Tensor
    rows: Tensor
    weights: Tensor
    answers: Tensor

    def worth(self, ahead: int) -> Tensor:
        """[B, T]: how much it counts that each place foretells the token so many places further."""
        return pad(self.weights[:, ahead:], (0, ahead))

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        parts = (self.tokens, self.rows, self.weights, self.answers)
        return Batch(*(part.to(device, non_blocking=True) for part in parts))


def table() -> Ngram:
    """The n-gram table that CONFIG describes."""
    return Ngram(
        layer_ids=tuple(CONFIG["ple_layer_ids"]),
        embed=CONFIG["ple_embed_dim"],
        kernel=CONFIG["ple_conv_kernel_size"],
        size=CONFIG["ngram_size"],
        heads_per_ngram=CONFIG["heads_per_ngram"],
        base=CONFIG["ngram_vocab_size_base"],
        divisor=CONFIG["make_ngram_vocab_size_divisible_by"],
    )


class Batches:
    """Makes batches of texts.

    Args:
        tokenizer: file of it.
    """

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._begin, self._end = SPECIAL.index(BEGIN_TURN), SPECIAL.index(END_TURN)
        self._assistant = self._tokenizer.encode("assistant\n").ids
        self._sizes = numpy.array(head_sizes(table()))
        self._offsets = numpy.concatenate([[0], self._sizes.cumsum()[:-1]])
        self._factors = numpy.array(multipliers(CONFIG["vocab_size"], CONFIG["ngram_size"], CONFIG["seed"]))

    def make(self, texts: list[str], length: int) -> Batch:
        """A batch of these texts, cut off at `length` tokens each."""
        tokens = numpy.full((len(texts), length), _PAD, dtype=numpy.int64)
        answers = numpy.zeros((len(texts), length), dtype=bool)
        weights = numpy.zeros((len(texts), length), dtype=numpy.float32)
        for place, encoded in enumerate(self._tokenizer.encode_batch(texts, add_special_tokens=False)):
            ids = numpy.array(encoded.ids[:length])
            tokens[place, : len(ids)] = ids
            answers[place, : len(ids)] = self._answered(ids)
            weights[place, : len(ids)] = _PROSE_WEIGHT
        weights[answers] = 1
        arrays = (tokens, self._rows(tokens), weights, answers)
        return Batch(*(torch.from_numpy(array) for array in arrays))

    def _answered(self, ids: numpy.ndarray) -> numpy.ndarray:
        """Which tokens an assistant says, the end of its turn included."""
        said = numpy.zeros(len(ids), dtype=bool)
        lead = len(self._assistant) + 1
        for start in numpy.flatnonzero(ids == self._begin):
            if ids[start + 1 : start + lead].tolist() == self._assistant:
                ends = numpy.flatnonzero(ids[start:] == self._end)
                said[start + lead : start + ends[0] + 1 if len(ends) else len(ids)] = True
        return said

    def _rows(self, tokens: numpy.ndarray) -> numpy.ndarray:
        """As quixicore's `history` and `ids`, of many texts at once; no text holds an end but behind its last token."""
        mixed, rows = tokens * self._factors[0], []
        heads = CONFIG["heads_per_ngram"]
        for length in range(1, CONFIG["ngram_size"]):
            before = numpy.full_like(tokens, CONFIG["eos_token_id"])
            before[:, length:] = tokens[:, :-length]
            mixed = mixed ^ (before * self._factors[length])
            own = slice((length - 1) * heads, length * heads)
            rows.append(mixed[..., None] % self._sizes[own] + self._offsets[own])
        return numpy.concatenate(rows, -1)


class _Stream(IterableDataset[Batch]):
    """Batches without end, each drawn by its own number, so that a run taken up again draws none twice."""

    def __init__(self, tokenizer: Path, seed: int, length: int, count: int, first: int, rare: float) -> None:
        self._tokenizer, self._seed, self._length, self._count, self._first = tokenizer, seed, length, count, first
        self._rare = rare

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        number, step = (worker.id, worker.num_workers) if worker else (0, 1)
        made = Batches(self._tokenizer)
        while True:
            random_numbers = random.Random(f"{self._seed}-{self._length}-{self._first + number}")
            # A text is seldom just as long as it was asked for: better cut than filled up.
            texts = [sample(random_numbers, self._length, self._rare) for _ in range(self._count)]
            yield made.make(texts, self._length)
            number += step


def stream(
    tokenizer: Path, *, seed: int, length: int, count: int, first: int, rare: float, workers: int
) -> Iterator[Batch]:
    """Batches without end.

    Args:
        tokenizer: file of it.
        seed: of the texts.
        length: tokens of each, T.
        count: texts of a batch, B.
        first: number of the first batch.
        rare: as for `sample`.
        workers: processes that make them; 0: this one.
    """
    loader = DataLoader(
        _Stream(tokenizer, seed, length, count, first, rare),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
    )
    return iter(loader)
