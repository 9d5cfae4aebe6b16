"""Writes what was trained as a checkpoint: bfloat16, under the names of the architecture's published ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.flashlet.batches import table
from harness.flashlet.shape import CONFIG, END, END_TURN, SPECIAL
from quixicore.ops.ngram.reference import multipliers
from slimserve.geometry.ngram import head_sizes

SAMPLING = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 20}
"""A small model's tails are noise, and its own sampling keeps clear of them."""


def write(folder: Path, checkpoint: Path) -> None:
    """Write the checkpoint of a training.

    Args:
        folder: of the training.
        checkpoint: to write into; made if need be.
    """
    state = json.loads((folder / "state.json").read_text())
    trained: dict[str, Tensor] = {}
    for number in range(state["shards"]):
        trained |= load_file(folder / f"state-{number}.safetensors")
    weights = {name.removeprefix("weight."): value for name, value in trained.items() if name.startswith("weight.")}
    checkpoint.mkdir(parents=True, exist_ok=True)
    save(weights, checkpoint)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(folder / name, checkpoint / name)


def save(weights: dict[str, Tensor], checkpoint: Path) -> None:
    """Write weights and configurations.

    Args:
        weights: of `Flashlet`, by their names.
        checkpoint: folder that is there.
    """
    tensors = {name: value for each in weights.items() for name, value in _named(*each)}
    place = "model.layers.{}.ple.ple_embedding.".format(CONFIG["ple_layer_ids"][0] - 1)
    sizes = torch.tensor(head_sizes(table()))
    tensors[place + "layer_multipliers"] = torch.tensor(
        multipliers(CONFIG["vocab_size"], CONFIG["ngram_size"], CONFIG["seed"])
    )
    tensors[place + "ngram_heads_vocab_sizes"] = sizes
    tensors[place + "ngram_heads_offsets"] = sizes.cumsum(0) - sizes
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    _json(checkpoint / "config.json", CONFIG)
    ends = [SPECIAL.index(END_TURN), SPECIAL.index(END)]
    _json(checkpoint / "generation_config.json", {**SAMPLING, "eos_token_id": ends, "pad_token_id": SPECIAL.index(END)})


def _named(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint that a weight becomes: experts one by one, the n-gram table in parts."""
    weight = weight.to(torch.bfloat16)
    owner, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        for expert, both in enumerate(weight):
            for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                yield f"{owner}.{expert}.{part}.weight", half.contiguous()
    elif name.endswith("experts.down_proj"):
        for expert, down in enumerate(weight):
            yield f"{owner}.{expert}.down_proj.weight", down.contiguous()
    elif owner.endswith("ngram_embedding"):
        for number, rows in enumerate(weight.chunk(CONFIG["split_ngram_parts"])):
            yield f"{owner}.shard_{number}.weight", rows.contiguous()
    else:
        yield name, weight.contiguous()


def _json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
