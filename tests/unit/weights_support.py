"""Small real checkpoints for the tests of slimserve.weights."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path

from slimserve.model import Checkpoint, HuggingFace
from slimserve.weights import Manifest, ManifestFile
from slimserve.weights.safetensors_file import Tensor, write

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from hub import REPO, REVISION, Hub

__all__ = ["REPO", "REVISION", "Hub", "hub_checkpoint", "manifest_of", "put", "shard", "sharded"]


def manifest_of(files: Mapping[str, bytes]) -> Manifest:
    """sha256 for shards, git's blob hash for the rest, as the Hub's listings have it."""
    result = []
    for name, content in files.items():
        if name.endswith(".safetensors"):
            result.append(ManifestFile(name, len(content), "sha256", hashlib.sha256(content).hexdigest()))
        else:
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            result.append(ManifestFile(name, len(content), "git-blob-sha1", blob))
    return tuple(result)


def shard(folder: Path, tensors: Mapping[str, int], seed: int = 0) -> bytes:
    """A safetensors file with bf16 vectors of the given lengths."""
    path = folder / "shard-being-made"
    draw = random.Random(seed)
    write(
        path,
        [Tensor(name, "BF16", (size,)) for name, size in tensors.items()],
        [draw.randbytes(2 * size) for size in tensors.values()],
    )
    content = path.read_bytes()
    path.unlink()
    return content


def sharded(folder: Path, size: int = 1000) -> dict[str, bytes]:
    """A checkpoint whose two shards have names that no pattern would guess."""
    shards = {"layer-00-experts.safetensors": {"a": size, "b": 3}, "odd name (1).safetensors": {"c": size}}
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    files = {name: shard(folder, tensors, seed) for seed, (name, tensors) in enumerate(shards.items())}
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    files["config.json"] = b'{"hidden_size": 8}'
    return files


def put(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def hub_checkpoint(manifest: Manifest, repo: str, revision: str) -> Checkpoint:
    total = sum(file.bytes for file in manifest)
    return Checkpoint(huggingface=HuggingFace(repo=repo, revision=revision), licence="none", manifest="m", bytes=total)
