"""The hybrid cache of one rank, laid out by the engine's own rules: pages, block size, groups, slab, blocks a request.

All cache groups draw equal blocks from one pool. A block ("slab") is as large as the largest group's pages together;
whichever group takes it uses as much of it as it needs. So a request costs blocks, not bytes, and recurrent states are
what makes a short request dear.

Source: vllm 0.32, platforms/interface.py `_align_hybrid_block_size`, v1/core/kv_cache_utils.py
`_get_packed_kv_cache_groups` and `_get_kv_cache_groups_uniform_page_size`, v1/kv_cache_interface.py.
"""

from __future__ import annotations

from typing import Literal

from slimserve.errors import Finding, Refused
from slimserve.geometry import dspark
from slimserve.geometry.layout import BF16, SIZE_OF, KvDtype, Layout, ceil_div, round_up
from slimserve.geometry.reading import check_layout, shape_of
from slimserve.geometry.shape import Attention, Indexer, Linear, Shape
from slimserve.geometry.weights import kv_heads_on_rank
from slimserve.model import Model
from slimserve.records import dataclass

Kind = Literal["attention", "state", "window", "ring"]


@dataclass(frozen=True)
class Group:
    """Layers that share block ids.

    Args:
        kind: attention (grows with the context), state (Gated DeltaNet), window (n-gram convolution), ring (raw index
            keys of the block that is being compressed).
        layers: of the group.
        block_tokens: tokens that one block of it stands for; 0 where it stands for a whole request.
        page_bytes: of one layer in one block, padding included.
        used_bytes: of one layer in one block, without padding.
    """

    kind: Kind
    layers: int
    block_tokens: int
    page_bytes: int
    used_bytes: int

    @property
    def bytes(self) -> int:
        """What the group's layers take of a slab."""
        return self.layers * self.page_bytes


@dataclass(frozen=True)
class Caches:
    """The caches of one rank.

    Args:
        groups: in the engine's order.
        block_tokens: tokens of an attention block; with prefix caching also what two cached states lie apart.
        slab_bytes: of one block of the pool, over all layers; also a slot of the second tier.
        layout: from which they follow.
    """

    groups: tuple[Group, ...]
    block_tokens: int
    slab_bytes: int
    layout: Layout

    def blocks(self, group: Group, context_tokens: int, max_model_len: int, *, settled: bool = False) -> int:
        """Blocks that one request of `context_tokens` holds of a group.

        Args:
            group: one of `groups`.
            context_tokens: tokens of the request, prompt and answer.
            max_model_len: the longest context that is served.
            settled: between two block boundaries, when the state before the last boundary was given back; else the
                most that it holds, which is during the two steps after a boundary.

        Source: attention: v1/core/kv_cache_manager.py `allocate_slots` (lookahead, capped at the longest context);
            states: v1/kv_cache_interface.py MambaSpec.max_memory_usage_bytes and MambaManager: the state being
            written, k speculative ones, and with prefix caching the one before, once a boundary was crossed.
        """
        if group.kind == "attention":
            tokens = min(context_tokens + self.layout.lookahead_tokens, max_model_len)
            return ceil_div(tokens, group.block_tokens)
        if group.kind == "ring":
            return 1
        crossed = self.layout.prefix_caching and context_tokens > group.block_tokens and not settled
        return (2 if crossed else 1) + self.layout.speculative_tokens

    def blocks_a_request(self, context_tokens: int, max_model_len: int, *, settled: bool = False) -> int:
        """Blocks that one request of `context_tokens` holds of all groups; the arguments are those of `blocks`.

        Raises:
            Refused: a context that is not between 1 and `max_model_len`.
        """
        if not 1 <= context_tokens <= max_model_len:
            raise Refused(
                Finding(
                    f"a context of {context_tokens} tokens is not between 1 and max_model_len = {max_model_len}",
                    "the engine stops a request there",
                    "give a shorter context, or a larger max_model_len",
                )
            )
        return sum(self.blocks(group, context_tokens, max_model_len, settled=settled) for group in self.groups)

    def heaviest(self, context_tokens: int, max_model_len: int) -> tuple[Kind, int]:
        """Which kind of group takes most blocks of a request, and how many: what limits the number of slots."""
        by_kind: dict[Kind, int] = {}
        for group in self.groups:
            taken = self.blocks(group, context_tokens, max_model_len)
            by_kind[group.kind] = by_kind.get(group.kind, 0) + taken
        return max(by_kind.items(), key=lambda item: item[1])

    def pool_blocks(self, cache_bytes: int) -> int:
        """Blocks in a pool of `cache_bytes`, as the engine counts them: its null block, never used, among them."""
        return cache_bytes // self.slab_bytes

    def slots(self, cache_bytes: int, context_tokens: int, max_model_len: int, *, settled: bool = False) -> int:
        """Requests of `context_tokens` each that a pool of `cache_bytes` holds at the same time."""
        usable = max(0, self.pool_blocks(cache_bytes) - 1)
        return usable // self.blocks_a_request(context_tokens, max_model_len, settled=settled)

    def tier_slots(self, tier_bytes: int) -> int:
        """Blocks that `tier_bytes` of host memory hold for this rank: a slot is a slab (semantics H.7)."""
        return tier_bytes // self.slab_bytes


