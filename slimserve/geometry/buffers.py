"""What the engine allocates beside the weights while it loads a model, by the longest step: seen as weights in its log.

Left out are tables of tens of MB whose size the geometry does not tell (rotary positions).
"""

from __future__ import annotations

from slimserve.geometry.layout import BF16, FP32, Layout
from slimserve.geometry.ngram import row_bytes
from slimserve.geometry.reading import check_layout, shape_of
from slimserve.geometry.weights import Part
from slimserve.model import Checkpoint, Model

_INT64 = 8


def buffers(model: Model, checkpoint: Checkpoint, layout: Layout, max_num_batched_tokens: int) -> tuple[Part, ...]:
    """Buffers of one rank that stay for good, none of them split.

    Args:
        model: whose geometry counts.
        checkpoint: one of its checkpoints.
        layout: how it is run.
        max_num_batched_tokens: tokens of the longest step.

    Raises:
        RegistryError: the geometry or the checkpoint is incomplete.
        Refused: the layout does not divide the model.

    Source: vllm/models/qwen4_exp, nvidia/qsa.py topk_indices_buffer (each attention layer has its own),
        nvidia/model.py _mtp_hidden_buffer, nvidia/ngram_embedding.py _prefetch_ids, common/ngram_embedding.py
        _prefetch_buffer.
    """
    shape, tokens = shape_of(model), max_num_batched_tokens
    check_layout(shape, layout)
    found = []
    if shape.indexer is not None:
        attending = shape.attention.layers + (shape.drafter_layers if layout.drafter else 0)
        width = shape.indexer.budget + shape.indexer.ratio  # the open group but one, and a count
        found.append(Part("selection", attending * tokens * width * FP32))
    if shape.hyper is not None and layout.drafter:
        found.append(Part("drafter_hidden", tokens * shape.hyper.count * shape.hidden * BF16))
    if shape.ngram is not None and shape.ngram.layer_ids and layout.engram_on_host:
        token = shape.ngram.heads * (_INT64 + row_bytes(shape.ngram, checkpoint.host_bytes))
        found.append(Part("ngram_prefetch", len(shape.ngram.layer_ids) * tokens * token))
    return tuple(found)
