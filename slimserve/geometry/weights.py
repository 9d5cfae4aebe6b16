"""Bytes of a model's weights on one rank, part by part.

Every rank holds the same: what does not divide evenly is refused. All but routed experts is bf16 (2 bytes a value) in
each checkpoint that is known here. The vision tower is left out: text is what is served.

Sources, all of vllm 0.32: models/qwen4_exp/nvidia/{model,qsa,indexer_qsa,hyperconnection,ple_layer,mtp}.py,
model_executor/models/{llama,qwen3_next,qwen3_5,qwen3_5_mtp}.py, layers/mamba/gdn/qwen_gdn_linear_attn.py.
"""

from __future__ import annotations

from slimserve.errors import Finding, Refused, RegistryError
from slimserve.geometry import dspark
from slimserve.geometry.layout import BF16, FP32, Layout, ceil_div
from slimserve.geometry.ngram import row_bytes, rows
from slimserve.geometry.reading import check_layout, shape_of
from slimserve.geometry.shape import Attention, Experts, Hyper, Indexer, Linear, Ngram, Shape
from slimserve.model import Checkpoint, Model, Quantisation, QuantisedTensor
from slimserve.records import dataclass

_INT64 = 8
# Rows to which the merged down and injection matrix of a hyper-connection is padded.
_HYPER_PADDING = 16


@dataclass(frozen=True)
class Part:
    """One part of a model on one rank.

    Args:
        name: of the part.
        bytes: that it takes there.
        on_host: it lies in host memory, else in the device's.
    """

    name: str
    bytes: int
    on_host: bool = False


@dataclass(frozen=True)
class Weights:
    """All parts of a model on one rank."""

    parts: tuple[Part, ...]

    @property
    def device_bytes(self) -> int:
        """What the device holds."""
        return sum(part.bytes for part in self.parts if not part.on_host)

    @property
    def host_bytes(self) -> int:
        """What host memory holds for this rank.

        Data-parallel replicas on one node share it when the engine can (vllm/config/engram.py, dp_shared_memory).
        """
        return sum(part.bytes for part in self.parts if part.on_host)

    def bytes_of(self, name: str) -> int:
        """Bytes of the part with this name; 0 when the model has none."""
        return sum(part.bytes for part in self.parts if part.name == name)


def weights(model: Model, checkpoint: Checkpoint, layout: Layout) -> Weights:
    """The weights of one rank.

    Args:
        model: whose geometry counts.
        checkpoint: one of its checkpoints.
        layout: how it is run.

    Raises:
        RegistryError: the geometry or the quantisation is incomplete or contradicts itself.
        Refused: the layout does not divide the model.
    """
    shape = shape_of(model)
    check_layout(shape, layout)
    tp, quantisation = layout.tensor_parallel, checkpoint.quantisation
    table = shape.padded_vocab // tp * shape.hidden * BF16
    found = [Part("embedding", table)]
    if not shape.tied:
        found.append(Part("lm_head", table))
    if shape.linear is not None:
        found.append(Part("linear_attention", shape.linear.layers * _linear(shape.linear, shape.hidden, tp)))
    found += _blocks(shape, layout, quantisation, drafter=False)
    if shape.ngram is not None and shape.ngram.layer_ids:
        found.append(Part("ple", len(shape.ngram.layer_ids) * _ple(shape)))
        found.append(Part("ngram_table", ngram_table(shape.ngram, checkpoint, layout), layout.engram_on_host))
    if layout.drafter:
        # Embedding and head are the target's (v1/worker/gpu/spec_decode/eagle/utils.py); n-gram embedding it has none.
        drafted = _blocks(shape, layout, quantisation, drafter=True)
        routed = [Part(f"drafter_{part.name}", part.bytes) for part in drafted if part.name.startswith("routed_")]
        dense = sum(part.bytes for part in drafted if not part.name.startswith("routed_"))
        found += [Part("drafter", dense + _drafter_inputs(shape, tp)), *routed]
    if layout.draft_model is not None:
        found.append(Part("drafter", dspark.weight_bytes(layout.draft_model, shape.hidden, shape.vocab, tp)))
    return Weights(tuple(part for part in found if part.bytes))


