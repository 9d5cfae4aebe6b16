"""A model's shape, sorted by part: every number that sizes depend on is there.

`Geometry` mirrors config.json, where all but a few fields may be absent; `reading.shape_of` makes one of these of it.
"""

from __future__ import annotations

from slimserve.geometry.layout import round_up
from slimserve.records import dataclass

VOCAB_PADDING = 64
"""rows to which the engine pads a vocabulary (vllm, vocab_parallel_embedding.py)"""


@dataclass(frozen=True)
class Attention:
    """Softmax attention: `layers` of them, not counting the drafter's."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool


@dataclass(frozen=True)
class Linear:
    """Gated DeltaNet layers."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_dtype: str

    @property
    def channels(self) -> int:
        """Channels of the causal convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class Indexer:
    """The side branch that picks the blocks which sparse attention reads."""

    heads: int
    kv_heads: int
    head_dim: int
    budget: int
    ratio: int


@dataclass(frozen=True)
class Experts:
    """Routed experts and the shared one."""

    count: int
    inner: int
    shared_inner: int


@dataclass(frozen=True)
class Hyper:
    """Hyper-connections: `count` residual streams, mixed through a matrix of low rank."""

    count: int
    rank: int


@dataclass(frozen=True)
class Ngram:
    """Hashed n-gram embedding with its short convolution, at layers counted from 1."""

    layer_ids: tuple[int, ...]
    embed: int
    kernel: int
    size: int
    heads_per_ngram: int
    base: int
    divisor: int

    @property
    def heads(self) -> int:
        """Hash heads: some for each n from 2 to `size`."""
        return (self.size - 1) * self.heads_per_ngram

    @property
    def window(self) -> int:
        """Tokens that the dilated convolution looks back (dilation = n-gram size)."""
        return (self.kernel - 1) * self.size


@dataclass(frozen=True)
class Shape:
    """A model, sorted by part; a part that it does not have is None."""

    hidden: int
    layers: int
    vocab: int
    tied: bool
    attention: Attention
    linear: Linear | None
    indexer: Indexer | None
    hyper: Hyper | None
    ngram: Ngram | None
    mlp: int | None
    experts: Experts | None
    interval: int
    drafter_layers: int

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding as the engine stores it."""
        return round_up(self.vocab, VOCAB_PADDING)
