"""Random checkpoints of Flash-Next's architecture, in which each class of weights counts.

As transformers makes them, the n-gram convolution is zero and the norms are one: a fault there would be seen by nobody.
Here norms are spread, decays cover short and long memories, and convolutions are of the order of the residual.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCAB = 512
END = 2
"""The token that ends a text; n-grams do not reach behind it."""

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    # All experts: a choice that flips by rounding moves a logit further than any fault that is looked for.
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "initializer_range": 0.1,
    "hc_count": 4,
    "hc_lowrank": 32,
    "ple_layer_ids": [2],
    "ple_embed_dim": 128,
    "ngram_size": 3,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 2000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "mamba_ssm_dtype": "float32",
    "output_gate_type": "sigmoid",
    "eos_token_id": END,
    "pad_token_id": 0,
    "bos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}

VARIANTS: Mapping[str, dict[str, Any]] = {
    "small": {},
    "wide-blocks": {"indexer_compress_ratio": 16, "indexer_budget": 128, "hidden_size": 192, "hc_lowrank": 48},
    "first-layer-ngram": {"ple_layer_ids": [1], "indexer_budget": 32, "ple_embed_dim": 192, "heads_per_ngram": 6},
    "two-sparse": {
        "num_hidden_layers": 6,
        "layer_types": ["linear_attention", "linear_attention", "indexed_attention"] * 2,
        "ple_layer_ids": [4],
        "indexer_n_heads": 4,
        "linear_num_value_heads": 6,
    },
    "routed": {"num_experts": 8, "num_experts_per_tok": 2},
}
"""What each checkpoint has otherwise than `small`."""


def write(folder: Path, variant: str, seed: int = 7) -> None:
    """Make a checkpoint with a drafter, and no tokenizer.

    Args:
        folder: empty, or not there yet.
        variant: of VARIANTS.
        seed: of its weights.
    """
    from slimserve.engine import torchvision_cpu

    torchvision_cpu.install()
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    settings = {**_SMALL, **VARIANTS[variant]}
    torch.manual_seed(seed)
    model = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**settings))
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=source)
            *_, owner, _ = name.rsplit(".", 2)
            if "norm" in owner:
                weight.add_(0.3 * noise)
            elif name.endswith("dt_bias"):
                weight.copy_(noise)
            elif name.endswith("A_log"):
                weight.copy_((torch.rand(weight.shape, generator=source) * 8 + 0.3).log())
            elif "conv1d" in name:
                weight.copy_(0.4 * noise)
            elif name.startswith("lm_head"):
                weight.mul_(1.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    last = max(n for n, kind in enumerate(settings["layer_types"]) if kind == "indexed_attention")
    drafter = _drafter(model.state_dict(), last, settings["hidden_size"], settings["hc_count"], source)
    path = folder / "model.safetensors"
    save_file({**load_file(path), **drafter}, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["mtp_num_hidden_layers"] = 1
    config["mtp"] = {"hybrid": True, "num_hidden_layers": 1, "layer_types": ["full_attention"], "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _drafter(model: dict[str, Any], layer: int, hidden: int, streams: int, source: Any) -> dict[str, Any]:
    """A drafter that copies the last sparse layer and the mixer, and reads its inputs through random matrices."""
    import torch

    found = {}
    for name, weight in model.items():
        if name.startswith(own := f"model.layers.{layer}."):
            found["mtp.layers.0." + name.removeprefix(own)] = weight.clone()
        elif name.startswith("model.hyper_connection_mixer."):
            found["mtp." + name.removeprefix("model.")] = weight.clone()
    sizes = {
        "pre_fc_norm_embedding": (hidden,),
        "pre_fc_norm_hidden": (streams * hidden,),
        "fc_embedding": (hidden, hidden),
        "fc_hidden": (hidden, hidden),
    }
    for name, size in sizes.items():
        found[f"mtp.{name}.weight"] = (0.1 * torch.randn(size, generator=source)).to(torch.bfloat16)
    return found
