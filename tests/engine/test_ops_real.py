"""References against the tables that the engine computes for itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from quixicore.ops.turboquant.reference import FORMATS, centroids


@pytest.mark.parametrize("dims", [64, 128, 256])
@pytest.mark.parametrize("bits", sorted({form.key_bits for form in FORMATS.values()} - {8}))
def test_centroids_are_those_of_the_engine_to_the_bit(dims: int, bits: int) -> None:
    engine = importlib.util.find_spec("vllm")
    assert engine is not None
    assert engine.origin is not None
    folder = Path(engine.origin).parent / "model_executor/layers/quantization/turboquant"
    spec = importlib.util.spec_from_file_location("centroids_of_the_engine", folder / "centroids.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert torch.equal(module.get_centroids(dims, bits), centroids(dims, bits))