def caches(model: Model, layout: Layout) -> Caches:
    """Lay out the caches of one rank.

    Raises:
        RegistryError: the geometry is incomplete or absurd.
        Refused: the layout does not divide the model, or its settings contradict each other.
    """
    shape = shape_of(model)
    check_layout(shape, layout)
    _check_blocks(layout)
    per_token = kv_bytes_a_token(shape.attention, layout)
    attending = shape.attention.layers + (shape.drafter_layers if layout.drafter else 0)
    states = state_pages(shape, layout)
    block = hybrid_block_tokens(layout, per_token, max(states.values(), default=0))
    page = block * per_token
    if shape.indexer is not None:
        groups = _packed(shape, layout, shape.indexer, attending, block, page, states)
    elif states:
        _check_pages(layout, per_token)
        groups = _uniform(shape, layout, attending, block, page, states["state"])
    elif layout.draft_model is not None:
        what, why = "a draft model beside a model without linear layers", "how the engine lays it out is not known here"
        raise Refused(Finding(what, why, "draft with mtp or ngram, or not at all"))
    else:
        groups = [Group("attention", attending, block, page, page)]
    return Caches(tuple(groups), block, max(group.bytes for group in groups), layout)


def kv_bytes_a_token(attention: Attention, layout: Layout) -> int:
    """Bytes of K and V of one layer and one token on a rank."""
    return kv_heads_on_rank(attention, layout.tensor_parallel) * _kv_bytes_a_head(
        attention.head_dim, layout.kv_cache_dtype
    )


def _kv_bytes_a_head(dim: int, dtype: KvDtype) -> int:
    """Bytes of one token's K and V of one head.

    Source: semantics J.1 for turboquant_k8v4: e4m3 keys, 4-bit values, two fp16 constants.
    """
    if dtype == "turboquant_k8v4":
        return dim + dim // 2 + 2 * 2
    return 2 * dim * (BF16 if dtype == "bfloat16" else 1)


def compressed_bytes(indexer: Indexer, tokens: int) -> int:
    """Bytes of one layer's compressed index keys for `tokens`: one bf16 key for `ratio` tokens, on every rank."""
    return tokens // indexer.ratio * indexer.head_dim * BF16


def ring_rows(indexer: Indexer, layout: Layout) -> int:
    """Raw index keys that a request's ring holds: the open group, and every drafted token, in whole groups.

    Source: vllm/models/qwen4_exp/common/qsa_cache.py, QSAKeyStateCache.get_kv_cache_spec.
    """
    return round_up(indexer.ratio + layout.speculative_tokens, indexer.ratio)


def conv_state_bytes(linear: Linear, layout: Layout) -> int:
    """Convolution state of one Gated DeltaNet layer: kernel - 1 inputs and one more a drafted token."""
    rows = linear.kernel - 1 + layout.speculative_tokens
    return linear.channels // layout.tensor_parallel * rows * BF16


def recurrent_state_bytes(linear: Linear, layout: Layout) -> int:
    """Recurrent state of one Gated DeltaNet layer."""
    size = SIZE_OF[layout.mamba_ssm_cache_dtype or linear.state_dtype]
    return linear.value_heads // layout.tensor_parallel * linear.value_dim * linear.key_dim * size


def window_bytes(shape: Shape, layout: Layout) -> int:
    """Convolution window of one n-gram layer, which every rank holds whole."""
    if shape.ngram is None or shape.hyper is None:
        return 0
    return (shape.ngram.window + layout.speculative_tokens) * shape.hyper.count * shape.hidden * BF16


def state_pages(shape: Shape, layout: Layout) -> dict[Kind, int]:
    """Bytes of the states of one layer, by kind: a page of each before padding."""
    pages: dict[Kind, int] = {}
    if shape.linear is not None:
        pages["state"] = conv_state_bytes(shape.linear, layout) + recurrent_state_bytes(shape.linear, layout)
    if shape.ngram is not None and shape.ngram.layer_ids:
        pages["window"] = window_bytes(shape, layout)
    return pages


def hybrid_block_tokens(layout: Layout, kv_bytes: int, state_bytes: int) -> int:
    """Tokens of an attention block, large enough that its page holds the largest state.

    Args:
        layout: whose block_size and kernel_block count.
        kv_bytes: K and V of one layer and one token.
        state_bytes: the largest state of any layer; 0 for a model that has none.

    The semantics (H.7, of vllm 0.33) round further up to what a prefill backend exports, 64 tokens with FlashInfer's.
    0.32 is the pin, and its Gated DeltaNet exports nothing: there only a block_size of 64 gives those values.
    """
    start = max(layout.kernel_block, layout.block_size)
    if not state_bytes:
        return layout.block_size
    return round_up(start * ceil_div(state_bytes, start * kv_bytes), layout.kernel_block)


