"""The tokenizer of a GGUF file as the files that a Hugging Face checkpoint has.

For SmolLM2-135M-Instruct `tokenizer.json` comes out byte for byte as the authors publish it, and
`tokenizer_config.json` but for the class (HuggingFaceTB/SmolLM2-135M-Instruct at
12fd25f77366fa6b3b4b768ec3050bf629380bac).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# GGUF's token types: what is not a plain piece of text is a special token.
_NORMAL, _CONTROL = 1, 3


def pretty(document: Mapping[str, Any], end: str = "\n") -> bytes:
    """`document` as JSON, two spaces deep, in the order of its keys: the same bytes on each machine."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + end).encode()


def problems(fields: Mapping[str, Any]) -> list[str]:
    """What keeps this tokenizer from being written, a sentence each.

    Args:
        fields: the metadata of the GGUF file by key.
    """
    found = []
    wanted: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    for key, value in wanted.items():
        if fields.get(key) != value:
            found.append(f"{key} is {fields.get(key)!r}; only {value!r} is understood")
    tokens, types, merges = (fields.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type", "merges"))
    if not (isinstance(tokens, list) and isinstance(types, list) and isinstance(merges, list)):
        return [*found, "tokenizer.ggml.tokens, token_type and merges are not all there"]
    if len(types) != len(tokens):
        found.append(f"{len(types)} token types for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        found.append("a token occurs twice")
    if strange := sorted(set(types) - {_NORMAL, _CONTROL}):
        found.append(f"token types {strange} are not understood")
    for name in ("bos", "eos", "unknown", "padding"):
        number = fields.get(f"tokenizer.ggml.{name}_token_id")
        if not isinstance(number, int) or not 0 <= number < len(tokens):
            found.append(f"tokenizer.ggml.{name}_token_id is {number!r}, with {len(tokens)} tokens")
    if not isinstance(fields.get("tokenizer.chat_template"), str):
        found.append("tokenizer.chat_template is missing")
    known = set(tokens)
    broken = [merge for merge in merges if len(parts := merge.split(" ")) != 2 or not {*parts, "".join(parts)} <= known]
    if broken:
        found.append(f"{len(broken)} merges do not join two tokens to a third, the first is {broken[0]!r}")
    return found


def tokenizer_json(fields: Mapping[str, Any]) -> bytes:
    """`tokenizer.json`: byte-level BPE whose digits stand alone.

    Args:
        fields: the metadata of a GGUF file that has no `problems`.

    Returns:
        The file. Its flags and the order of its keys are those of the `tokenizers` library.
    """
    tokens = fields["tokenizer.ggml.tokens"]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": tokens[number], **special} for number in _special(fields)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        # The decoder ignores the flag; it is what the authors' file says.
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }
    return pretty(document, end="")


def tokenizer_config_json(fields: Mapping[str, Any]) -> bytes:
    """`tokenizer_config.json`: the special tokens and the chat template.

    Args:
        fields: the metadata of a GGUF file that has no `problems`.
    """
    tokens = fields["tokenizer.ggml.tokens"]
    bos, eos, unknown, padding = (
        tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos", "unknown", "padding")
    )
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    document = {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(number): {"content": tokens[number], **special} for number in _special(fields)},
        "additional_special_tokens": [bos, eos],
        "bos_token": bos,
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "model_max_length": fields["llama.context_length"],
        "pad_token": padding,
        # The class that takes tokenizer.json as it is. The authors name GPT2Tokenizer, whose pre-tokenizer
        # transformers 5 builds anew, without the digits: "½" then gets ids that the model was not trained with.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unknown,
        "vocab_size": len(tokens),
    }
    return pretty(document)


def _special(fields: Mapping[str, Any]) -> list[int]:
    return [number for number, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == _CONTROL]
