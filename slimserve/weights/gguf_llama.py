"""The conversion `gguf-llama`: a Llama checkpoint in GGUF as a bf16 checkpoint in safetensors.

GGUF stores quantised weights, with the rows of the query and key projections in another order: its rotary embedding
turns neighbours (2i, 2i + 1), the checkpoint's turns halves (i, i + head_dim / 2). Each tensor is dequantised to
fp32, its rows put back, and rounded to bf16. Nothing depends on the machine, so the result has hashes in a manifest.

Needs numpy and gguf alone: neither torch nor the engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimserve.errors import Failed, Finding
from slimserve.weights import gguf_tokenizer, safetensors_file
from slimserve.weights.gguf_tokenizer import pretty
from slimserve.weights.meter import Tick
from slimserve.weights.safetensors_file import Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Everything of `llama.*` that this conversion carries over: another key (rope scaling, experts) would change the model.
_KEYS = {
    "llama.block_count", "llama.context_length", "llama.embedding_length", "llama.feed_forward_length",
    "llama.attention.head_count", "llama.attention.head_count_kv", "llama.rope.freq_base",
    "llama.attention.layer_norm_rms_epsilon", "llama.vocab_size", "llama.rope.dimension_count",
}  # fmt: skip


def convert(source: Path, target: Path, progress: Tick) -> None:
    """Write the checkpoint of `source` into `target`.

    Args:
        source: a GGUF file of the architecture `llama` with a byte-level BPE tokenizer.
        target: an existing folder; files in it that the conversion writes are overwritten.
        progress: called with bytes written, bytes in all, and the name of the tensor.

    Raises:
        Failed: the file is not GGUF, or holds what this conversion does not carry over.
        OSError: the disk is full or the folder not writable.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(source)
        fields: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise _refusal(source, [f"it does not read as GGUF: {error}"]) from None
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    found = _problems(fields)
    if not found:
        found = _shape_problems(fields, {name: tuple(int(n) for n in t.shape[::-1]) for name, t in tensors.items()})
    if found:
        raise _refusal(source, found)

    # By name, so that the order of the source's tensors does not change the result.
    order = sorted((_name(name), name) for name in tensors)
    plan = [Tensor(ours, "BF16", tuple(int(n) for n in tensors[theirs].shape[::-1])) for ours, theirs in order]
    total = sum(tensor.bytes for tensor in plan)
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}

    def data() -> Iterator[bytes]:
        done = 0
        for tensor, (_, theirs) in zip(plan, order, strict=True):
            weight = gguf.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
            kind = theirs.split(".")[-2]
            if kind in heads:
                weight = halves(weight, heads[kind])
            rounded = to_bf16(weight)
            if ((rounded & 0x7F80) == 0x7F80).any():
                raise _refusal(source, [f"tensor {theirs} holds values that bf16 cannot: infinite or not a number"])
            yield rounded.astype("<u2", copy=False).tobytes()
            done += tensor.bytes
            progress(done, total, f"converting {tensor.name}")

    safetensors_file.write(target / "model.safetensors", plan, data())
    for name, content in {
        "config.json": pretty(_config(fields, tied="output.weight" not in tensors)),
        "generation_config.json": pretty(_token_ids(fields)),
        "tokenizer.json": gguf_tokenizer.tokenizer_json(fields),
        "tokenizer_config.json": gguf_tokenizer.tokenizer_config_json(fields),
    }.items():
        with (target / name).open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())


def halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows from the order (2i, 2i + 1) of neighbours to the order (i, i + head_dim / 2) of halves.

    Args:
        weight: [heads * head_dim, in], fp32.
        heads: how many heads the rows belong to.

    Returns:
        The same shape and type.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def to_bf16(weight: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round fp32 to bf16, nearest even.

    Args:
        weight: any shape, fp32.

    Returns:
        The same shape; the bits of bf16. A value that is not a number stays one.
    """
    import numpy as np

    bits = np.ascontiguousarray(weight, dtype=np.float32).view(np.uint32)
    # Half of the last bit kept, less one when that bit is even: ties fall to the even neighbour.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(weight), np.uint16(0x7FC0), rounded.astype(np.uint16))


def _name(theirs: str) -> str:
    if theirs in _OUTSIDE:
        return _OUTSIDE[theirs]
    _, layer, kind, _ = theirs.split(".")
    return f"model.layers.{layer}.{_PROJECTIONS[kind]}.weight"


def _problems(fields: dict[str, Any]) -> list[str]:
    if fields.get("general.architecture") != "llama":
        return [f"general.architecture is {fields.get('general.architecture')!r}; only 'llama' is understood"]
    found = [f"{key} is missing" for key in sorted(_KEYS - fields.keys())]
    extra = sorted(key for key in fields if key.startswith("llama.") and key not in _KEYS)
    found += [f"{key} = {fields[key]!r} is not carried over, and it is part of the model" for key in extra]
    counts = sorted(_KEYS - {"llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"})
    found += [
        f"{key} = {fields[key]!r} is not a positive whole number"
        for key in counts
        if key in fields and not (isinstance(fields[key], int) and fields[key] > 0)
    ]
    if found:
        return found
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    if hidden % heads or hidden // heads % 2 or heads % fields["llama.attention.head_count_kv"]:
        found.append(f"{hidden} dimensions do not make {heads} heads of an even size, grouped evenly")
    elif fields["llama.rope.dimension_count"] != hidden // heads:
        rotary = fields["llama.rope.dimension_count"]
        found.append(f"the rotary embedding covers {rotary} of {hidden // heads} dimensions")
    return found + gguf_tokenizer.problems(fields)


def _shape_problems(fields: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    hidden, inner, vocabulary = (
        fields[f"llama.{key}"] for key in ("embedding_length", "feed_forward_length", "vocab_size")
    )
    kv = hidden // fields["llama.attention.head_count"] * fields["llama.attention.head_count_kv"]
    expected: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,)}
    if "output.weight" in shapes:
        expected["output.weight"] = (vocabulary, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
        "attn_norm": (hidden,), "ffn_norm": (hidden,),
    }  # fmt: skip
    for number in range(fields["llama.block_count"]):
        expected |= {f"blk.{number}.{kind}.weight": shape for kind, shape in layer.items()}
    found = [f"tensor {name} is missing" for name in expected if name not in shapes]
    found += [f"tensor {name} is not carried over" for name in shapes if name not in expected]
    for name, shape in expected.items():
        if name in shapes and shapes[name] != shape:
            found.append(f"tensor {name} is {list(shapes[name])}, the metadata say {list(shape)}")
    if len(fields["tokenizer.ggml.tokens"]) != vocabulary:
        found.append(f"{len(fields['tokenizer.ggml.tokens'])} tokens for a vocabulary of {vocabulary}")
    return found


def _token_ids(fields: dict[str, Any]) -> dict[str, int]:
    return {
        f"{ours}_token_id": fields[f"tokenizer.ggml.{theirs}_token_id"]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    import numpy as np

    def shortest(key: str) -> float:
        # The file holds fp32: 1e-05 is written as such, not as its neighbour in fp64.
        return float(str(np.float32(fields[key])))

    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": shortest("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": shortest("llama.rope.freq_base"), "rope_type": "default"},
        "tie_word_embeddings": tied,
        "vocab_size": fields["llama.vocab_size"],
        **_token_ids(fields),
    }


def _refusal(source: Path, problems: list[str]) -> Failed:
    return Failed(
        *(
            Finding(
                f"{source.name}: {problem}",
                "only what is understood is written: a checkpoint that is nearly right answers nonsense",
                "use the package and version that the model file pins",
                str(source),
            )
            for problem in problems[:20]
        )
    )
