"""What a profile is: model x quant x platform x config, every setting with its reason and its evidence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from slimserve.records import dataclass
from slimserve.shapes import Between, Matching, Satisfying, fields_of

T = TypeVar("T")


def not_empty(value: tuple[object, ...]) -> str | None:
    """A complaint about a list without items."""
    return None if value else "it must have at least one item"


ID_PATTERN = r"[a-z0-9][a-z0-9.-]{0,63}"
Id = Annotated[str, Matching(ID_PATTERN, "lower-case letters, digits, dots and hyphens, at most 64")]


def _is_text(value: str) -> str | None:
    # Texts are printed on terminals, where a control sequence could forge what others say.
    return None if value.strip() and value.replace("\n", " ").isprintable() else "it must be printable, and not blank"


def _stays_inside(name: str) -> str | None:
    parts = name.split("/")
    if len(name) <= 255 and name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(parts):
        return None
    return "it must be a plain relative path of at most 255 characters"


Text = Annotated[str, Satisfying(_is_text)]
Line = Annotated[str, Matching(r"[^\n]*", "one line"), Satisfying(_is_text)]
# The index decides which shards there are, not a name pattern; a name only has to stay inside its folder.
FileName = Annotated[str, Satisfying(_stays_inside)]
Count = Annotated[int, Between(1, 1 << 20)]
Bytes = Annotated[int, Between(0, 1 << 60)]
Variable = Annotated[str, Matching(r"[A-Z][A-Z0-9_]*", "capitals, digits and underscores")]
SCORES = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"
"""the variable whose value is reckoned with: what the sparse indexer may take for its scores, in MiB"""
Seconds = Annotated[int, Between(1, 86_400)]
Greedy = Literal["replace", "refuse", "verification"]
Thinking = Literal["keep", "refuse"]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Where a value comes from: exactly one of a receipt, a published source, a derivation or a policy."""

    EXPECTED: ClassVar[str] = (
        "exactly one of policy: ID; derived: FORMULA; receipt: FILE; published: SOURCE with section and figure"
    )

    receipt: FileName | None = None
    """path of a receipt of ours under profiles/receipts"""
    published: Id | None = None
    """id of a source in profiles/sources.yaml; needs `section` and `figure`"""
    section: Text | None = None
    """the section of the published source"""
    figure: Text | None = None
    """the figure or statement there that supports the value"""
    derived: Text | None = None
    """a formula or fact from which the value follows"""
    policy: Id | None = None
    """id of a policy that fixes the value"""

    def __post_init__(self) -> None:
        kinds = [name for name in ("receipt", "published", "derived", "policy") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(f"exactly one of receipt, published, derived, policy is needed, {len(kinds)} given")
        if (self.published is None) != (self.section is None) or (self.published is None) != (self.figure is None):
            raise ValueError("published evidence names its source, section and figure; no other kind has the last two")

    def __str__(self) -> str:
        if self.published is not None:
            return f"published: {self.published}, section {self.section}: {self.figure}"
        for kind in ("receipt", "derived", "policy"):
            if getattr(self, kind) is not None:
                return f"{kind}: {getattr(self, kind)}"
        raise AssertionError("unreachable: one kind is always set")


@dataclass(frozen=True, kw_only=True)
class Setting(Generic[T]):
    """A value with the reason for it and the evidence behind the reason."""

    value: T
    """the value itself"""
    why: Text
    """a reason, not a restatement of key or value"""
    evidence: Evidence
    """where the value comes from"""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculative decoding, as the engine's `speculative_config`."""

    method: Literal["mtp", "ngram", "dspark"]
    num_speculative_tokens: Annotated[int, Between(1, 16)]
    num_speculative_tokens_per_batch_size: tuple[tuple[Count, Count, Count], ...] | None = None
    """depth by load: from so many requests to so many, so many tokens"""
    index_share_for_mtp_iteration: bool | None = None
    model: Id | None = None
    """one of the model's `drafters`, whose weights are its own"""
    kv_cache_dtype: Literal["bfloat16"] | None = None
    """of the drafter's cache, where it is not the main one's"""

    def __post_init__(self) -> None:
        if (self.method == "dspark") != (self.model is not None):
            raise ValueError("dspark drafts with a model of its own, and the other methods with none")
        if self.kv_cache_dtype is not None and self.model is None:
            raise ValueError("kv_cache_dtype is of a drafter with weights of its own")


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """CUDA graphs, as the engine's `compilation_config`."""

    cudagraph_mode: Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
    cudagraph_capture_sizes: Annotated[tuple[Count, ...], Satisfying(not_empty)]


@dataclass(frozen=True, kw_only=True)
class Engram:
    """Where the n-gram embedding table lives, as the engine's `engram_config`."""

    cpu_offload: bool


@dataclass(frozen=True, kw_only=True)
class TemplateDefaults:
    """Arguments that the chat template gets when a request gives none."""

    reasoning_effort: Literal["low", "medium", "xhigh"] | None = None
    enable_thinking: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters, as a model's authors ship them."""

    temperature: Annotated[float, Between(0, 2)]
    top_p: Annotated[float, Between(0.01, 1)] | None = None
    top_k: Annotated[int, Between(0, 1 << 20)] | None = None
    repetition_penalty: Annotated[float, Between(0.01, 2)] | None = None


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Settings of the engine by the engine's own names; `engine/command.py` turns them into its command line."""

    dtype: Setting[Literal["bfloat16", "float16", "float32"]]
    """the activation type is stated, since `auto` follows the checkpoint"""
    kv_cache_dtype: Setting[Literal["bfloat16", "fp8", "fp8_e4m3"]]
    """the main KV type is stated, since a quantised cache can change answers"""
    max_model_len: Setting[Count]
    """the context is stated, since the engine shrinks it in silence when it does not fit"""
    max_num_seqs: Setting[Count]
    """decode slots are stated: the engine's default can exceed what the cache holds"""
    max_num_batched_tokens: Setting[Count]
    """the prefill chunk is stated: it sets activations and time to first token"""
    tensor_parallel_size: Setting[Count]
    """ranks are stated: they decide which shards exist"""
    enable_prefix_caching: Setting[bool]
    """prefix caching is stated: the engine's default depends on the architecture"""
    enable_chunked_prefill: Setting[bool]
    """chunked prefill is stated: the engine's default depends on model and platform"""
    enforce_eager: Setting[bool]
    """graphs are stated: an eager engine looks like a slow one"""
    data_parallel_size: Setting[Count] | None = None
    data_parallel_size_local: Setting[Count] | None = None
    nnodes: Setting[Annotated[int, Between(2, 64)]] | None = None
    enable_expert_parallel: Setting[bool] | None = None
    all2all_backend: Setting[Text] | None = None
    disable_custom_all_reduce: Setting[bool] | None = None
    gpu_memory_utilization: Setting[Annotated[float, Between(0, 1, open_ends=True)]] | None = None
    kv_cache_memory_bytes: Setting[Annotated[int, Between(1 << 20, 1 << 50)]] | None = None
    block_size: Setting[Annotated[int, Between(1, 1 << 16)]] | None = None
    mamba_cache_mode: Setting[Literal["align", "none"]] | None = None
    mamba_ssm_cache_dtype: Setting[Literal["float32", "bfloat16"]] | None = None
    async_scheduling: Setting[bool] | None = None
    compilation_config: Setting[Compilation] | None = None
    speculative_config: Setting[Speculation] | None = None
    engram_config: Setting[Engram] | None = None
    moe_backend: (
        Setting[Literal["marlin", "triton", "deep_gemm", "cutlass", "flashinfer_trtllm", "flashinfer_cutlass"]] | None
    ) = None
    load_format: Setting[Literal["dummy"]] | None = None
    gdn_prefill_backend: Setting[Literal["triton", "flashinfer"]] | None = None
    enable_flashinfer_autotune: Setting[bool] | None = None
    language_model_only: Setting[bool] | None = None
    reasoning_parser: Setting[Text] | None = None
    tool_call_parser: Setting[Text] | None = None
    enable_auto_tool_choice: Setting[bool] | None = None
    default_chat_template_kwargs: Setting[TemplateDefaults] | None = None
    override_generation_config: Setting[Sampling] | None = None
    enable_prompt_tokens_details: Setting[bool] | None = None


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Deadlines of the supervisor."""

    load_seconds: Setting[Seconds]
    """from the start of the engine to its first healthy answer"""
    warmup_seconds: Setting[Seconds]
    """from there to the first token of a real completion"""
    drain_seconds: Setting[Seconds]
    """from SIGTERM, when running answers may finish and no new work is taken, until they are cut off"""
    stall_seconds: Setting[Seconds]
    """work is under way and the engine has made no step for so long: it is frozen, and is started anew"""
    stop_seconds: Setting[Seconds]
    """from the end of draining to SIGKILL"""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Waiting at the door for those who prefer it to an answer of 429."""

    length: Count
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class Admission:
    """How many requests the endpoint takes on."""

    max_in_flight: Setting[Count]
    """the cap on generation requests in flight is stated: beyond it 429, with the seconds to wait"""
    slot_context_tokens: Setting[Count]
    """prompt and answer of a request as they usually are: the planner sees to it that every decode slot holds one"""
    fair_share: Setting[bool] | None = None
    """share the cap out evenly over the API keys that have work"""
    queue: Setting[Queue] | None = None
    """let so many requests wait at the door, each for so long at most"""
    max_body_bytes: Setting[Annotated[int, Between(1, 1 << 32)]] | None = None
    """size of a request's body; 16 MiB when not stated"""


@dataclass(frozen=True, kw_only=True)
class RequestPolicy:
    """What becomes of requests that ask for what the policies rule out."""

    greedy: Setting[Greedy] | None = None
    """`replace` (when not stated) serves with the profile's own sampling, `refuse` answers 400, `verification` lets it
    through, in launches of the harness alone"""
    thinking: Setting[Thinking] | None = None
    """a request to switch thinking off: `keep` (when not stated) thinks all the same, `refuse` answers 400"""


@dataclass(frozen=True, kw_only=True)
class NotCarried:
    """Something that a reader could expect of the profile and that it does not do."""

    what: Text
    why: Text


@dataclass(frozen=True, kw_only=True)
class Option:
    """Something that is built and off: `--plan --set` shows what it would take."""

    set: Annotated[tuple[Line, ...], Satisfying(not_empty)]
    """assignments as `--set` takes them"""
    why: Text
    """why it is off"""
    evidence: Evidence
    """whose figures speak"""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One configuration that may be run."""

    id: Id
    """the name to run it by; it is also the name of its file"""
    title: Line
    """one line for the list"""
    aliases: tuple[Id, ...] = ()
    """other names, resolved by the machine when several profiles share one"""
    model: Id
    """id of a file in profiles/models"""
    quant: Id
    """which of the model's checkpoints"""
    platform: Id
    """id of a file in profiles/platforms"""
    status: Literal["measured", "published", "unmeasured"]
    """whose numbers stand behind it: ours, somebody else's, or nobody's yet"""
    default: bool = False
    """the embedded default, which `slimserve` offers first"""
    engine: Engine
    """what the engine is told"""
    environment: dict[Variable, Setting[Line]] = field(default_factory=dict)
    """environment variables of the engine's processes"""
    seats: dict[Id, Setting[Line]] = field(default_factory=dict)
    """who sits in each group of the engine's operations, where it is not the engine's own"""
    admission: Admission
    """how many requests it takes on"""
    policy: RequestPolicy = field(default_factory=RequestPolicy)
    """what becomes of requests that ask for what the policies rule out"""
    serve: Serve
    """deadlines of the supervisor"""
    options: dict[Id, Option] = field(default_factory=dict)
    """what it could do, and does not"""
    not_carried: tuple[NotCarried, ...] = ()
    """what it does not do, in its own words"""

    def settings(self) -> Iterator[tuple[str, Setting[Any]]]:
        """Every setting that the profile states, by key path, in the order of the schema."""
        for section in ("engine", "admission", "policy", "serve"):
            part = getattr(self, section)
            for key in fields_of(type(part)):
                setting = getattr(part, key.name)
                if setting is not None:
                    yield f"{section}.{key.name}", setting
        for name, setting in self.environment.items():
            yield f"environment.{name}", setting
        for name, setting in self.seats.items():
            yield f"seats.{name}", setting
