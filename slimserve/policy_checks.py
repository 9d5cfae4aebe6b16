"""How each policy is seen to hold: a function a policy, which yields every way in which a profile breaks it."""

from __future__ import annotations

from collections.abc import Iterator

from slimserve.model import QuantisedTensor
from slimserve.shapes import Loc, Problem
from slimserve.subject import Subject

GREEDY_TEMPERATURE = 0.05
GREEDY_TOP_P = 0.1


def _engine(key: str) -> Loc:
    return ("engine", key, "value")


def prefix_caching(subject: Subject) -> Iterator[Problem]:
    """Ways in which `subject` breaks prefix-caching."""
    engine = subject.profile.engine
    why = "without it every turn of a conversation pays for its whole history again"
    if not engine.enable_prefix_caching.value:
        yield Problem(_engine("enable_prefix_caching"), "engine.enable_prefix_caching is false", why, "set it to true")
    if "hybrid" in subject.model.traits and (
        engine.mamba_cache_mode is None or engine.mamba_cache_mode.value != "align"
    ):
        yield Problem(
            _engine("mamba_cache_mode"),
            "engine.mamba_cache_mode is not align",
            "a hybrid model reuses a prefix only where its recurrent state was kept, and only align keeps it",
            "state engine.mamba_cache_mode: align",
        )


def exact_kv(subject: Subject) -> Iterator[Problem]:
    """Ways in which `subject` breaks exact-kv."""
    dtype = subject.profile.engine.kv_cache_dtype
    if "exact_kv" in subject.model.traits and dtype.value != "bfloat16":
        yield Problem(
            _engine("kv_cache_dtype"),
            f"engine.kv_cache_dtype = {dtype.value}",
            f"{subject.model.title} was seen to answer the wrong turn with a compressed main KV cache",
            "use bfloat16",
        )
    elif dtype.value != "bfloat16" and dtype.evidence.published is None and dtype.evidence.receipt is None:
        yield Problem(
            _engine("kv_cache_dtype"),
            f"engine.kv_cache_dtype = {dtype.value} has no source",
            "a quantised main KV cache needs a published source or a receipt",
            "cite one, or use bfloat16",
        )


def graphs(subject: Subject) -> Iterator[Problem]:
    """Ways in which `subject` breaks graphs-cover-decode."""
    engine = subject.profile.engine
    if engine.enforce_eager.value:
        if subject.platform.kind == "cuda":
            yield Problem(
                _engine("enforce_eager"),
                "engine.enforce_eager is true on a CUDA platform",
                "an eager decode step is mostly gaps between kernels: half the speed was measured",
                "set it to false, and state compilation_config",
            )
        if engine.compilation_config is not None:
            yield Problem(
                _engine("compilation_config"),
                "engine.compilation_config is stated beside enforce_eager: true",
                "an eager engine captures no graphs, so one of the two is not meant",
                "remove one of them",
            )
        return
    if engine.compilation_config is None:
        yield Problem(
            ("engine",),
            "engine.compilation_config is missing",
            "the engine's own capture list ends where it likes, and larger batches fall back to eager in silence",
            "state cudagraph_mode and cudagraph_capture_sizes",
        )
        return
    speculation = engine.speculative_config
    k = speculation.value.num_speculative_tokens if speculation else 0
    needed = (k + 1) * engine.max_num_seqs.value
    sizes = engine.compilation_config.value.cudagraph_capture_sizes
    if needed not in sizes:
        yield Problem(
            _engine("compilation_config"),
            f"the capture sizes end at {max(sizes)} and do not contain {needed}",
            f"a full decode step is max_num_seqs {engine.max_num_seqs.value} x (1 + {k} speculated) tokens",
            f"add {needed}",
        )
    if list(sizes) != sorted(set(sizes)):
        yield Problem(
            _engine("compilation_config"),
            "the capture sizes are not in rising order",
            "a repeated or misplaced size is a slip of the pen",
            "sort them and keep each once",
        )


def ranks_of_experts(subject: Subject) -> int:
    """Over how many ranks experts are spread whole; 1 without expert parallelism."""
    engine = subject.profile.engine
    if engine.enable_expert_parallel is None or not engine.enable_expert_parallel.value:
        return 1
    return engine.tensor_parallel_size.value * (engine.data_parallel_size.value if engine.data_parallel_size else 1)


