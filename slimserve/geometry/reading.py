"""Reads a model's shape out of its file, and checks that a layout divides it.

What is missing or absurd is an error that names the field, never a default.
"""

from __future__ import annotations

from typing import Literal

from slimserve.errors import Finding, Refused, RegistryError, raise_if_any
from slimserve.geometry import dspark
from slimserve.geometry.layout import Layout
from slimserve.geometry.shape import Attention, Experts, Hyper, Indexer, Linear, Ngram, Shape
from slimserve.model import Geometry, Model
from slimserve.records import dataclass


@dataclass(frozen=True)
class Family:
    """What an architecture's code decides, and no field of its config.

    Args:
        linear: has linear-attention layers (Gated DeltaNet) besides the attention ones.
        gated: q_proj carries an output gate beside each head, and q and k are normed by head.
        mlp: dense, or routed experts with a shared one.
        streams: hyper-connections instead of a residual stream and its norms; sparse attention with an indexer;
            n-gram embedding. (Qwen4Exp has all of them or none.)
    """

    linear: bool
    gated: bool
    mlp: Literal["dense", "experts"]
    streams: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(linear=False, gated=False, mlp="dense"),
    "Qwen3_5ForCausalLM": Family(linear=True, gated=True, mlp="dense"),
    "Qwen3_5ForConditionalGeneration": Family(linear=True, gated=True, mlp="dense"),
    "Qwen3_5MoeForCausalLM": Family(linear=True, gated=True, mlp="experts"),
    "Qwen3_5MoeForConditionalGeneration": Family(linear=True, gated=True, mlp="experts"),
    "Qwen4ExpForCausalLM": Family(linear=True, gated=True, mlp="experts", streams=True),
    "Qwen4ExpForConditionalGeneration": Family(linear=True, gated=True, mlp="experts", streams=True),
}


