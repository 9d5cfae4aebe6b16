"""A tokenizer whose arithmetic is plain, a small workload, sides that are the fake server, and the command."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from receipts_support import FACTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from harness import client, workload
from harness.bench import Side
from harness.receipt import PromptFacts, WorkloadFacts
from harness.recording import Facts
from harness.workload import Loaded
from slimserve import weights
from slimserve.engine.variables import OWNED
from slimserve.registry_files import load_registry

REGISTRY = Path(__file__).parents[1] / "registry"
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


def command(tmp_path: Path, *words: str) -> tuple[list[str], dict[str, str], Path]:
    """The command for a copy of a registry whose one small profile has a tokenizer, and the folder of its receipts."""
    copy = tmp_path / "registry"
    shutil.copytree(REGISTRY, copy)
    registry = load_registry(copy, OWNED)
    checkpoint = registry.models["tiny"].checkpoints["bf16"]
    folder = weights.folder(tmp_path / "cache", "tiny", "bf16", checkpoint)
    folder.mkdir(parents=True)
    save_tokenizer(folder / "tokenizer.json")
    environment = {**os.environ, "SLIMSERVE_PROFILES": str(copy), "SLIMSERVE_CACHE": str(tmp_path / "cache")}
    return [sys.executable, "-m", "slimserve", "tiny", "--bench", *words], environment, copy / "receipts"