def _check_blocks(layout: Layout) -> None:
    start, kernel = layout.block_size, layout.kernel_block
    if start < 1 or kernel < 1 or start % kernel:
        why = "attention kernels read whole blocks of their own size"
        raise Refused(Finding(f"block_size = {start} is not a multiple of {kernel}", why, f"use multiples of {kernel}"))


def _check_pages(layout: Layout, kv_bytes: int) -> None:
    """A draft model's pages must be as large as the target's: else the engine lays all caches out in another way."""
    if layout.draft_model is None:
        return
    drafted = dspark.kv_bytes_a_token(layout.draft_model, layout)
    if drafted != kv_bytes:
        raise Refused(
            Finding(
                f"the drafter keeps {drafted} B a token and layer, the target {kv_bytes}",
                "pages of two sizes are laid out in a way that is not counted here",
                "draft with mtp, or use ranks and cache types with which the two are equal",
            )
        )


def _packed(
    shape: Shape, layout: Layout, indexer: Indexer, attending: int, block: int, page: int, states: dict[Kind, int]
) -> list[Group]:
    """Groups where pages differ in size: K and V beside compressed keys, states, windows and rings.

    The engine cuts every bucket of layers into groups of about as many layers as the attention bucket has, which stays
    whole since it mixes two page sizes; then narrows groups of states until a slab need not grow for them.
    """
    rows = ring_rows(indexer, layout)
    if block % rows:
        raise Refused(
            Finding(
                f"a ring of {rows} rows does not divide a block of {block} tokens",
                "the engine asserts it, and does not start",
                "change num_speculative_tokens or block_size",
            )
        )
    ring = rows * indexer.head_dim * BF16  # text only: with images three positions would lie beside each key
    both = page + compressed_bytes(indexer, block)
    linear, ngram = shape.linear, shape.ngram
    layers = {
        "window": len(ngram.layer_ids) if ngram else 0,
        "state": linear.layers if linear else 0,
        "ring": attending,
    }
    pages = {"window": page, "state": page, "ring": ring}
    repeats = _least_padding([attending, *(n for n in layers.values() if n)], attending)
    anchor = max(both * attending, *(pages[kind] for kind, n in layers.items() if n))
    groups: list[Group] = []
    for kind in _in_order(shape):
        if not layers[kind]:
            continue
        fitting = max(anchor // pages[kind], 1)
        count = max(ceil_div(layers[kind], repeats), ceil_div(layers[kind], fitting))
        used = ring if kind == "ring" else states[kind]
        tokens = 0 if kind == "ring" or not layout.prefix_caching else block
        groups += [Group(kind, n, tokens, pages[kind], used) for n in _shares(layers[kind], count)]
    return [*groups, Group("attention", attending, block, both, both)]


def _uniform(shape: Shape, layout: Layout, attending: int, block: int, page: int, state: int) -> list[Group]:
    """Groups where every page has one size: of as many layers as the scarcest kind has.

    When the kinds are nearly as many, of as many as the most frequent has, which pads less. A draft model's layers have
    heads of another shape, and are a kind of their own.
    """
    linear = shape.linear.layers if shape.linear else 0
    kinds: list[tuple[Kind, int]] = [("state", linear), ("attention", attending)]
    if layout.draft_model is not None:
        kinds.append(("attention", layout.draft_model.num_hidden_layers))
    low, high = min(n for _, n in kinds), max(n for _, n in kinds)
    size = high if high < 1.5 * low else low
    groups: list[Group] = []
    for kind, layers in kinds:
        tokens, used = (block, page) if kind == "attention" else (block if layout.prefix_caching else 0, state)
        groups += [Group(kind, n, tokens, page, used) for n in _shares(layers, ceil_div(layers, size))]
    return groups


def _in_order(shape: Shape) -> list[Kind]:
    """Kinds in the order in which the engine meets their layers."""
    first = shape.ngram.layer_ids[0] if shape.ngram and shape.ngram.layer_ids else 0
    return ["window", "state", "ring"] if first == 1 else ["state", "window", "ring"]


def _shares(layers: int, groups: int) -> list[int]:
    """Layers dealt out to groups one by one."""
    return [len(range(place, layers, groups)) for place in range(groups)]


def _least_padding(counts: list[int], low: int) -> int:
    """The group size from `low` on that pads least when every count is cut into it; the larger one of two as good."""
    return min(range(low, max(*counts, low) + 1), key=lambda size: (sum(-count % size for count in counts), -size))
