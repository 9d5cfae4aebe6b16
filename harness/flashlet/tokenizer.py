"""Its tokenizer: bytes and their commonest pairs, with every digit a token of its own, so that a marker is seven."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from harness.corpus import paragraphs
from harness.flashlet.shape import BEGIN_TURN, END, END_TURN, SPECIAL, VOCAB
from harness.flashlet.text import TEMPLATE, conversation, render

_CONVERSATIONS = 3000


def train(folder: Path, seed: int = 1) -> None:
    """Make the tokenizer, and write its files.

    Args:
        folder: to write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into.
        seed: of the conversations that it is made from.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_texts(seed), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TURN,
        "pad_token": END,
        "bos_token": None,
        "unk_token": None,
        "additional_special_tokens": [BEGIN_TURN],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _texts(seed: int) -> Iterator[str]:
    """Conversations, and the corpus."""
    draw = random.Random(seed)
    for _ in range(_CONVERSATIONS):
        yield render(conversation(draw, 400))
    for work in ("austen", "jargon"):
        yield from paragraphs(work)
