"""The conversion from GGUF, on a model of a few kilobytes that is written here, quantised blocks and all."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from slimserve.errors import Failed
from slimserve.weights import gguf_llama, gguf_tokenizer
from slimserve.weights.safetensors_file import read_header

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ w", "1 2"]
TOKENS = [*SPECIAL, *byte_symbols(), *(merge.replace(" ", "") for merge in MERGES)]


def weights(seed: int = 0) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    draw = np.random.default_rng(seed)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_output")}
        shapes |= {f"blk.{layer}.{name}": (kv, HIDDEN) for name in ("attn_k", "attn_v")}
        shapes |= {f"blk.{layer}.{name}": (INNER, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes[f"blk.{layer}.ffn_down"] = (HIDDEN, INNER)
    return {f"{name}.weight": draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def metadata() -> dict[str, Any]:
    return {
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": HIDDEN // HEADS,
        "llama.vocab_size": len(TOKENS),
        "llama.rope.freq_base": 100000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHAT,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
    }


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]],
    fields: dict[str, Any],
    architecture: str = "llama",
) -> Path:
    """Matrices as Q4_1, the embedding as Q8_0, vectors as F32: as the real file has them."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0 if name == "token_embd.weight" else gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def silent(done: int, total: int, name: str) -> None:
    assert 0 <= done <= total


def convert(tmp_path: Path, **changes: Any) -> Path:
    source = write_gguf(tmp_path / "m.gguf", changes.pop("tensors", weights()), metadata() | changes)
    target = tmp_path / "out"
    target.mkdir(exist_ok=True)
    gguf_llama.convert(source, target, silent)
    return target


def round_by_arithmetic(value: float) -> int:
    """bf16 bits of a finite value by exact fractions: nearest of the 8-bit significands, ties to even."""
    if value == 0:
        return 0x8000 if math.copysign(1, value) < 0 else 0
    _, exponent = math.frexp(abs(value))
    step = 2.0 ** (max(exponent, -125) - 8)
    rounded = math.copysign(
        round(abs(value) / step) * step, value
    )  # Python rounds ties to even, and this quotient is exact
    return struct.unpack("<I", struct.pack("<f", rounded))[0] >> 16


def test_bf16_is_rounded_to_nearest_even() -> None:
    draw = np.random.default_rng(1)
    bits = draw.integers(0, 1 << 32, 20_000, dtype=np.uint64).astype(np.uint32)
    bits[:4000] = (bits[:4000] & 0xFFFF0000) | 0x8000  # exact ties
    bits[4000:5000] = (bits[4000:5000] & 0x807FFFFF) | 0x8000  # subnormal, among them ties
    values = bits.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 3.38e38)]
    found = gguf_llama.to_bf16(values)
    assert found.dtype == np.uint16
    assert found.tolist() == [round_by_arithmetic(float(value)) for value in values]


def test_bf16_of_what_is_no_number() -> None:
    found = gguf_llama.to_bf16(np.array([np.inf, -np.inf, np.nan, 3.4e38], dtype=np.float32))
    assert found.tolist() == [0x7F80, 0xFF80, 0x7FC0, 0x7F80]


