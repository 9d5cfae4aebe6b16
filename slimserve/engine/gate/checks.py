"""The settings that the gate compares: what the plan says of each, and what a difference does.

Pure; the engine is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from quixicore import dispatch
from slimserve.geometry.caches import ring_rows
from slimserve.plan import Plan
from slimserve.planner.capacity import BLOCKS_SHARE
from slimserve.profile import Engine
from slimserve.records import dataclass
from slimserve.shapes import plain

DOOR = "slimserve.admission.middleware.Admission"
DO = "see the engine's log for what made it change; state in the profile what it resolves to, or remove the cause"

Role = Literal["api", "core", "rank"]
ALL: tuple[Role, ...] = ("api", "core", "rank")
CORE: tuple[Role, ...] = ("core",)
CACHE: tuple[Role, ...] = ("core", "rank")
RANK: tuple[Role, ...] = ("rank",)
API: tuple[Role, ...] = ("api",)

# vllm 0.32, config/vllm.py DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES: those of our models that are in it.
BREAKABLE = frozenset({"Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"})
# The attention of the same models, by the engine's names.
_SPARSE = {"PLE_SHORT_CONV_ATTN", "QWEN4_EXP_EXP_QSA_STATE", "QWEN4_EXP_QSA_TRITON"}
# The lock of the lane (requirements/*.lock). The CUDA lane has none: of its libraries the engine's own metadata says
# which versions it asks for, and `libraries` compares that.
LIBRARIES = ("vllm", "torch", "transformers", "triton")
VERSIONS: dict[str, dict[str, str]] = {
    "cpu": {"vllm": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0", "triton": "none"},
    "cuda": {"vllm": "0.32.0"},
}
# vllm 0.32, model_executor/layers/fused_moe/oracle/fp8.py map_fp8_backend: what is not the same word in capitals.
_EXPERTS = {"deep_gemm": "DEEPGEMM", "cutlass": "VLLM_CUTLASS"}
# Torch has no type for it: the engine keeps one byte a value in each of its FP8 caches.
_STORED = {"bfloat16": "bfloat16", "fp8": "uint8", "fp8_e4m3": "uint8"}


@dataclass(frozen=True)
class Check:
    """One setting that is compared.

    Args:
        name: the profile's key where it has one.
        roles: the kinds of process that must show it.
        planned: what the plan says; None: it leaves the setting to the engine, which is recorded and not compared.
            Beside plain JSON: `{"about": n, "share": s}` for a number that may differ by a share, `{"named": x}` for
            one of several names of the same thing.
        why: what a difference does.
        measured: it follows from the memory of the moment: no part of the configuration's hash.
        do: what to do about a difference.
    """

    name: str
    roles: tuple[Role, ...]
    planned: Callable[[Plan], Any]
    why: str
    measured: bool = False
    do: str = DO


def _engine(plan: Plan) -> Engine:
    return plan.subject.profile.engine


def _stated(name: str, default: Any = None) -> Callable[[Plan], Any]:
    """A setting of the profile's `engine`, or `default` when it does not state it."""

    def read(plan: Plan) -> Any:
        setting = getattr(_engine(plan), name)
        return default if setting is None else plain(setting.value, nulls=False)

    return read


def _lane(plan: Plan) -> str:
    return "cpu" if plan.subject.platform.gpus is None else "cuda"


def _eager(plan: Plan) -> bool:
    return _engine(plan).enforce_eager.value


def _breakable(plan: Plan) -> bool:
    return _sparse(plan)


def _sparse(plan: Plan) -> bool:
    return plan.subject.model.architecture in BREAKABLE


def _compilation(plan: Plan) -> str:
    if _eager(plan) or _breakable(plan):
        return "NONE"
    return "DYNAMO_TRACE_ONCE" if _lane(plan) == "cpu" else "VLLM_COMPILE"


def _graph_mode(plan: Plan) -> str | None:
    if _eager(plan):
        return "NONE"
    setting = _engine(plan).compilation_config
    return None if setting is None else setting.value.cudagraph_mode


def _capture_sizes(plan: Plan) -> list[int] | None:
    if _eager(plan) or _lane(plan) == "cpu":
        return []
    setting = _engine(plan).compilation_config
    return None if setting is None else sorted(setting.value.cudagraph_capture_sizes)


def _speculation(plan: Plan) -> str:
    setting = _engine(plan).speculative_config
    return "none" if setting is None else setting.value.method


def _with_drafter(value: Callable[[Plan], Any]) -> Callable[[Plan], Any]:
    return lambda plan: value(plan) if plan.room.rank.layout.drafts else None


