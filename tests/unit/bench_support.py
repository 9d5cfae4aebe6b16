"""A tokenizer whose arithmetic is plain, a small workload, and sides that are the fake server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from receipts_support import FACTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from harness import client, workload
from harness.bench import Side
from harness.receipt import PromptFacts, WorkloadFacts
from harness.recording import Facts
from harness.workload import Loaded

WORKLOAD = """\
id: tiny
title: A tiny one
why: to have one
works: [devil]
rounds: 2
warm_up_output_tokens: 1
single: {input_tokens: 20, output_tokens: 3}
loads:
  - {concurrency: 2, conversations: 4}
  - {rate_per_s: 2.5, conversations: 3}
"""


def save_tokenizer(path: Path) -> Path:
    """Write a tokenizer with a token for each byte."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
    return path


def written(folder: Path, text: str = WORKLOAD) -> Loaded:
    """The workload of that text."""
    path = folder / "tiny.yaml"
    path.write_text(text)
    return workload.load(str(path))


def side(url: str, name: str = "fake") -> Side:
    """The server at `url`, of which all that receipts say is made up."""

    def facts(asked: WorkloadFacts, prompts: PromptFacts, together: str | None) -> Facts:
        return replace(FACTS, workload=asked, prompts=prompts, together=together)

    from harness.bench_command import get_text

    root = url.removesuffix("/v1")
    return Side(name, client.Target(url, "fake"), facts, lambda: get_text(f"{root}/metrics", None), lambda: None, 8)