def test_rows_go_from_neighbours_to_halves() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(12, 1)
    assert gguf_llama.halves(rows, 2).ravel().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_rotary_embeddings_agree_after_the_rows_moved() -> None:
    """What the reordering is for: the same attention score, whichever way the rotation pairs the dimensions."""
    draw = np.random.default_rng(2)
    size, position = 8, 5
    q, k, x = (draw.standard_normal((size, 16), dtype=np.float32) for _ in range(3))
    angle = position * 10.0 ** -np.arange(size // 2)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def neighbours(v: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        even, odd = v[0::2], v[1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], 1).reshape(v.shape)

    def halved(v: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        low, high = v[: size // 2], v[size // 2 :]
        return np.concatenate([low * cos - high * sin, low * sin + high * cos])

    one = (neighbours(q @ x.T) * (k @ x.T)).sum()
    two = (halved(gguf_llama.halves(q, 1) @ x.T) * (gguf_llama.halves(k, 1) @ x.T)).sum()
    assert one == pytest.approx(two, rel=1e-5)


def test_every_tensor_arrives_under_its_name(tmp_path: Path) -> None:
    original = weights()
    target = convert(tmp_path, tensors=original)
    header = read_header(target / "model.safetensors")
    assert len(header) == len(original)
    assert {tensor.dtype for tensor in header.values()} == {"BF16"}
    content = (target / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    converted = {}
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            begin, end = (start + offset for offset in entry["data_offsets"])
            bits = np.frombuffer(content[begin:end], "<u2").astype(np.uint32) << 16
            converted[name] = bits.view(np.float32).reshape(entry["shape"])
    names = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
    }  # fmt: skip
    for theirs, weight in original.items():
        parts = theirs.split(".")
        ours = f"model.layers.{parts[1]}.{names[parts[2]]}.weight" if parts[0] == "blk" else f"{names[parts[0]]}.weight"
        expected = weight
        if parts[-2] in ("attn_q", "attn_k"):
            head_dim = HIDDEN // HEADS
            rows = [
                h * head_dim + r
                for h in range(len(weight) // head_dim)
                for r in (*range(0, head_dim, 2), *range(1, head_dim, 2))
            ]
            expected = weight[rows]
        # Q8_0 keeps 127 steps a block, Q4_1 fifteen over five standard deviations; F32 is only rounded.
        limit = 0.004 * np.abs(weight) if weight.ndim == 1 else 0.03 if theirs == "token_embd.weight" else 0.25
        assert (np.abs(converted[ours] - expected) <= limit).all(), theirs


def test_config_and_token_ids(tmp_path: Path) -> None:
    target = convert(tmp_path)
    config = json.loads((target / "config.json").read_bytes())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert (config["head_dim"], config["vocab_size"], config["tie_word_embeddings"]) == (16, len(TOKENS), True)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert json.loads((target / "generation_config.json").read_bytes()) == ids
    assert config | ids == config


def test_an_output_of_its_own_unties_the_embeddings(tmp_path: Path) -> None:
    more = {"output.weight": weights(1)["token_embd.weight"]}
    target = convert(tmp_path, tensors=weights() | more)
    assert "lm_head.weight" in read_header(target / "model.safetensors")
    assert json.loads((target / "config.json").read_bytes())["tie_word_embeddings"] is False


def test_the_same_bytes_whatever_the_order(tmp_path: Path) -> None:
    def hashes(folder: Path) -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}

    one = hashes(convert(tmp_path))
    (tmp_path / "b").mkdir()
    two = hashes(convert(tmp_path / "b", tensors=dict(reversed(weights().items()))))
    assert one == two
    assert set(one) == set(gguf_llama.FILES)


SCRIPTS = [
    "hello world 1234", "naïve café", "Россия", "مرحبا ١٢٣", "你好世界", "日本語", "한국어", "हिन्दी", "ไทย", "ἀρχή",
    "😀👍🏽🇺🇸", "a\r\n\tb  c", "½ ² Ⅷ", "\u200b\u2028\ufffd", "'s 'll don't", "", " ", "<|im_start|>user\nhi<|im_end|>",
]  # fmt: skip


@pytest.mark.parametrize("text", SCRIPTS)
def test_text_goes_in_and_comes_out(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.from_str(gguf_tokenizer.tokenizer_json(metadata()).decode())
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_merges_digits_and_special_tokens() -> None:
    tokenizer = Tokenizer.from_str(gguf_tokenizer.tokenizer_json(metadata()).decode())
    assert tokenizer.encode("hell w").tokens == ["hell", "Ġw"]
    # A merge of "1 2" exists and is never taken: digits stand alone.
    assert tokenizer.encode("12").tokens == ["1", "2"]
    assert tokenizer.encode("<|im_end|>").ids == [2]


def drop(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda fields: fields.pop(key)


def put(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda fields: fields.update({key: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("llama.block_count"), "llama.block_count is missing"),
        (put("llama.rope.scaling.type", "yarn"), "llama.rope.scaling.type = 'yarn' is not carried over"),
        (put("llama.expert_count", 8), "llama.expert_count = 8 is not carried over"),
        (put("llama.attention.head_count", 0), "is not a positive whole number"),
        (put("llama.attention.head_count", 3), "do not make 3 heads"),
        (put("llama.attention.head_count_kv", 3), "grouped evenly"),
        (put("llama.rope.dimension_count", 8), "covers 8 of 16"),
        (put("llama.feed_forward_length", 128), "tensor blk.0.ffn_gate.weight is [96, 64], the metadata say [128, 64]"),
        (put("llama.block_count", 3), "tensor blk.2.attn_q.weight is missing"),
        (put("llama.block_count", 1), "tensor blk.1.attn_q.weight is not carried over"),
        (put("llama.vocab_size", 9), "tokens for a vocabulary of 9"),
        (put("tokenizer.ggml.model", "llama"), "only 'gpt2' is understood"),
        (put("tokenizer.ggml.pre", "qwen2"), "only 'smollm' is understood"),
        (put("tokenizer.ggml.add_bos_token", True), "only False is understood"),
        (put("tokenizer.ggml.eos_token_id", 10**6), "eos_token_id is 1000000"),
        (put("tokenizer.ggml.token_type", [3]), "1 token types for"),
        (put("tokenizer.ggml.token_type", [6] * len(TOKENS)), "token types [6]"),
        (put("tokenizer.ggml.tokens", ["a"] * len(TOKENS)), "a token occurs twice"),
        (put("tokenizer.ggml.merges", ["he zz"]), "the first is 'he zz'"),
        (drop("tokenizer.ggml.merges"), "not all there"),
        (drop("tokenizer.chat_template"), "chat_template is missing"),
    ],
)
def test_what_would_not_be_carried_over_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    fields = metadata()
    change(fields)
    source = write_gguf(tmp_path / "m.gguf", weights(), fields)
    with pytest.raises(Failed) as caught:
        gguf_llama.convert(source, tmp_path, silent)
    assert words in str(caught.value)
    assert not (tmp_path / "config.json").exists()


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", weights(), metadata(), "qwen3")
    with pytest.raises(Failed, match=r"general\.architecture is 'qwen3'"):
        gguf_llama.convert(source, tmp_path, silent)


def test_values_that_bf16_cannot_hold_are_refused(tmp_path: Path) -> None:
    tensors = weights()
    for value in (np.nan, np.inf, 3.4e38):
        tensors["output_norm.weight"][3] = value
        with pytest.raises(Failed, match=r"tensor output_norm\.weight holds values that bf16 cannot"):
            convert(tmp_path, tensors=tensors)


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", weights(), metadata()).read_bytes()
    source = tmp_path / "broken.gguf"
    for content in (
        b"",
        b"GGUF",
        b"x" * 100,
        b"GGUF" + b"\xff" * 60,
        *(whole[:cut] for cut in range(24, len(whole) - 1, 4999)),
    ):
        source.write_bytes(content)
        with pytest.raises(Failed) as caught:
            gguf_llama.convert(source, tmp_path, silent)
        assert "broken.gguf" in caught.value.findings[0].what
