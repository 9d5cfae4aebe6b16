"""Writes a checkpoint without weights: configuration and a tokenizer of bytes, for the engine's `load_format: dummy`.

    python -m harness.slice MODEL QUANT FOLDER

A slice has the real widths of a model and few of its layers, so that every kernel sees its real shape on hardware that
would not hold the whole, or without its weights. The registry's model file says which; the same file gives the same
bytes each time, which its manifest lists. What such a model says is noise.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slimserve import paths
from slimserve.model import Model, Quantisation
from slimserve.registry_files import load_registry

MODEL_TYPES = {
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen4ExpForCausalLM": "qwen4_exp_text",
}
START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BYTES = 256
_SPACE = "\u0120"


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="id of a model whose checkpoint is generated")
    parser.add_argument("quant", help="which of its checkpoints")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    own = os.environ.get("SLIMSERVE_PROFILES")
    models = load_registry(Path(own) if own else paths.profiles_folder()).models
    checkpoint = models[args.model].checkpoints.get(args.quant) if args.model in models else None
    if checkpoint is None or checkpoint.generated is None:
        sys.exit(f"harness.slice: {args.model} {args.quant} is no checkpoint that is generated")
    write(models[args.model], checkpoint.quantisation, args.folder)


def write(model: Model, quantisation: Quantisation | None, folder: Path) -> None:
    """Write the files of a slice.

    Args:
        model: its shape.
        quantisation: of its routed experts; None: all is bf16.
        folder: made where it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files(model, quantisation).items():
        (folder / name).write_text(json.dumps(data, indent=1, sort_keys=True, ensure_ascii=True) + "\n")


def files(model: Model, quantisation: Quantisation | None) -> dict[str, Any]:
    """The files by name, as JSON data."""
    sampling = {key: value for key, value in asdict(model.sampling).items() if value is not None}
    return {
        "config.json": config(model) | ({} if quantisation is None else {"quantization_config": fp8(model)}),
        "generation_config.json": {"do_sample": True, "eos_token_id": _BYTES + 1, **sampling},
        "tokenizer.json": tokenizer(model.geometry.vocab_size),
        "tokenizer_config.json": {
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "model_max_length": model.geometry.max_position_embeddings,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }


def config(model: Model) -> dict[str, Any]:
    """config.json of a geometry: text alone, whatever the whole model sees."""
    geometry = model.geometry
    fields = {name: value for name, value in asdict(geometry).items() if value is not None}
    layers, interval = geometry.num_hidden_layers, geometry.full_attention_interval or 1
    return {
        **fields,
        "architectures": [model.architecture],
        "model_type": MODEL_TYPES[model.architecture],
        "layer_types": ["linear_attention" if (n + 1) % interval else "full_attention" for n in range(layers)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
        "attn_output_gate": True,
        "output_gate_type": "sigmoid" if geometry.hc_count else "swish",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "bos_token_id": None,
        "eos_token_id": _BYTES + 1,
        "pad_token_id": None,
    }


def fp8(model: Model) -> dict[str, Any]:
    """The quantisation of the FP8 checkpoints: routed experts and the n-gram table; all else is named, and bf16."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "mtp.fc_embedding", "mtp.fc_hidden", *_whole(model)],
    }


def _whole(model: Model) -> Iterator[str]:
    """Modules of every layer that stay bf16. The engine compares whole names, those of its fused modules too."""
    linear = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "in_proj_b", "in_proj_a", "in_proj_ba", "out_proj")
    attention = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "indexer.index_qk_proj", "index_qk_proj")
    shared = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
    parts = [f"linear_attn.{name}" for name in linear] + [f"self_attn.{name}" for name in attention]
    parts += ["mlp.gate", "mlp.shared_expert_gate", *(f"mlp.shared_expert.{name}" for name in shared)]
    parts += [f"ple.{name}" for name in ("key_proj", "value_proj", "kv_proj")]
    for root, count in (
        ("model.layers", model.geometry.num_hidden_layers),
        ("mtp.layers", model.geometry.mtp_num_hidden_layers or 0),
    ):
        yield from (f"{root}.{layer}.{part}" for layer in range(count) for part in parts)


def tokenizer(vocab_size: int) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE without merges: a token is a byte, and two more open and close a turn.

    All others up to `vocab_size` stand for a number: no text is encoded to one, and noise that is made of them can be
    read, so that a client sees when tokens come.
    """
    bytes_of_text = {letter: n for n, letter in enumerate(_letters())}
    turns = {text: _BYTES + place for place, text in enumerate((START, END))}
    numbers = {f"{_SPACE}{n}": n for n in range(_BYTES + len(turns), vocab_size)}
    added = [
        {
            "id": number,
            "content": text,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for text, number in turns.items()
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": bytes_of_text | turns | numbers, "merges": []},
    }


def _letters() -> list[str]:
    """The letter for each byte, as byte-level tokenizers spell them: printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(_BYTES) if byte not in printable]
    return [chr(byte if byte in printable else _BYTES + others.index(byte)) for byte in range(_BYTES)]


if __name__ == "__main__":
    main()