class _Reader:
    """Takes fields out of a `Geometry` and collects what is wrong with them."""

    def __init__(self, model: Model) -> None:
        self.geometry: Geometry = model.geometry
        self.title = f"{model.id} ({model.architecture})"
        self.findings: list[Finding] = []

    def number(self, name: str) -> int:
        """A positive whole number; 1 after a complaint, so that the rest is still read."""
        value: object = getattr(self.geometry, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.complain(name, value)
        return 1

    def given(self, name: str) -> object:
        """A value that must be there."""
        value: object = getattr(self.geometry, name)
        if value is None:
            self.complain(name, value)
        return value

    def complain(self, name: str, value: object) -> None:
        """A field that is missing or absurd."""
        what = f"geometry.{name} is missing" if value is None else f"geometry.{name} = {value} is not above zero"
        why = f"{self.title} cannot be laid out without it"
        self.findings.append(Finding(what, why, f"copy {name} from the checkpoint's config.json"))

    def divides(self, part: str, whole: str) -> None:
        """`part` must divide `whole`."""
        if self.number(whole) % self.number(part):
            self.findings.append(
                Finding(
                    f"geometry.{part} = {getattr(self.geometry, part)} does not divide "
                    f"geometry.{whole} = {getattr(self.geometry, whole)}",
                    "heads are grouped evenly",
                    "copy both from the checkpoint's config.json",
                )
            )


def shape_of(model: Model) -> Shape:
    """Read a model's geometry.

    Raises:
        RegistryError: an architecture that is not known here, or a field that is missing or absurd; all of them.
    """
    family = FAMILIES.get(model.architecture)
    if family is None:
        raise RegistryError(
            Finding(
                f"architecture = {model.architecture} is not known",
                "which parts a model has, and how the engine shards them, depends on its class",
                f"use one of {', '.join(sorted(FAMILIES))}",
            )
        )
    read = _Reader(model)
    read.divides("num_key_value_heads", "num_attention_heads")
    layers = read.number("num_hidden_layers")
    interval = read.number("full_attention_interval") if family.linear else 1
    attending = layers // interval
    if not attending:
        read.findings.append(
            Finding(
                f"geometry.full_attention_interval = {interval} exceeds geometry.num_hidden_layers = {layers}",
                "no layer would attend",
                "copy both from the checkpoint's config.json",
            )
        )
    attention = Attention(
        attending,
        read.number("num_attention_heads"),
        read.number("num_key_value_heads"),
        read.number("head_dim"),
        family.gated,
    )
    linear = _linear(read, layers - attending) if family.linear and layers > attending else None
    indexer, hyper, ngram = _streams(read) if family.streams else (None, None, None)
    mlp = read.number("intermediate_size") if family.mlp == "dense" else None
    experts = _experts(read) if family.mlp == "experts" else None
    tied = read.given("tie_word_embeddings")
    drafter = read.number("mtp_num_hidden_layers") if read.geometry.mtp_num_hidden_layers is not None else 0
    hidden, vocab = read.number("hidden_size"), read.number("vocab_size")
    raise_if_any(RegistryError, list(dict.fromkeys(read.findings)))
    return Shape(
        hidden, layers, vocab, bool(tied), attention, linear, indexer, hyper, ngram, mlp, experts, interval, drafter
    )


def _linear(read: _Reader, layers: int) -> Linear:
    read.divides("linear_num_key_heads", "linear_num_value_heads")
    return Linear(
        layers,
        read.number("linear_num_key_heads"),
        read.number("linear_num_value_heads"),
        read.number("linear_key_head_dim"),
        read.number("linear_value_head_dim"),
        read.number("linear_conv_kernel_dim"),
        str(read.given("mamba_ssm_dtype")),
    )


def _experts(read: _Reader) -> Experts:
    return Experts(
        read.number("num_experts"),
        read.number("moe_intermediate_size"),
        read.number("shared_expert_intermediate_size"),
    )


def _streams(read: _Reader) -> tuple[Indexer, Hyper, Ngram]:
    indexer = Indexer(
        read.number("indexer_n_heads"),
        read.number("indexer_kv_heads"),
        read.number("indexer_head_dim"),
        read.number("indexer_budget"),
        read.number("indexer_compress_ratio"),
    )
    ids = read.given("ple_layer_ids")
    layer_ids = tuple(sorted(set(ids))) if isinstance(ids, tuple) else ()
    beyond = [layer for layer in layer_ids if not 1 <= layer <= read.number("num_hidden_layers")]
    if beyond:
        read.findings.append(
            Finding(
                f"geometry.ple_layer_ids names layer {beyond[0]} of {read.geometry.num_hidden_layers}",
                "layers are counted from 1 to num_hidden_layers",
                "copy both from the checkpoint's config.json",
            )
        )
    ngram = Ngram(
        layer_ids,
        read.number("ple_embed_dim"),
        read.number("ple_conv_kernel_size"),
        read.number("ngram_size"),
        read.number("heads_per_ngram"),
        read.number("ngram_vocab_size_base"),
        read.number("make_ngram_vocab_size_divisible_by"),
    )
    # As Qwen4ExpNGramEmbedding checks it: at least bigrams, and a width that the hash heads share evenly.
    if ngram.size < 2 or ngram.embed % ngram.heads:
        read.findings.append(
            Finding(
                f"geometry.ple_embed_dim = {ngram.embed} is not shared evenly by (ngram_size - 1) x heads_per_ngram "
                f"= {ngram.heads} heads",
                "each head looks up a slice of the same width",
                "copy all three from the checkpoint's config.json",
            )
        )
    return indexer, Hyper(read.number("hc_count"), read.number("hc_lowrank")), ngram


def check_layout(shape: Shape, layout: Layout) -> None:
    """Refuse a layout that the engine could not split this model over.

    Raises:
        Refused: every quantity that does not divide.
    """
    tp, ranks = layout.tensor_parallel, layout.ranks
    attention = shape.attention
    findings: list[Finding] = []

    for over, count in (("tensor_parallel_size", tp), ("data_parallel_size", layout.data_parallel)):
        if count < 1:
            findings.append(
                Finding(f"{over} = {count} is not above zero", "each is a number of ranks", "give 1 or more")
            )
    raise_if_any(Refused, findings)

    def divides(name: str, value: int, ways: int, over: str) -> None:
        if value % ways:
            why = "the engine gives every rank an equal share"
            findings.append(Finding(f"{name} = {value} does not divide over {over} = {ways}", why, f"change {over}"))

    divides("num_attention_heads", attention.heads, tp, "tensor_parallel_size")
    # KV heads are split, or else replicated an equal number of times.
    kv = attention.kv_heads
    if kv % tp and tp % kv:
        divides("num_key_value_heads", kv, tp, "tensor_parallel_size")
    divides("padded vocab_size", shape.padded_vocab, tp, "tensor_parallel_size")
    if shape.linear is not None:
        divides("linear_num_key_heads", shape.linear.key_heads, tp, "tensor_parallel_size")
        divides("linear_num_value_heads", shape.linear.value_heads, tp, "tensor_parallel_size")
    if shape.mlp is not None:
        divides("intermediate_size", shape.mlp, tp, "tensor_parallel_size")
    if shape.experts is not None:
        if layout.expert_parallel:
            divides("num_experts", shape.experts.count, ranks, "tensor x data parallel ranks")
        else:
            divides("moe_intermediate_size", shape.experts.inner, ranks, "tensor x data parallel ranks")
        if layout.shared_expert_ways > 1:
            divides("shared_expert_intermediate_size", shape.experts.shared_inner, tp, "tensor_parallel_size")
    if layout.drafter:
        divides("hidden_size", shape.hidden, tp, "tensor_parallel_size")
        if not shape.drafter_layers:
            why = "the drafter is this model's own MTP layers, and it has none"
            findings.append(Finding("mtp_num_hidden_layers is missing", why, "draft by n-gram search, or not at all"))
    if layout.draft_model is not None:
        dspark.check(layout.draft_model, layout)
    if layout.speculative_tokens < 0 or (layout.drafter and not layout.speculative_tokens):
        what = f"num_speculative_tokens = {layout.speculative_tokens}"
        findings.append(Finding(what, "a drafter drafts at least one token", "give one or more, or leave it out"))
    raise_if_any(Refused, findings)
