"""The pinned engine's own word on sizes: builds its model classes without storage, and its caches from them.

    geometry_driver.py CASES ANSWERS     two JSON files: a list of cases, read; a list of answers, written

A rank of many is built alone: the
groups that the layers ask for their size are told that they are larger. Nothing communicates while a model is built.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any


class Ranks:
    """Stands for a process group of which only the size is asked."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def main() -> None:
    from slimserve.engine import torchvision_cpu

    torchvision_cpu.install()
    import torch
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()  # a class is looked at here, not by one process for each
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe import expert_map_manager

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        meeting = f"file://{folder}/meeting"
        parallel_state.init_distributed_environment(1, 0, meeting, 0, backend="gloo")
        parallel_state.initialize_model_parallel(1, 1)
    torch.set_default_dtype(torch.bfloat16)
    # For a log line the engine asks which experts are local: of a tensor that has no storage here.
    expert_map_manager.ExpertMapManager.get_compressed_map_string = lambda self: ""  # type: ignore[method-assign]
    cases, answers = map(Path, sys.argv[1:])
    answers.write_text(json.dumps([answer(case, parallel_state) for case in json.loads(cases.read_text())]))


def answer(case: dict[str, Any], parallel_state: Any) -> dict[str, Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case["config"]))
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=case["max_model_len"],
            enable_prefix_caching=case["prefix_caching"],
            speculative_config={"method": "mtp", "num_speculative_tokens": case["k"]} if case["k"] else None,
        ).create_engine_config()
        pretend(config, case, parallel_state)
        with set_current_vllm_config(config), torch.device("meta"):
            target = build(config)
            drafter = build_drafter(config) if case["k"] else None
        weights = sizes(target)
        if drafter is not None:  # its embedding and head are the target's once both are loaded
            own = {name: size for name, size in sizes(drafter).items() if "embed_tokens" not in name}
            weights |= {f"drafter.{name}": size for name, size in own.items() if "lm_head" not in name}
        return {"weights": weights, **caches(config, case)}


def pretend(config: Any, case: dict[str, Any], parallel_state: Any) -> None:
    """One rank of many, with the caches that a GPU's attention kernels ask for."""
    tensor, data = case["tensor_parallel"], case["data_parallel"]
    parallel_state._TP.world_size = tensor
    parallel_state._ETP.world_size = tensor
    config.parallel_config.tensor_parallel_size = tensor
    config.parallel_config.data_parallel_size = data
    config.parallel_config.enable_expert_parallel = case["expert_parallel"]
    parallel_state._DP.world_size = data
    parallel_state._EP.world_size = tensor * data
    parallel_state._EP.device_group = Ranks(tensor * data)
    config.cache_config.block_size = case["block_size"]
    config.cache_config.user_specified_block_size = True
    config.cache_config.kv_cache_layout = case["kv_layout"]
    if config.engram_config is not None:
        config.engram_config.cpu_offload = False  # there is no pinned memory to put it into


def build(config: Any) -> Any:
    """The target's class, without storage."""
    from vllm.model_executor.model_loader.utils import configure_quant_config
    from vllm.model_executor.models import ModelRegistry

    if config.model_config.architecture.startswith("Qwen4Exp"):
        importlib.import_module("vllm.models.qwen4_exp.nvidia.model")  # before its parts, which import it in turn
        qsa: Any = importlib.import_module("vllm.models.qwen4_exp.nvidia.qsa")
        qsa.is_flash_attn_varlen_func_available = lambda: True  # it is on a GPU; nothing is computed here
    kind, _ = ModelRegistry.resolve_model_cls(config.model_config.architecture, config.model_config)
    if config.quant_config is not None:
        configure_quant_config(config.quant_config, kind)  # the loader tells it which matrices the class merges
    return kind(vllm_config=config, prefix="")


def build_drafter(config: Any) -> Any:
    """The class of the target's own MTP layers, without storage."""
    from vllm.model_executor.models import ModelRegistry

    draft = config.speculative_config.draft_model_config
    kind, _ = ModelRegistry.resolve_model_cls(draft.architecture, draft)
    return kind(vllm_config=config, prefix="")


def sizes(module: Any) -> dict[str, int]:
    """Bytes of all parameters, by their name with layer numbers taken out."""
    found: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        key = re.sub(r"\blayers\.\d+\.", "layers.", name)
        found[key] = found.get(key, 0) + parameter.numel() * parameter.element_size()
    return found


def caches(config: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Block size, groups and pool, from the specs of the layers that were built."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.platforms.interface import Platform
    from vllm.v1.core import kv_cache_utils

    layers = {
        name: layer
        for name, layer in config.compilation_config.static_forward_context.items()
        if isinstance(layer, AttentionLayerBase)
    }
    with set_current_vllm_config(config):
        if config.model_config.is_hybrid:
            # The platform's own rule, not the CPU's override of how it starts.
            Platform._align_hybrid_block_size(config, Platform._find_non_ssm_backends(config)[0])
        specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    (result,) = kv_cache_utils.get_kv_cache_configs(config, [specs], [case["cache_bytes"]])
    groups = [
        {
            "layers": list(group.layer_names),
            "block_tokens": group.kv_cache_spec.block_size,
            "pages": sorted({kv_cache_utils._get_per_layer_spec(group, n).page_size_bytes for n in group.layer_names}),
            "spec": type(next(iter(kv_cache_utils.iter_layer_specs(group.kv_cache_spec)))).__name__,
        }
        for group in result.kv_cache_groups
    ]
    return {
        "block_tokens": config.cache_config.block_size,
        "groups": groups,
        "slab_bytes": kv_cache_utils._pool_bytes_per_block(config, result.kv_cache_groups),
        "blocks": result.num_blocks,
        "concurrency": kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, result),
    }


if __name__ == "__main__":
    main()
