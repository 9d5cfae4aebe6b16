"""The cache of a target with a draft model of its own, grouped by the pinned engine itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimserve.engine import torchvision_cpu
from slimserve.geometry import Layout, caches, dspark
from slimserve.registry_files import load_registry

MODEL = load_registry(Path(__file__).parents[2] / "profiles").models["qwen38-2.4t-a95b"]


def engine_groups(block: int, state_bytes: int, page: int) -> list[tuple[str, int]]:
    torchvision_cpu.install()
    import torch
    from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MambaSpec

    state = MambaSpec(
        block_size=block,
        shapes=((state_bytes,),),
        dtypes=(torch.uint8,),
        page_size_padded=page,
        mamba_cache_mode="align",
    )
    target = FullAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=256, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR
    )
    own = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
    layers: dict[str, Any] = {f"{n}": target if (n + 1) % 4 == 0 else state for n in range(92)}
    layers |= {f"draft.{n}": own for n in range(5)}
    assert {spec.page_size_bytes for spec in layers.values()} == {page}
    return [
        ("state" if isinstance(group.kv_cache_spec, MambaSpec) else "attention", len(group.layer_names))
        for group in _get_kv_cache_groups_uniform_page_size(layers)
    ]


def test_groups_are_the_engines() -> None:
    drafter = MODEL.drafters["dspark"]
    laid = caches(MODEL, Layout(tensor_parallel=8, kv_cache_dtype="fp8", speculative_tokens=7, draft_model=drafter))
    page = laid.groups[0].page_bytes
    assert page == laid.block_tokens * dspark.kv_bytes_a_token(drafter, laid.layout)
    theirs = engine_groups(laid.block_tokens, laid.groups[0].used_bytes, page)
    assert sorted(theirs) == sorted((group.kind, group.layers) for group in laid.groups)
    assert laid.slab_bytes == page * max(layers for _, layers in theirs)
