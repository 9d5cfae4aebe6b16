"""A profile's words as the geometry wants them."""

from __future__ import annotations

from typing import TypeVar

from slimserve.geometry import Layout
from slimserve.profile import Setting
from slimserve.subject import Subject

T = TypeVar("T")

# Tokens of a block when nothing is stated, and the smallest that the attention kernels read.
_BLOCKS = {"cuda": (16, 16), "cpu": (128, 32)}


def stated(setting: Setting[T] | None, otherwise: T) -> T:
    """The value of a setting that may be left out, or what the engine then takes."""
    return otherwise if setting is None else setting.value


def layout_of(subject: Subject) -> Layout:
    """How `subject` lays its model over ranks."""
    engine = subject.profile.engine
    speculation = engine.speculative_config.value if engine.speculative_config else None
    block, kernel = _BLOCKS[subject.platform.kind]
    own = speculation.model if speculation else None
    given = {} if engine.all2all_backend is None else {"all2all_backend": engine.all2all_backend.value}
    return Layout(
        tensor_parallel=engine.tensor_parallel_size.value,
        data_parallel=stated(engine.data_parallel_size, 1),
        expert_parallel=stated(engine.enable_expert_parallel, False),
        moe_backend=engine.moe_backend.value if engine.moe_backend else None,
        engram_on_host=engine.engram_config.value.cpu_offload if engine.engram_config else True,
        kv_cache_dtype=engine.kv_cache_dtype.value,
        mamba_ssm_cache_dtype=engine.mamba_ssm_cache_dtype.value if engine.mamba_ssm_cache_dtype else None,
        speculative_tokens=speculation.num_speculative_tokens if speculation else 0,
        drafter=speculation is not None and speculation.method == "mtp",
        draft_model=subject.model.drafters[own] if own else None,
        draft_kv_dtype=(speculation and speculation.kv_cache_dtype) or engine.kv_cache_dtype.value,
        prefix_caching=engine.enable_prefix_caching.value,
        block_size=stated(engine.block_size, block),
        kernel_block=kernel,
        **given,
    )