def ngram_table(ngram: Ngram, checkpoint: Checkpoint, layout: Layout) -> int:
    """Bytes of a rank's share of the n-gram table, which is split by rows over tensor parallelism.

    Raises:
        RegistryError: the checkpoint's table does not fit the geometry.
        Refused: the rows do not divide.
    """
    count, tp = rows(ngram), layout.tensor_parallel
    if count % tp:
        what = f"the n-gram table's {count} rows do not divide over tensor_parallel_size = {tp}"
        raise Refused(Finding(what, "the engine gives every rank an equal share", "change tensor_parallel_size"))
    return count // tp * row_bytes(ngram, checkpoint.host_bytes)


def _blocks(shape: Shape, layout: Layout, quantisation: Quantisation | None, *, drafter: bool) -> list[Part]:
    """Attention layers, and what stands beside every layer: of the model, or of its drafter (attention layers only)."""
    layers = shape.drafter_layers if drafter else shape.layers
    attending = layers if drafter else shape.attention.layers
    tp, hidden = layout.tensor_parallel, shape.hidden
    found = [Part("attention", attending * _attention(shape.attention, hidden, tp))]
    if shape.indexer is not None:
        found.append(Part("indexer", attending * _indexer(shape.indexer, hidden)))
    if shape.hyper is None:
        found.append(Part("norms", (2 * layers + 1) * hidden * BF16))
    else:
        mixers = 2 * layers * _hyper(shape.hyper, hidden, inject=True) + _hyper(shape.hyper, hidden, inject=False)
        found.append(Part("hyper_connections", mixers))
    if shape.mlp is not None:
        found.append(Part("mlp", layers * 3 * hidden * (shape.mlp // tp) * BF16))
    if shape.experts is not None:
        experts = shape.experts
        shared = 3 * hidden * (experts.shared_inner // layout.shared_expert_ways) + hidden  # and its gate
        values, scales = _routed(experts, hidden, layout, quantisation, "mtp." if drafter else "")
        found.append(Part("router", layers * experts.count * hidden * BF16))
        found.append(Part("shared_expert", layers * shared * BF16))
        found += [Part("routed_experts", layers * values), Part("routed_scales", layers * scales)]
    return found


def _attention(attention: Attention, hidden: int, tp: int) -> int:
    """q (with its gate), k, v and o of one layer, and the norms by head."""
    heads, kv_heads = attention.heads // tp, kv_heads_on_rank(attention, tp)
    outputs = heads * (2 if attention.gated else 1) + 2 * kv_heads
    norms = 2 * attention.head_dim if attention.gated else 0
    return ((outputs + heads) * attention.head_dim * hidden + norms) * BF16


def kv_heads_on_rank(attention: Attention, tp: int) -> int:
    """KV heads that a rank holds: split, and replicated once there are more ranks than heads.

    Source: FlatKV semantics, section K; vllm qsa.py and qwen3_next.py, `max(1, kv_heads // tp)`.
    """
    return max(1, attention.kv_heads // tp)


def kv_copies(attention: Attention, tp: int) -> int:
    """How many ranks hold the same KV page."""
    return max(1, tp // attention.kv_heads)


def _indexer(indexer: Indexer, hidden: int) -> int:
    """Query and key projection in one and two norms; every rank holds all of it."""
    heads = indexer.heads + indexer.kv_heads
    return (heads * indexer.head_dim * hidden + 2 * indexer.head_dim) * BF16


def _linear(linear: Linear, hidden: int, tp: int) -> int:
    """qkvz, b and a, convolution, decay, norm and output projection of one layer."""
    values = linear.value_heads * linear.value_dim
    rows_in = linear.channels + values + 2 * linear.value_heads
    sharded = rows_in * hidden + linear.channels * linear.kernel + values * hidden + linear.value_heads  # dt_bias
    # A_log is fp32 in the engine, whatever the checkpoint stores.
    return sharded // tp * BF16 + linear.value_heads // tp * FP32 + linear.value_dim * BF16


def _hyper(hyper: Hyper, hidden: int, *, inject: bool) -> int:
    """Norm, down and up matrix; `inject` rows are merged with down and padded. Every rank holds all of it."""
    down = hyper.rank
    if inject:
        down = ceil_div(hyper.rank + hyper.count, _HYPER_PADDING) * _HYPER_PADDING
    return (1 + down + hyper.rank) * hyper.count * hidden * BF16


def _ple(shape: Shape) -> int:
    """The dense part of one n-gram layer: key and value projection, three norms, convolution, hash constants."""
    ngram, hyper = shape.ngram, shape.hyper
    if ngram is None or hyper is None:
        return 0
    streams = hyper.count * shape.hidden
    values = (streams + shape.hidden) * ngram.embed + (3 + ngram.kernel) * streams
    return values * BF16 + (ngram.size + 2 * ngram.heads) * _INT64


def _drafter_inputs(shape: Shape, tp: int) -> int:
    """What joins embedding and hidden state in front of the drafter's layer."""
    projections = 2 * shape.hidden * shape.hidden // tp  # one of [H, 2H], or two of [H, H]
    norms = shape.hidden + (shape.hyper.count if shape.hyper else 1) * shape.hidden
    return (projections + norms) * BF16


def _routed(
    experts: Experts, hidden: int, layout: Layout, quantisation: Quantisation | None, prefix: str
) -> tuple[int, int]:
    """Bytes of values and of scales of one layer's routed experts."""
    local, ways = experts.count, layout.ranks
    if layout.expert_parallel:
        local, ways = experts.count // layout.ranks, 1
    matrices = {
        f"{prefix}mlp.experts.gate_up_proj": (2 * experts.inner, hidden),
        f"{prefix}mlp.experts.down_proj": (hidden, experts.inner),
    }
    known = {f"{owner}{name.removeprefix(prefix)}" for name in matrices for owner in ("", "mtp.")}
    tensors = {tensor.name: tensor for tensor in quantisation.tensors} if quantisation else {}
    values = scales = 0
    for name in tensors.keys() - known:
        raise RegistryError(
            Finding(
                f"quantised tensor {name} is not known",
                "its bytes would be counted as bf16: only routed experts are expected to be quantised",
                f"use one of {', '.join(sorted(known))}",
            )
        )
    for name, expected in matrices.items():
        tensor = tensors.get(name)
        if tensor is None or quantisation is None:
            values += local * expected[0] * expected[1] // ways * BF16
            continue
        if tensor.shape != expected:
            raise RegistryError(
                Finding(
                    f"quantised tensor {name} has the shape {list(tensor.shape)}, the geometry gives {list(expected)}",
                    "gate and up are [2 x moe_intermediate_size, hidden_size], down is the other way round",
                    "correct the tensor or the geometry",
                )
            )
        own, scale = _quantised(tensor, quantisation, ways, layout)
        values, scales = values + local * own, scales + local * scale
    return values, scales


def _quantised(tensor: QuantisedTensor, quantisation: Quantisation, ways: int, layout: Layout) -> tuple[int, int]:
    """Bytes of values and scales of one expert's matrix, or of a rank's slice of it.

    Source: semantics E.1, E.2; vllm layers/quantization/fp8.py, modelopt.py, utils/marlin_utils_fp8.py.
    """
    outs, ins = tensor.shape
    size = outs // tensor.fused if tensor.sharded == "out" else ins
    axis = 0 if tensor.sharded == "out" else 1
    if tensor.sharded == "none":
        ways = 1
    if ways > 1 and (size % ways or size // ways % quantisation.block[axis]):
        raise Refused(
            Finding(
                f"{tensor.name}: a shard of {size}/{ways} is no multiple of the scale block {quantisation.block[axis]}",
                "a scale would belong to two ranks",
                "set enable_expert_parallel, or use fewer ranks",
            )
        )
    outs, ins = (outs // ways, ins) if axis == 0 else (outs, ins // ways)
    block_out, block_in = quantisation.block
    # The parts of a fused matrix have a scale grid each.
    grid = tensor.fused * ceil_div(outs // tensor.fused, block_out) * ceil_div(ins, block_in)
    if quantisation.method == "nvfp4":
        # Two values a byte, one e4m3 scale a block; by matrix a weight scale and an activation scale in fp32.
        return outs * ins // 2, grid + tensor.fused * 2 * FP32
    if layout.moe_backend == "marlin":
        # Marlin takes scales by output row, in the activation type: the block's scale repeated.
        return outs * ins, outs * ceil_div(ins, block_in) * BF16
    return outs * ins, grid * FP32
