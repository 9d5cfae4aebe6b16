"""What one step holds besides weights and caches: derived from the shapes that the engine's own forward passes through.

The engine profiles its longest step to size the cache, but without the cores of attention and of the linear layers:
those need caches, which do not exist yet. What the cores take comes on top hours later, with the first long prompt. So
there are two peaks: what profiling sees, and what the same step takes when it is real.

Sources, all of vllm 0.32: v1/worker/gpu/model_runner.py `profile_run` (skip_attn), models/qwen4_exp/nvidia/{model,
hyperconnection,ple_layer,qsa}.py, nvidia/ops/qsa_indexer.py, model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py
and third_party flash-linear-attention, layers/fused_moe/experts/{triton,marlin}_moe.py `workspace_shapes`,
v1/worker/gpu/sample/sampler.py.
"""

from __future__ import annotations

from slimserve.geometry import Layout, Shape
from slimserve.geometry.layout import BF16, FP32, ceil_div
from slimserve.geometry.shape import Attention, Experts, Linear
from slimserve.records import dataclass

_INT64 = 8
_CHUNK = 64
"""tokens of a chunk of the linear layers' prefill (flash-linear-attention)"""
_TOPK_WORKSPACE = 1 << 20


@dataclass(frozen=True)
class Activations:
    """Peaks of the longest step on one rank.

    Args:
        profiled_bytes: as the engine's profiling sees it.
        beyond_bytes: what the same step takes more when its prompt is real.
        kept_bytes: of `profiled_bytes`, what stays: the experts' workspaces.
        widest: the part of a layer where the first peak lies.
    """

    profiled_bytes: int
    beyond_bytes: int
    kept_bytes: int
    widest: str


@dataclass(frozen=True)
class Step:
    """The longest step.

    Args:
        tokens: of it (max_num_batched_tokens).
        requests: that decode in it (max_num_seqs).
        context_tokens: the longest context (max_model_len).
        score_bytes: the workspace of the sparse attention's block scores, whose size is fixed.
    """

    tokens: int
    requests: int
    context_tokens: int
    score_bytes: int


def activations(shape: Shape, layout: Layout, step: Step, experts_per_token: int) -> Activations:
    """Peaks of `step`."""
    shared = step.tokens * _expert_workspace(shape, layout, experts_per_token)
    profiled = {name: step.tokens * size for name, size in _phases(shape, layout, experts_per_token).items()}
    profiled["logits"] = _logits(shape, layout, step.requests, step.tokens)
    real = dict(profiled)
    for name, size in _cores(shape, layout).items():
        real[name] += step.tokens * size
    if shape.indexer is not None:
        # Always the whole workspace, and at least a row of every block that a context can have.
        row = ceil_div(step.context_tokens, shape.indexer.ratio) * FP32
        real["attention"] += max(step.score_bytes, row) + _TOPK_WORKSPACE
    real["logits"] = _logits(shape, layout, step.requests * (1 + layout.speculative_tokens), step.tokens)
    widest = max(profiled, key=lambda name: profiled[name])
    beyond = max(0, max(real.values()) - profiled[widest])
    return Activations(shared + profiled[widest], beyond, shared, widest)


def decode_bytes(shape: Shape, layout: Layout, step: Step, experts_per_token: int) -> int:
    """What a decode step of `step.tokens` tokens holds: the pool that all captured graphs share."""
    scores = 0
    if shape.indexer is not None:
        scores = step.tokens * ceil_div(step.context_tokens, shape.indexer.ratio) * FP32
    widest = max(_phases(shape, layout, experts_per_token).values())
    return step.tokens * widest + scores


def sampling_state(shape: Shape, requests: int) -> int:
    """Tables that penalties need: a count for each request and word, and a bit for each word of its prompt.

    Source: v1/worker/gpu/sample/penalties.py.
    """
    return requests * (shape.vocab + ceil_div(shape.vocab, 32)) * FP32


def _stream(shape: Shape) -> int:
    """Bytes of the residual of one token, over all its streams."""
    return shape.hidden * (shape.hyper.count if shape.hyper else 1) * BF16


