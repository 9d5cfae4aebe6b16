"""Weights and caches of one rank against the pinned engine's own classes, built without storage, byte for byte."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from geometry_models import A95B, FLASH_NEXT, HYBRID, SMOLLM2, checkpoint, config_json, fp8_experts_alone

from slimserve.geometry import Layout, caches, weights
from slimserve.geometry.ngram import rows
from slimserve.geometry.reading import shape_of
from slimserve.model import Checkpoint, Model

DRIVER = Path(__file__).with_name("geometry_driver.py")
CACHE_BYTES = 60 << 30
MAX_MODEL_LEN = 65536

# Which of the engine's parameters make up a part; the first that fits counts.
PARTS = (
    ("lm_head", ("lm_head",)),
    ("ngram_scale", ("ngram_embedding.weight_scale",)),
    ("ngram_table", ("ngram_embedding.weight",)),
    ("ple", (".ple.",)),
    ("embedding", ("embed_tokens",)),
    ("indexer", ("q_layernorm", "k_layernorm")),
    ("linear_attention", ("linear_attn",)),
    ("attention", ("self_attn",)),
    ("hyper_connections", ("hyper_connection",)),
    ("shared_expert", ("shared_expert",)),
    ("routed_scales", ("experts.w13_weight_scale_inv", "experts.w2_weight_scale_inv")),
    ("routed_experts", ("experts",)),
    ("router", ("mlp.gate.weight",)),
    ("mlp", ("mlp.",)),
    ("norms", ("norm",)),
    ("drafter", ("fc",)),
)


@dataclass(frozen=True)
class Case:
    """One model in one layout; the CPU's attention kernels ask for blocks of 32, those of Flash-Next for 16."""

    name: str
    model: Model
    layout: Layout
    max_model_len: int = MAX_MODEL_LEN
    fp8: bool = False

    @property
    def checkpoint(self) -> Checkpoint:
        """That of the registry, or all in bf16."""
        if self.fp8:
            return FLASH_NEXT.checkpoints["fp8-block128"]
        ngram = shape_of(self.model).ngram
        return checkpoint(host_bytes=rows(ngram) * ngram.embed // ngram.heads * 2 if ngram else 0)


def flash(tp: int = 1, **settings: Any) -> Layout:
    return Layout(tensor_parallel=tp, engram_on_host=False, **settings)


CPU = {"block_size": 32, "kernel_block": 32}
MTP = {"speculative_tokens": 2, "drafter": True}
CASES = (
    Case("flash-next", FLASH_NEXT, flash()),
    Case("flash-next, TP8 EP8, MTP k=2", FLASH_NEXT, flash(8, expert_parallel=True, **MTP)),
    Case("flash-next FP8, TP8 EP8, MTP k=2", FLASH_NEXT, flash(8, expert_parallel=True, **MTP), fp8=True),
    Case("flash-next, TP4, MTP k=3", FLASH_NEXT, flash(4, speculative_tokens=3, drafter=True)),
    Case("flash-next, TP2 EP2, block 64", FLASH_NEXT, flash(2, expert_parallel=True, block_size=64)),
    Case("flash-next, TP2, no prefix cache", FLASH_NEXT, flash(2, prefix_caching=False, **MTP)),
    Case("2.4T, TP8, MTP k=3", A95B, Layout(tensor_parallel=8, speculative_tokens=3, drafter=True, **CPU)),
    Case("2.4T, TP4 DP4 EP16", A95B, Layout(tensor_parallel=4, data_parallel=4, expert_parallel=True, **CPU)),
    Case("2.4T, TP16", A95B, Layout(tensor_parallel=16, **CPU)),
    Case("small hybrid", HYBRID, Layout(**CPU), 4096),
    Case("small hybrid, block 128", HYBRID, Layout(block_size=128, kernel_block=32), 4096),
    Case("smollm2", SMOLLM2, Layout(block_size=128, kernel_block=32), 8192),
)


def question(case: Case) -> dict[str, Any]:
    layout = case.layout
    quantised = {"quantization_config": fp8_experts_alone(case.model)} if case.fp8 else {}
    return {
        "config": config_json(case.model) | quantised,
        "max_model_len": case.max_model_len,
        "prefix_caching": layout.prefix_caching,
        "k": layout.speculative_tokens,
        "tensor_parallel": layout.tensor_parallel,
        "data_parallel": layout.data_parallel,
        "expert_parallel": layout.expert_parallel,
        "block_size": layout.block_size,
        # What the engine chooses where pages differ in size, and where the CPU's kernels read them.
        "kv_layout": "BLNHC" if case.model is FLASH_NEXT else "LBHNC",
        "cache_bytes": CACHE_BYTES,
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("geometry")
    (folder / "cases.json").write_text(json.dumps([question(case) for case in CASES]))
    command = [sys.executable, "-P", str(DRIVER), str(folder / "cases.json"), str(folder / "answers.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=folder)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return dict(zip((case.name for case in CASES), json.loads((folder / "answers.json").read_text()), strict=True))


def part_of(name: str) -> str:
    if name.startswith("drafter."):
        part = part_of(name.removeprefix("drafter."))
        return f"drafter_{part}" if part.startswith("routed_") else "drafter"
    return next(part for part, words in PARTS if any(word in name for word in words))


def by_part(sizes: dict[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in sizes.items():
        found[part_of(name)] = found.get(part_of(name), 0) + size
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_are_the_engines_parameters(case: Case, answers: dict[str, dict[str, Any]]) -> None:
    """Part by part: a parameter that nobody counts, or that is counted twice, shows."""
    shape = shape_of(case.model)
    planned = {part.name: part.bytes for part in weights(case.model, case.checkpoint, case.layout).parts}
    # The engine merges the index projection into q, k and v; its hash constants are no parameters.
    if shape.indexer is not None and shape.ngram is not None:
        merged = shape.attention.layers * 640 * 2560 * 2
        planned["indexer"] -= merged
        planned["attention"] += merged
        planned["ple"] -= (3 + 16 + 16) * 8
    real = by_part(answers[case.name]["weights"])
    real.pop("ngram_scale", None)  # one number
    assert planned == real


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_groups_and_blocks_are_the_engines(case: Case, answers: dict[str, dict[str, Any]]) -> None:
    """Block size, groups in order with their layers and pages, slab, blocks in a pool, requests at full length."""
    real, planned = answers[case.name], caches(case.model, case.layout)
    assert planned.block_tokens == real["block_tokens"]
    assert planned.slab_bytes == real["slab_bytes"]
    assert planned.pool_blocks(CACHE_BYTES) == real["blocks"]
    longest = planned.blocks_a_request(case.max_model_len, case.max_model_len)
    assert real["blocks"] / longest == pytest.approx(real["concurrency"], rel=1e-12)
    assert [group.kind for group in planned.groups] == [kind_of(group) for group in real["groups"]]
    for ours, theirs in zip(planned.groups, real["groups"], strict=True):
        names = {name.split(".indexer.")[0].removesuffix(".attn") for name in theirs["layers"]}
        assert ours.layers == len(names)
        assert ours.page_bytes == sum(theirs["pages"])
        if ours.block_tokens:
            assert ours.block_tokens == theirs["block_tokens"]


def kind_of(group: dict[str, Any]) -> str:
    if group["spec"] == "MambaSpec":
        return "window" if all(name.endswith(".ple") for name in group["layers"]) else "state"
    return "ring" if group["spec"] == "CircularBufferSpec" else "attention"
