"""flashlet as it is trained and exported is what transformers makes of its checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from harness.flashlet import export, text, tokenizer  # noqa: E402
from harness.flashlet.batches import Batches  # noqa: E402
from harness.flashlet.model import Flashlet  # noqa: E402
from harness.flashlet.shape import CONFIG  # noqa: E402


def test_the_model_in_training_is_the_definition(tmp_path: Path) -> None:
    """Longer than the indexer's budget, so that selection counts; random weights, norms and convolutions spread."""
    from slimserve.engine import torchvision_cpu

    torchvision_cpu.install()
    from transformers import Qwen4ExpForCausalLM

    torch.manual_seed(5)
    net = Flashlet(CONFIG)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if "norm" in name:
                weight += 0.3 * torch.randn(weight.shape)
            weight.copy_(weight.to(torch.bfloat16))
    export.save(dict(net.named_parameters()), tmp_path)
    tokenizer.train(tmp_path)
    batch = Batches(tmp_path / "tokenizer.json").make([text.sample(random.Random(1), 600)], 500)
    with torch.no_grad():
        ours = net(batch, sparse=True, kind=torch.float32).logits
        whole = net(batch, sparse=False, kind=torch.float32).logits
        model = Qwen4ExpForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
        theirs = model(batch.tokens).logits
    apart = (ours - theirs).abs()
    assert apart.median() < 1e-3
    # Where two blocks are as good as each other to the last bit, either may be chosen.
    assert (apart.amax(-1) < 0.02).float().mean() > 0.98
    assert (whole - theirs).abs()[:, 300:].median() > 10 * apart[:, 300:].median()