def _tensor_tiles(tensor: QuantisedTensor, block: tuple[int, int], tp: int, ep: int, experts: int) -> str | None:
    """Why `tensor` cannot be sharded, or None."""
    if tensor.experts and ep > 1:
        return None if experts % ep == 0 else f"{experts} experts do not spread whole over {ep} ranks"
    if tensor.sharded == "none" or tp == 1:
        return None
    axis = 0 if tensor.sharded == "out" else 1
    size = tensor.shape[axis] // (tensor.fused if axis == 0 else 1)
    if size % tp or (size // tp) % block[axis]:
        return f"a shard of {size}/{tp} = {size / tp:g} is no multiple of the scale block {block[axis]}"
    return None


def shards_tile(subject: Subject) -> Iterator[Problem]:
    """Ways in which `subject` breaks shards-tile."""
    quantisation = subject.model.checkpoints[subject.profile.quant].quantisation
    if quantisation is None:
        return
    tp, ep = subject.profile.engine.tensor_parallel_size.value, ranks_of_experts(subject)
    experts = subject.model.geometry.num_experts or 0
    for tensor in quantisation.tensors:
        reason = _tensor_tiles(tensor, quantisation.block, tp, ep, experts)
        if reason:
            legal = [n for n in subject.model.geometry.legal_tensor_parallel() if experts and experts % n == 0]
            remedy = (
                f"set enable_expert_parallel: true with one of {legal} ranks" if tensor.experts else "use fewer ranks"
            )
            yield Problem(
                _engine("tensor_parallel_size"),
                f"{tensor.name} {list(tensor.shape)}: {reason}",
                "scales that do not tile the shard give wrong answers, not an error",
                remedy,
            )


def tool_calling(subject: Subject) -> Iterator[Problem]:
    """Ways in which `subject` breaks tool-calling."""
    engine, traits = subject.profile.engine, subject.model.traits
    reasoning = engine.reasoning_parser.value if engine.reasoning_parser else None
    tools = engine.tool_call_parser.value if engine.tool_call_parser else None
    if "tools" in traits and (
        tools is None or engine.enable_auto_tool_choice is None or not engine.enable_auto_tool_choice.value
    ):
        yield Problem(
            ("engine",),
            "automatic tool calling is not on",
            "agents get tool calls as prose otherwise",
            "state tool_call_parser and enable_auto_tool_choice: true",
        )
    if "thinking" in traits and reasoning is None:
        yield Problem(
            ("engine",),
            "engine.reasoning_parser is missing",
            "thinking would land in the answer",
            "state the model's reasoning parser",
        )
    parsers = subject.model.parsers
    if (reasoning, tools) != (None, None) and (reasoning != parsers.reasoning or tools not in parsers.tool_calls):
        yield Problem(
            _engine("tool_call_parser"),
            f"engine.tool_call_parser = {tools} with reasoning_parser = {reasoning}",
            "the two read one output format together and only tested pairs do it right",
            f"{subject.model.title}: {parsers.reasoning} with {' or '.join(parsers.tool_calls)}",
        )


def thinking(subject: Subject) -> Iterator[Problem]:
    """Ways in which `subject` breaks thinking-on."""
    template = subject.profile.engine.default_chat_template_kwargs
    if template is not None and template.value.enable_thinking is False:
        yield Problem(
            _engine("default_chat_template_kwargs"),
            "enable_thinking is false",
            "thinking models are served thinking; effort is turned down by reasoning_effort",
            "remove enable_thinking",
        )


def never_greedy(subject: Subject) -> Iterator[Problem]:
    """Ways in which `subject` breaks never-greedy."""
    setting = subject.profile.engine.override_generation_config
    sampling = setting.value if setting else subject.model.sampling
    narrow = sampling.top_p is not None and sampling.top_p < GREEDY_TOP_P
    if sampling.temperature < GREEDY_TEMPERATURE or sampling.top_k == 1 or narrow:
        yield Problem(
            _engine("override_generation_config") if setting else ("model",),
            f"temperature {sampling.temperature}, top_k {sampling.top_k}, top_p {sampling.top_p}: sampling is greedy",
            "greedy decoding loops: agents then repeat one call for ever",
            "use the sampling that the model's authors ship",
        )


def in_flight(subject: Subject) -> Iterator[Problem]:
    """Ways in which `subject` breaks in-flight-cap."""
    engine = subject.profile.engine
    replicas = engine.data_parallel_size.value if engine.data_parallel_size else 1
    cap, slots = subject.profile.admission.max_in_flight.value, engine.max_num_seqs.value * replicas
    if cap < slots:
        yield Problem(
            ("admission", "max_in_flight", "value"),
            f"admission.max_in_flight = {cap} is less than engine.max_num_seqs = {slots}"
            + (f", of {replicas} replicas together" if replicas > 1 else ""),
            f"{slots - cap} decode slots could never be used",
            f"use at least {slots}; three times that is usual",
        )


def marlin(subject: Subject) -> Iterator[Problem]:
    """Ways in which `subject` breaks marlin-below-sm89."""
    quantisation = subject.model.checkpoints[subject.profile.quant].quantisation
    gpus = subject.platform.gpus
    if quantisation is None or gpus is None or quantisation.method != "fp8":
        return
    major, minor = map(int, gpus.capability.split("."))
    backend = subject.profile.engine.moe_backend
    if (major, minor) < (8, 9) and "moe" in subject.model.traits and (backend is None or backend.value != "marlin"):
        yield Problem(
            _engine("moe_backend"),
            f"engine.moe_backend is {backend.value if backend else 'not stated'} on capability {gpus.capability}",
            "FP8 tensor cores start at 8.9; the other FP8 paths crash below it",
            "state moe_backend: marlin",
        )


def real_weights(subject: Subject) -> Iterator[Problem]:
    """Ways in which `subject` breaks real-weights."""
    profile = subject.profile
    dummy = profile.engine.load_format is not None
    generated = subject.model.checkpoints[profile.quant].generated is not None
    if dummy and not ("slice" in profile.id and "slice" in profile.title.lower()):
        yield Problem(
            ("engine", "load_format", "value"),
            "engine.load_format is dummy in a profile whose id and title do not call it a slice",
            "its answers are noise, and its speed is easily taken for the model's",
            "name it a slice, or remove load_format",
        )
    if dummy != generated:
        yield Problem(
            ("engine", "load_format", "value") if dummy else ("engine",),
            f"engine.load_format is {'dummy' if dummy else 'not stated'}, and the checkpoint "
            + ("has no weights" if generated else "has weights"),
            "what is measured would be something else than what is named",
            "state engine.load_format: dummy" if generated else "remove it",
        )