def _stored(plan: Plan) -> list[str]:
    """The types of all keys and values, a drafter's among them."""
    layout = plan.room.rank.layout
    kinds = {_engine(plan).kv_cache_dtype.value, *((layout.draft_kv_dtype,) if layout.drafts else ())}
    return sorted({_STORED[kind] for kind in kinds})


def _seats(plan: Plan) -> dict[str, str]:
    return dispatch.who_sits({group: setting.value for group, setting in plan.subject.profile.seats.items()})


def _scheduler(plan: Plan) -> str:
    return "AsyncScheduler" if _async(plan) else "Scheduler"


def _async(plan: Plan) -> bool:
    setting = _engine(plan).async_scheduling
    return _lane(plan) == "cuda" if setting is None else setting.value


def _coordinator(plan: Plan) -> str:
    if not _engine(plan).enable_prefix_caching.value:
        return "KVCacheCoordinatorNoPrefixCache"
    return "UnitaryKVCacheCoordinator" if len(plan.room.rank.caches.groups) == 1 else "HybridKVCacheCoordinator"


def _groups(plan: Plan) -> list[list[Any]]:
    """Kind and block size of each cache group, in the engine's order.

    To the engine a window is a state like the others, and a ring a block of its rows.
    """
    rank = plan.room.rank
    rows = ring_rows(rank.shape.indexer, rank.layout) if rank.shape.indexer else 0
    return [
        ["state" if group.kind == "window" else group.kind, rows if group.kind == "ring" else group.block_tokens]
        for group in rank.caches.groups
    ]


def _state_dtype(plan: Plan) -> str | None:
    rank = plan.room.rank
    if rank.shape.linear is None:
        return None
    return rank.layout.mamba_ssm_cache_dtype or rank.shape.linear.state_dtype


def _about(number: Callable[[Plan], int]) -> Callable[[Plan], Any]:
    """Exact on a CPU, where the profile states the cache in bytes; else about that many."""

    def read(plan: Plan) -> Any:
        exact = _lane(plan) == "cpu" and _engine(plan).kv_cache_memory_bytes is not None
        return number(plan) if exact else {"about": number(plan), "share": BLOCKS_SHARE}

    return read


def _sampling(plan: Plan) -> dict[str, Any]:
    """What the model's authors ship, and over it what the profile states."""
    override = _engine(plan).override_generation_config
    own = plain(plan.subject.model.sampling, nulls=False)
    return {**own, **(plain(override.value, nulls=False) if override else {})}


def _template_defaults(plan: Plan) -> dict[str, Any]:
    """What the profile states, beside the one argument that the engine gives to every template."""
    return {"cohere_format": "cmd4", **_stated("default_chat_template_kwargs", {})(plan)}


def _experts(plan: Plan) -> list[str] | None:
    """The kernels of quantised experts, as the engine's `select_..._moe_backend` name what they have taken."""
    asked, subject = _engine(plan).moe_backend, plan.subject
    if asked is None or subject.model.checkpoints[subject.profile.quant].quantisation is None:
        return None
    return [_EXPERTS.get(asked.value, asked.value.upper())]


def _attention(plan: Plan) -> list[str] | None:
    """The attention backends of a CPU, where there is no choice; on cards they are recorded."""
    if _lane(plan) != "cpu":
        return None
    full = _SPARSE if _sparse(plan) else {"CPU_ATTN"}
    return sorted({*full, *(("GDN_ATTN",) if plan.room.rank.shape.linear else ())})


def _layout(plan: Plan) -> str | None:
    """How the cache lies in memory on a CPU (`KVCacheLayout`); no connector asks for another. On cards recorded."""
    if _lane(plan) != "cpu":
        return None
    return "BLNHC" if _sparse(plan) else "LBHNC"


def _index_share(plan: Plan) -> bool | None:
    """Whether later drafts reuse the first one's selection; the checkpoints themselves do not ask for it."""
    drafts = setting.value if (setting := _engine(plan).speculative_config) else None
    return bool(drafts.index_share_for_mtp_iteration) if drafts is not None and drafts.method == "mtp" else None


def _depth_by_load(plan: Plan) -> Any:
    setting = _engine(plan).speculative_config
    return "none" if setting is None else plain(setting.value.num_speculative_tokens_per_batch_size) or "none"


def _parser(name: str) -> Callable[[Plan], Any]:
    stated = _stated(name)
    return lambda plan: "none" if stated(plan) is None else {"named": stated(plan)}


def _version(library: str) -> Callable[[Plan], Any]:
    return lambda plan: VERSIONS[_lane(plan)].get(library)


_VERSION_WHY = "everything else was read from, and tested with, exactly these libraries"

