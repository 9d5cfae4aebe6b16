"""How a model is laid over ranks, and the cache settings that change sizes: named as the engine's flags are."""

from __future__ import annotations

from typing import Literal

from slimserve.model import Drafter
from slimserve.records import dataclass

KvDtype = Literal["bfloat16", "fp8", "fp8_e4m3", "turboquant_k8v4"]

BF16, FP32 = 2, 4
"""bytes of a value"""
SIZE_OF = {"bfloat16": BF16, "float32": FP32}

# vllm/config/parallel.py, use_sequence_parallel_moe: with any other all-to-all the shared expert stays sharded.
_SEQUENCE_PARALLEL = {
    "allgather_reducescatter",
    "deepep_high_throughput",
    "deepep_low_latency",
    "deepep_v2",
    "flashinfer_nvlink_one_sided",
    "passthrough",
    "mori_high_throughput",
    "mori_low_latency",
    "nixl_ep",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run a model.

    Args:
        tensor_parallel: ranks that split heads and matrices.
        data_parallel: replicas of attention; experts span them.
        expert_parallel: experts stay whole, spread over tensor x data ranks.
        all2all_backend: decides with the above whether the shared expert is replicated.
        moe_backend: "marlin" keeps FP8 scales in another shape than the checkpoint's.
        engram_on_host: the n-gram table lies in host memory.
        kv_cache_dtype: of the main cache and of the drafter's.
        mamba_ssm_cache_dtype: of the recurrent state; None takes the checkpoint's word, as the engine does.
        speculative_tokens: k, drafted tokens a step.
        drafter: the model's own MTP layers draft them (else an n-gram search does, without weights or cache).
        draft_model: a model of its own drafts them instead (DSpark).
        draft_kv_dtype: of its cache.
        prefix_caching: states are kept at block boundaries (mamba_cache_mode align), else one live state a request.
        block_size: tokens of a block before the hybrid rule: what the profile states, else 16 on CUDA (but never below
            kernel_block) and 128 on the CPU.
        kernel_block: the smallest block of the attention kernels in tokens: 32 on the CPU; 16 on CUDA, except where
            FlashAttention 4 serves heads of 256 (vllm v1/attention/backends/flash_attn.py, FA4_HD256_PAGE_SIZE).
    """

    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    all2all_backend: str = "allgather_reducescatter"
    moe_backend: str | None = None
    engram_on_host: bool = True
    kv_cache_dtype: KvDtype = "bfloat16"
    mamba_ssm_cache_dtype: Literal["float32", "bfloat16"] | None = None
    speculative_tokens: int = 0
    drafter: bool = False
    draft_model: Drafter | None = None
    draft_kv_dtype: KvDtype = "bfloat16"
    prefix_caching: bool = True
    block_size: int = 16
    kernel_block: int = 16

    @property
    def ranks(self) -> int:
        """All ranks together."""
        return self.tensor_parallel * self.data_parallel

    @property
    def shared_expert_ways(self) -> int:
        """Into how many pieces a shared expert is cut.

        Source: vllm/model_executor/models/qwen2_moe.py, Qwen2MoeMLP: replicated when MoE is sequence-parallel.
        """
        sequence_parallel = (
            self.expert_parallel
            and self.tensor_parallel > 1
            and self.data_parallel > 1
            and self.all2all_backend in _SEQUENCE_PARALLEL
        )
        return 1 if sequence_parallel else self.tensor_parallel

    @property
    def drafts(self) -> bool:
        """Whether layers draft, be it the model's own or another model's: both keep a cache of their own."""
        return self.drafter or self.draft_model is not None

    @property
    def lookahead_tokens(self) -> int:
        """Tokens past the sequence for which the drafter needs room (vllm/config/vllm.py, num_lookahead_tokens)."""
        return self.speculative_tokens if self.drafts else 0


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b that is not below a."""
    return ceil_div(a, b) * b
