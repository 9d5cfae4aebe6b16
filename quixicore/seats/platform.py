"""What the engine asks of a platform before it lets this model in, where ours take the place of what is asked for.

Source: vllm 0.32, config/vllm.py, triton_utils/importing.py and models/qwen4_exp/nvidia/qsa.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


def next_power_of_2(value: int) -> int:
    """Triton's host function, which the engine's stand-in for Triton lacks."""
    return 1 << (value - 1).bit_length()


def second_runner(real: Callable[[Any], None], self: Any) -> None:
    """`VllmConfig._validate_v2_model_runner`: Triton is wanted for kernels in whose seats ours sit."""
    with _bound("vllm.config.vllm", "HAS_TRITON", True):
        real(self)


def attention_kernel(real: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
    """`Qwen4ExpQSAFlashAttentionImpl.__init__`: it asks for FlashAttention, and never runs it."""
    with _bound("vllm.models.qwen4_exp.nvidia.qsa", "is_flash_attn_varlen_func_available", lambda: True):
        real(self, *args, **named)


def attention(real: Callable[..., None], self: Any, **named: Any) -> None:
    """`Qwen4ExpQSAAttention.__init__`: one operation readies queries, keys and caches, as on a card.

    Raises:
        ValueError: a geometry that this path does not carry.
    """
    real(self, **named)
    indexer, rotary = self.indexer, self.rotary_emb.rotary_dim
    if not indexer.use_fused_pre_indexer:
        has = f"head_dim {indexer.index_head_dim}, rotary_dim {rotary}, {indexer.index_kv_heads} key heads and ratio"
        carried = "this path carries 128, 64, 1 and a power of 2 above 1"
        raise ValueError(f"the indexer has {has} {indexer.compress_ratio}; {carried}")
    self.use_fused_qk_norm_rope_gate = self.use_fused_qsa_prepare = True


@contextlib.contextmanager
def _bound(module: str, name: str, value: Any) -> Iterator[None]:
    """Bind a module's name to something else for a while."""
    holder = sys.modules[module]
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)