def _phases(shape: Shape, layout: Layout, experts_per_token: int) -> dict[str, int]:
    """Bytes a token at the widest place of each part of a layer, without the cores."""
    stream, block = _stream(shape), shape.hidden * BF16
    # A layer's caller holds the residual that the layer got; the layer holds the one that it makes, and its input.
    before = 2 * stream + block
    after = before + block
    drafted = 2 * block if layout.drafts else 0  # the target's last hidden state, and embeddings
    if layout.draft_model is not None:  # what it reads of the target is kept until it drafts
        drafted += layout.draft_model.target_layers * block
    found = {"attention": before + drafted + _projections(shape.attention, shape, layout)}
    if shape.hyper is None:
        found["norms"] = 2 * stream + 2 * block + drafted
    else:
        low = (2 * shape.hyper.rank + 16) * BF16
        # Old and new residual, normed streams, gate.
        found["residual streams"] = 4 * stream + 2 * block + low + drafted
    if shape.linear is not None:
        found["linear attention"] = before + _linear(shape.linear, shape, layout.tensor_parallel)
    if shape.mlp is not None:
        found["mlp"] = after + 3 * (shape.mlp // layout.tensor_parallel) * BF16 + 2 * block
    if shape.experts is not None:
        found["experts"] = after + drafted + _experts(shape.experts, shape, layout, experts_per_token)
    if shape.ngram is not None and shape.ngram.layer_ids:
        # Rows as they were stored and in bf16; keys by stream and a value; what was gated, and what is convolved.
        found["n-gram embedding"] = 2 * stream + 3 * shape.ngram.embed + (stream + block) + 2 * stream
    return found


def _cores(shape: Shape, layout: Layout) -> dict[str, int]:
    """Bytes a token that the cores add."""
    found = {"attention": 0}
    if shape.indexer is not None:
        indexer = shape.indexer
        found["attention"] = indexer.heads * indexer.head_dim * BF16 + indexer.budget // indexer.ratio * FP32
    if shape.linear is not None:
        linear, heads = shape.linear, shape.linear.value_heads // layout.tensor_parallel
        convolved = 2 * (linear.channels // layout.tensor_parallel) * BF16  # and once more, contiguous by head
        gates = 2 * heads * FP32
        solved = heads * _CHUNK * (FP32 + BF16)
        updates = heads * (linear.key_dim + 3 * linear.value_dim) * BF16
        states = heads * linear.key_dim * linear.value_dim * BF16 // _CHUNK
        found["linear attention"] = convolved + gates + solved + updates + states
    return found


def _projections(attention: Attention, shape: Shape, layout: Layout) -> int:
    """q, k and v in one, q and its gate by themselves, the heads' outputs, the layer's and its sum over ranks."""
    tp = layout.tensor_parallel
    heads, kv_heads = attention.heads // tp, max(1, attention.kv_heads // tp)
    queries = heads * attention.head_dim * BF16
    merged = queries * (2 if attention.gated else 1) + 2 * kv_heads * attention.head_dim * BF16
    if shape.indexer is not None:
        merged += (shape.indexer.heads + shape.indexer.kv_heads) * shape.indexer.head_dim * BF16
    return merged + queries * (3 if attention.gated else 2) + 2 * shape.hidden * BF16


def _linear(linear: Linear, shape: Shape, tp: int) -> int:
    values = linear.value_heads * linear.value_dim // tp * BF16
    merged = linear.channels // tp * BF16 + values
    gates = 4 * linear.value_heads // tp * BF16
    return merged + gates + 2 * values + 2 * shape.hidden * BF16


def _experts(experts: Experts, shape: Shape, layout: Layout, experts_per_token: int) -> int:
    """Router, shared expert, what is quantised on the way, the output and its sum over ranks."""
    routed = experts.count * (BF16 + FP32) + experts_per_token * (_INT64 + 2 * FP32)
    shared = 3 * (experts.shared_inner // layout.shared_expert_ways) * BF16 + shape.hidden * BF16
    quantised = shape.hidden + experts_per_token * experts.inner
    return routed + shared + quantised + 2 * shape.hidden * BF16


def _expert_workspace(shape: Shape, layout: Layout, experts_per_token: int) -> int:
    """Bytes a token of the two workspaces that all layers share and that stay; replicas pass their tokens round."""
    if shape.experts is None:
        return 0
    inner, hidden = shape.experts.inner, shape.hidden
    return layout.data_parallel * experts_per_token * (max(inner, hidden) + max(2 * inner, hidden)) * BF16


def _logits(shape: Shape, layout: Layout, rows: int, tokens: int) -> int:
    """Logits of this rank, of all ranks, in fp32, and processed; beside the step's last hidden states."""
    own = shape.padded_vocab // layout.tensor_parallel * BF16
    return rows * (own + shape.padded_vocab * (BF16 + 2 * FP32)) + tokens * (_stream(shape) + shape.hidden * BF16)
