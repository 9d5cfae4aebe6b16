"""The policies: what holds for every profile, whoever wrote it.

A policy is an id that evidence can cite, a sentence, the reason, and a check of one profile with its model and
platform. The registry runs every check when it loads, so a profile that breaks one cannot even be listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slimserve.model import Model, QuantisedTensor
from slimserve.platform import Platform
from slimserve.profile import Profile
from slimserve.shapes import Loc, Problem

GREEDY_TEMPERATURE = 0.05
GREEDY_TOP_P = 0.1


@dataclass(frozen=True, slots=True)
class Subject:
    """One profile with what it names."""

    profile: Profile
    model: Model
    platform: Platform


@dataclass(frozen=True, slots=True)
class Policy:
    """One rule.

    Args:
        id: what evidence cites.
        sentence: the rule.
        reason: why it exists.
        check: yields a problem for each way in which a subject breaks it. None: the rule is not in the profile's
            hands, since `engine/command.py` fixes the value for all of them.
    """

    id: str
    sentence: str
    reason: str
    check: Callable[[Subject], Iterator[Problem]] | None = None


def _engine(key: str) -> Loc:
    return ("engine", key, "value")


def _prefix_caching(subject: Subject) -> Iterator[Problem]:
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


def _exact_kv(subject: Subject) -> Iterator[Problem]:
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


def _graphs(subject: Subject) -> Iterator[Problem]:
    engine = subject.profile.engine
    if engine.enforce_eager.value:
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


def _shards_tile(subject: Subject) -> Iterator[Problem]:
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


def _tool_calling(subject: Subject) -> Iterator[Problem]:
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


def _thinking(subject: Subject) -> Iterator[Problem]:
    template = subject.profile.engine.default_chat_template_kwargs
    if template is not None and template.value.enable_thinking is False:
        yield Problem(
            _engine("default_chat_template_kwargs"),
            "enable_thinking is false",
            "thinking models are served thinking; effort is turned down by reasoning_effort",
            "remove enable_thinking",
        )


def _never_greedy(subject: Subject) -> Iterator[Problem]:
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


def _in_flight(subject: Subject) -> Iterator[Problem]:
    cap, slots = subject.profile.admission.max_in_flight.value, subject.profile.engine.max_num_seqs.value
    if cap < slots:
        yield Problem(
            ("admission", "max_in_flight", "value"),
            f"admission.max_in_flight = {cap} is less than engine.max_num_seqs = {slots}",
            f"{slots - cap} decode slots could never be used",
            f"use at least {slots}; three times that is usual",
        )


def _marlin(subject: Subject) -> Iterator[Problem]:
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


POLICIES: tuple[Policy, ...] = (
    Policy(
        "prefix-caching",
        "Prefix caching is stated and on.",
        "Agents resend their whole history with each turn.",
        _prefix_caching,
    ),
    Policy(
        "exact-kv",
        "The main KV cache is bf16 for Flash-Next, and sourced wherever it is quantised.",
        "A compressed cache was seen to change answers without garbling them.",
        _exact_kv,
    ),
    Policy(
        "graphs-cover-decode",
        "The graph mode is stated and its sizes contain (k+1) x max_num_seqs.",
        "Batches beyond the captured sizes run eager, in silence, at half the speed.",
        _graphs,
    ),
    Policy(
        "shards-tile",
        "A quantised shard tiles its scale grid, or experts stay whole.",
        "A shard cut through a scale block gives wrong answers rather than an error.",
        _shards_tile,
    ),
    Policy(
        "tool-calling",
        "Tool calling is automatic; tool and reasoning parsers are a tested pair.",
        "A wrong pair turns calls into prose and answers into null.",
        _tool_calling,
    ),
    Policy("thinking-on", "Thinking models are served thinking.", "Effort is a dial; off is another model.", _thinking),
    Policy("never-greedy", "Nothing is sampled greedily by default.", "Greedy decoding loops.", _never_greedy),
    Policy(
        "marlin-below-sm89",
        "FP8 experts run on Marlin below capability 8.9.",
        "There is no FP8 hardware there, and the paths that want it crash.",
        _marlin,
    ),
    Policy(
        "in-flight-cap",
        "Generation requests in flight are capped, at no less than the decode slots.",
        "Beyond the decode slots a request only waits; an endless line keeps clients that have long given up.",
        _in_flight,
    ),
    Policy(
        "loopback",
        "The endpoint listens on loopback unless it has keys, and CORS admits no origin that is not named.",
        "A port without a key serves whoever finds it.",
    ),
    Policy(
        "one-api-server",
        "There is one API server process.",
        "Counts and caps are exact in one process and approximate in several.",
    ),
    Policy(
        "pinned-revision",
        "Weights come from a 40-hex revision or an exact version, and bring no code.",
        "A branch moves, and with it the weights behind a name.",
    ),
    Policy(
        "nothing-unread",
        "No key and no variable is given that nothing reads.",
        "A misspelt setting is lost in silence, and the default wins.",
    ),
    Policy(
        "one-grammar-backend",
        "One backend follows the grammars of requests.",
        "Another that takes over in silence was seen to use up the memory for what the first had refused.",
    ),
    Policy("telemetry-off", "The engine reports to nobody.", "It runs on hardware people own."),
)

BY_ID = {policy.id: policy for policy in POLICIES}


def broken(subject: Subject) -> Iterator[Problem]:
    """Every way in which `subject` breaks a policy."""
    for policy in POLICIES:
        if policy.check is not None:
            for problem in policy.check(subject):
                yield Problem(problem.loc, problem.what, f"{problem.why} (policy {policy.id})", problem.do)