CHECKS: tuple[Check, ...] = (
    *(Check(f"version_{library}", ALL, _version(library), _VERSION_WHY) for library in LIBRARIES),
    Check("libraries", RANK, lambda plan: [], "the engine was built for, and asks for, other versions than these"),
    Check("dtype", ALL, _stated("dtype"), "activations of another type give other answers"),
    Check("max_model_len", ALL, _stated("max_model_len"), "the engine shrinks it to what fits, and long prompts fail"),
    Check("max_num_seqs", ALL, _stated("max_num_seqs"), "it is the number of decode slots that clients were promised"),
    Check(
        "max_num_batched_tokens",
        ALL,
        _stated("max_num_batched_tokens"),
        "activations and the time to a first token were planned for it",
    ),
    Check("tensor_parallel_size", ALL, _stated("tensor_parallel_size"), "it decides which shards exist"),
    # To the cores of a dense model each replica is an engine of its own.
    Check("data_parallel_size", API, _stated("data_parallel_size", 1), "replicas share the cap of the door"),
    Check(
        "enable_expert_parallel",
        ALL,
        _stated("enable_expert_parallel", False),
        "experts that are cut no longer tile their scales",
    ),
    Check("all2all_backend", ALL, _stated("all2all_backend"), "it decides which experts are replicated"),
    Check("moe_backend", ALL, _stated("moe_backend"), "other expert kernels crash on some cards and round otherwise"),
    Check("expert_kernels", RANK, _experts, "what was asked for may not be what the engine takes"),
    Check("attention_backends", RANK, _attention, "another kernel of attention rounds otherwise"),
    Check(
        "enable_flashinfer_autotune",
        ALL,
        _stated("enable_flashinfer_autotune"),
        "a start that tunes takes minutes, and two of them may take other kernels",
    ),
    Check(
        "gdn_prefill_backend",
        RANK,
        _stated("gdn_prefill_backend"),
        "a missing library changes the kernel of every prefill, and its rounding",
    ),
    Check(
        "disable_custom_all_reduce",
        ALL,
        _stated("disable_custom_all_reduce"),
        "cards without peer access hang or corrupt in it",
    ),
    Check(
        "gpu_memory_utilization",
        ALL,
        _stated("gpu_memory_utilization"),
        "the engine's default is a share of its own, which nothing was planned for",
    ),
    Check(
        "kv_cache_memory_bytes",
        ALL,
        _stated("kv_cache_memory_bytes", "none"),
        "a cache that is stated in bytes is not held to the card's share",
    ),
    Check("load_format", ALL, _stated("load_format", "auto"), "weights that are not read are noise"),
    Check(
        "language_model_only",
        ALL,
        _stated("language_model_only", False),
        "a vision tower takes memory that the plan gave to the cache",
    ),
    Check(
        "engram_cpu_offload",
        ALL,
        lambda plan: setting.value.cpu_offload if (setting := _engine(plan).engram_config) else None,
        "the n-gram table is then on the card, where nothing was planned for it",
    ),
    Check("trust_remote_code", ALL, lambda plan: False, "a checkpoint must not bring code"),
    Check(
        "enable_prefix_caching",
        ALL,
        _stated("enable_prefix_caching"),
        "without it every turn of a conversation pays for its whole history again",
    ),
    Check(
        "mamba_cache_mode",
        ALL,
        _stated("mamba_cache_mode"),
        "only `align` keeps states at block boundaries: with another mode prefixes are never found",
    ),
    Check(
        "prefix_cache_retention_interval",
        ALL,
        lambda plan: 0,
        "the plan counts one state for each conversation that waits; denser checkpoints push others out",
    ),
    Check(
        "kv_cache_dtype",
        ALL,
        _stated("kv_cache_dtype"),
        "a quantised cache was seen to change answers without garbling them",
    ),
    Check(
        "draft_kv_cache_dtype",
        ALL,
        _with_drafter(lambda plan: plan.room.rank.layout.draft_kv_dtype),
        "a drafter that reads another cache than was planned drafts worse, and its pages have another size",
    ),
    Check(
        "kv_stored",
        CACHE,
        _stored,
        "it is what keys and values are really stored as, the drafter's among them",
    ),
    Check(
        "mamba_ssm_cache_dtype",
        CACHE,
        _state_dtype,
        "recurrent states of fewer bits drift over a long context",
    ),
    Check(
        "kv_cache_layout",
        CACHE,
        _layout,
        "the engine drops a layout that a connector asks for with a warning, and pages are then copied in pieces",
    ),
    Check(
        "cache_groups",
        CACHE,
        _groups,
        "block sizes, the states' own among them, decide which prefixes are found and what a request holds",
    ),
    Check(
        "cache_blocks",
        CACHE,
        _about(lambda plan: plan.room.capacity.pool_blocks),
        "the plan's decode slots are counted in these blocks: with fewer, requests wait though slots are free",
        measured=True,
    ),
    Check(
        "block_bytes",
        RANK,
        _about(lambda plan: plan.room.capacity.slab_bytes),
        "pages that were padded otherwise than planned make every block dearer",
        measured=True,
    ),
    Check(
        "not_finite_weights",
        RANK,
        lambda plan: [],
        "one value that is NaN or infinite makes noise of every answer that it reaches",
        do="when --fetch finds the files right, the checkpoint was made so: use another; or the device's memory fails",
    ),
    # Recorded: without those that hold integers.
    Check("weight_tensors", RANK, lambda plan: None, "those that were looked at for values that are not finite"),
    # Recorded: some kernels keep their weights in a form of their own, padded or repacked.
    Check("weight_bytes", RANK, lambda plan: None, "what weights take, the cache does not get", measured=True),
    # Recorded: what a platform's reserve is to be made of.
    Check("memory", RANK, lambda plan: None, "what the engine takes of a card, the cache does not get", measured=True),
    Check(
        "hybrid_cache_manager",
        ALL,
        lambda plan: True,
        "without it every layer pays for the whole context, and states are not cached",
    ),
    Check("cache_coordinator", CORE, _coordinator, "it is what finds prefixes across the cache groups"),
    Check("enable_chunked_prefill", ALL, _stated("enable_chunked_prefill"), "a long prompt then blocks every answer"),
    Check("async_scheduling", ALL, _async, "the host's part of each step is no longer hidden behind the device's"),
    Check("scheduler", CORE, _scheduler, "another scheduler gives requests other turns"),
    Check("scheduling_policy", ALL, lambda plan: "fcfs", "priorities let some requests starve others"),
    Check("enforce_eager", ALL, _eager, "an eager engine looks like a slow one"),
    Check("compilation_mode", ALL, _compilation, "the engine compiles otherwise, or not at all"),
    Check("breakable_graphs", ALL, _breakable, "they switch compilation off, and nothing says so"),
    Check("cudagraph_mode", ALL, _graph_mode, "steps outside of graphs run at half the speed"),
    Check(
        "cudagraph_capture_sizes",
        ALL,
        _capture_sizes,
        "batches above the largest captured size run eager, in silence, at half the speed",
    ),
    Check("speculation", ALL, _speculation, "another drafter, or none, changes the speed of every answer"),
    Check(
        "num_speculative_tokens",
        ALL,
        lambda plan: plan.room.rank.layout.speculative_tokens,
        "states, captured sizes and accepted lengths follow from k",
    ),
    Check("speculation_by_load", ALL, _depth_by_load, "captured sizes and states were planned for one depth"),
    Check(
        "index_share_for_mtp_iteration",
        ALL,
        _index_share,
        "drafts that share a selection cost less and are accepted less often",
    ),
    Check(
        "drops_last_block",
        ALL,
        _with_drafter(lambda plan: True),
        "the plan counts on a prefix being found from its second block on with a drafter",
    ),
    Check(
        "model_runner",
        RANK,
        lambda plan: "v1" if _lane(plan) == "cpu" and _seats(plan)["runner"] == dispatch.ENGINE else "v2",
        "the engine falls back on its old runner with a warning; n-gram layers are wrong in it",
    ),
    Check("kv_connector", CACHE, lambda plan: "none", "a connector changes which blocks live, and may be dropped"),
    Check("seats", RANK, _seats, "another operation rounds otherwise, or does not run here at all"),
    Check("kernels", RANK, lambda plan: [], "a kernel sits where no receipt has put it"),
    Check("api_server_count", ALL, lambda plan: 1, "counts and caps are exact in one process only"),
    Check("door", API, lambda plan: DOOR, "keys, the cap and the sampling policy are enforced by the outermost layer"),
    Check("reasoning_parser", API, _parser("reasoning_parser"), "thoughts end up in the answer"),
    Check("tool_call_parser", API, _parser("tool_call_parser"), "calls end up as prose"),
    Check("enable_auto_tool_choice", API, _stated("enable_auto_tool_choice", False), "tools are offered and not used"),
    Check(
        "default_chat_template_kwargs",
        API,
        _template_defaults,
        "the template's defaults decide whether and how long the model thinks",
    ),
    Check("sampling_defaults", API, _sampling, "requests that state nothing are sampled otherwise than was chosen"),
)
