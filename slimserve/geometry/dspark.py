"""What a DSpark draft model takes on one rank.

Source: vllm 0.32, model_executor/models/qwen3_dflash.py (DFlashQwen3Model) and qwen3_dspark.py: layers are split as the
target's are; what joins the target's hidden states, and the Markov head, lie whole on every rank.
"""

from __future__ import annotations

from slimserve.errors import Finding, Refused, raise_if_any
from slimserve.geometry.layout import BF16, FP32, Layout
from slimserve.model import Drafter


def parameters(drafter: Drafter, target_hidden: int, vocab: int) -> int:
    """Parameters of the checkpoint."""
    return _sharded(drafter, 1) + _whole(drafter, target_hidden, vocab) + _confidence(drafter)


def weight_bytes(drafter: Drafter, target_hidden: int, vocab: int, tp: int) -> int:
    """Bytes of its weights on a rank.

    The key and value projections of all layers are there twice, the second time in one matrix (_fused_kv_weight); a
    mask embedding has room whether the checkpoint has one or not; the confidence head is fp32.
    """
    hidden, layers = drafter.hidden_size, drafter.num_hidden_layers
    fused = layers * 2 * kv_heads_on_rank(drafter, tp) * drafter.head_dim * (hidden + 1)
    values = _sharded(drafter, tp) + _whole(drafter, target_hidden, vocab) + fused + hidden
    return values * BF16 + _confidence(drafter) * FP32


def kv_heads_on_rank(drafter: Drafter, tp: int) -> int:
    """KV heads that a rank holds: split, and replicated once there are more ranks than heads."""
    return max(1, drafter.num_key_value_heads // tp)


def kv_bytes_a_token(drafter: Drafter, layout: Layout) -> int:
    """Bytes of K and V of one layer and one token on a rank."""
    size = BF16 if layout.draft_kv_dtype == "bfloat16" else 1
    return 2 * kv_heads_on_rank(drafter, layout.tensor_parallel) * drafter.head_dim * size


def check(drafter: Drafter, layout: Layout) -> None:
    """Refuse a layout over which the engine could not split it, or more tokens than it drafts.

    Raises:
        Refused: every quantity that does not fit.
    """
    tp, kv, findings = layout.tensor_parallel, drafter.num_key_value_heads, []
    why = "the engine gives every rank an equal share of the drafter"
    for name in ("num_attention_heads", "intermediate_size"):
        if getattr(drafter, name) % tp:
            what = f"the drafter's {name} = {getattr(drafter, name)} does not divide over tensor_parallel_size = {tp}"
            findings.append(Finding(what, why, "change tensor_parallel_size"))
    if kv % tp and tp % kv:
        what = f"the drafter's num_key_value_heads = {kv} does not divide over tensor_parallel_size = {tp}"
        findings.append(Finding(what, why, "change tensor_parallel_size"))
    if not 1 <= layout.speculative_tokens <= drafter.block_size:
        what = f"num_speculative_tokens = {layout.speculative_tokens}"
        trained = f"the drafter was trained to draft up to {drafter.block_size} in one pass"
        findings.append(Finding(what, trained, f"use 1 to {drafter.block_size}"))
    raise_if_any(Refused, findings)


def _sharded(drafter: Drafter, tp: int) -> int:
    """Values of all layers, norms among them, which are not split."""
    hidden, dim = drafter.hidden_size, drafter.head_dim
    heads, kv = drafter.num_attention_heads // tp, kv_heads_on_rank(drafter, tp)
    attention = (2 * heads + 2 * kv) * dim * hidden + 2 * dim
    return drafter.num_hidden_layers * (attention + 3 * hidden * (drafter.intermediate_size // tp) + 2 * hidden)


def _whole(drafter: Drafter, target_hidden: int, vocab: int) -> int:
    """What joins the hidden states, two norms, and both halves of the Markov head."""
    joined = drafter.target_layers * target_hidden * drafter.hidden_size
    return joined + 2 * drafter.hidden_size + 2 * vocab * drafter.markov_rank


def _confidence(drafter: Drafter) -> int:
    return drafter.hidden_size + drafter.markov_rank + 1
