"""What stands before each launch: nothing missing, nothing truncated, nothing foreign."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from weights_support import manifest_of, put, shard, sharded

from slimserve.errors import Failed
from slimserve.model import Geometry
from slimserve.shapes import plain
from slimserve.weights import check, check_config
from slimserve.weights.safetensors_file import MAX_HEADER_BYTES, Tensor, read_header, write


def findings(folder: Path, files: dict[str, bytes], **changed: bytes | None) -> list[str]:
    """Write `files` with some changed or left out; their manifest is that of the changed ones, where they are there."""
    renamed = {
        "index": "model.safetensors.index.json",
        "odd": "odd name (1).safetensors",
        "first": "layer-00-experts.safetensors",
    }
    there = {**files, **{renamed[key]: value for key, value in changed.items() if value is not None}}
    for key, value in changed.items():
        if value is None:
            del there[renamed[key]]
    target = folder / "t"
    put(target, there)
    return [f"{finding.what} | {finding.why}" for finding in check(target, manifest_of({**files, **there}))]


def test_b9_shards_are_found_by_the_index_whatever_their_name(tmp_path: Path) -> None:
    assert findings(tmp_path, sharded(tmp_path)) == []


def test_b7_a_missing_shard_is_named(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, sharded(tmp_path), odd=None)
    assert found.startswith("odd name (1).safetensors is not there")


def test_b7_a_shard_that_the_index_names_and_nobody_lists(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "layer-00-experts.safetensors", "z": "../elsewhere.safetensors"}}).encode()
    (found,) = findings(tmp_path, sharded(tmp_path), index=index)
    assert "shard ../elsewhere.safetensors is foreign" in found


def test_a_tensor_that_its_shard_does_not_hold(tmp_path: Path) -> None:
    weight_map = {
        "a": "layer-00-experts.safetensors",
        "lost": "layer-00-experts.safetensors",
        "c": "odd name (1).safetensors",
    }
    (found,) = findings(tmp_path, sharded(tmp_path), index=json.dumps({"weight_map": weight_map}).encode())
    assert found.startswith("layer-00-experts.safetensors does not hold lost")


@pytest.mark.parametrize(
    "index",
    [b"", b"{", b"[]", b'{"weight_map": []}', b'{"weight_map": {"a": []}}', b'{"weight_map": {}}', b"[" * 100_000],
)
def test_an_index_that_is_none(tmp_path: Path, index: bytes) -> None:
    (found,) = findings(tmp_path, sharded(tmp_path), index=index)
    assert "model.safetensors.index.json" in found


def test_a_size_that_is_not_the_manifests(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    put(tmp_path / "t", {**files, "config.json": b"{"})
    (found,) = check(tmp_path / "t", manifest_of(files))
    assert found.what == "config.json is 1 bytes long"
    assert found.where.endswith("/t/config.json")


def test_truncated_shards_with_a_manifest_that_agrees(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    whole = files["odd name (1).safetensors"]
    for length in (0, 7, 8, 20, len(whole) - 1):
        (found,) = findings(tmp_path, files, odd=whole[:length])
        assert found.startswith("odd name (1).safetensors"), length
    (found,) = findings(tmp_path, files, odd=whole + b"x")
    assert "has bytes too many" in found


def header(document: object, data: bytes = b"") -> bytes:
    raw = json.dumps(document).encode()
    return len(raw).to_bytes(8, "little") + raw + data


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"<html>nothing here</html>", "says that its header has"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "is legal"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "is legal"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((4).to_bytes(8, "little") + b"\xff\xff\xff\xff", "unreadable header"),
        (header({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 1]}}, b"x"), "F99"),
        (header({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}, b"x"), "is 2 bytes, its range 0..1"),
        (header({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, -1]}}), "-1 is not a whole number"),
        (header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"xx"), "starts at byte 1"),
        (header({"a": {"dtype": "U8"}}), "KeyError"),
        (header({"a": 1}), "TypeError"),
    ],
)
def test_what_is_not_safetensors(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(Failed) as caught:
        read_header(path)
    assert word in str(caught.value)
    assert "x.safetensors" in caught.value.findings[0].what


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    from safetensors import safe_open

    tensors = [Tensor("b", "BF16", (2, 3)), Tensor("a", "F32", ()), Tensor("none", "U8", (0, 4))]
    write(tmp_path / "x", tensors, [bytes(range(12)), b"\0\0\x80?", b""])
    with safe_open(tmp_path / "x", "numpy") as file:
        assert set(file.keys()) == {"a", "b", "none"}
        assert file.get_tensor("a") == 1.0
        assert file.get_slice("b").get_shape() == [2, 3]
    assert read_header(tmp_path / "x") == {tensor.name: tensor for tensor in tensors}
    with pytest.raises(ValueError, match="11 bytes of data, the header says 12"):
        write(tmp_path / "y", tensors[:1], [bytes(11)])


def test_one_file_without_an_index(tmp_path: Path) -> None:
    content = shard(tmp_path, {"a": 4})
    put(tmp_path / "t", {"model.safetensors": content})
    assert check(tmp_path / "t", manifest_of({"model.safetensors": content})) == []
    (finding,) = check(tmp_path / "t", manifest_of({"model.safetensors": content, "config.json": b"{}"}))
    assert "config.json is not there" in finding.what


def geometry(**more: int) -> Geometry:
    shapes = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    shapes |= {"head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192}
    return Geometry(**{**shapes, **more})


def test_a12_config_of_the_text_part_is_the_one_that_counts(tmp_path: Path) -> None:
    right = plain(geometry(num_experts=512), nulls=False)
    for document in (right, {"hidden_size": 1, "text_config": right}):
        (tmp_path / "config.json").write_text(json.dumps(document))
        assert check_config(tmp_path, geometry(num_experts=512)) == []


def test_a12_a_missing_field_is_a_finding_never_a_default(tmp_path: Path) -> None:
    wrong = {**plain(geometry(), nulls=False), "hidden_size": 577}
    del wrong["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps({**plain(geometry(), nulls=False), "text_config": wrong}))
    found = [finding.what for finding in check_config(tmp_path, geometry(num_experts=512))]
    assert found == [
        "text_config.hidden_size = 577, the model file says 576",
        "text_config.head_dim is missing",
        "text_config.num_experts is missing",
    ]


@pytest.mark.parametrize("content", [None, b"", b"[]", b"\xff", b'{"text_config": 5}'])
def test_a_config_that_is_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    (finding,) = check_config(tmp_path, geometry())
    assert "config.json" in finding.what
