"""flashlet as it is trained: its definition over batches of texts, differentiable, its weights named as in checkpoints.

B texts of T tokens, C residual streams of H features. What works on any leading dimensions is quixicore's own
reference; what a batch needs otherwise, the recurrence and the sparse attention, stands in `mixing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from harness.flashlet.batches import Batch, table
from harness.flashlet.mixing import Selected, attend, causal_conv, delta_rule
from harness.flashlet.shape import LINEAR
from quixicore.ops.drafter.reference import enter
from quixicore.ops.gated_delta.reference import gates
from quixicore.ops.gated_residual.reference import Mixer, combine, mix
from quixicore.ops.ngram.reference import gated_values
from quixicore.ops.norm.reference import gated_norm, gemma_norm
from slimserve.geometry.ngram import rows

Config = dict[str, Any]
LEAST_DECAY = 0.05
"""Recurrent layers are to forget at least so much a token (nats): 1/e within 20, so that recall is attention's work."""


@dataclass(frozen=True)
class Said:
    """What the model makes of a batch.

    Args:
        logits: [B, T, V] bfloat16, of the next token.
        residual: [B, T, C*H], before the last mixer: what the drafter reads.
        index_loss: how far the indexers are from what attention looks at, in nats.
        balance_loss: 1 where all experts get as much as each other, and more otherwise.
        decay_loss: how much recurrent layers remember longer than they are meant to.
    """

    logits: Tensor
    residual: Tensor
    index_loss: Tensor
    balance_loss: Tensor
    decay_loss: Tensor


class Weight(nn.Module):
    """A weight under its checkpoint's name; `linear` and norms apply it."""

    def __init__(self, *shape: int, spread: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * spread)

    def forward(self, x: Tensor) -> Tensor:
        """As a matrix."""
        return linear(x, self.weight)


def _matrix(out: int, into: int, gain: float = 1.0) -> Weight:
    return Weight(out, into, spread=gain / math.sqrt(into))


class Residual(nn.Module):
    """The mixer of a gated residual."""

    def __init__(self, config: Config, *, inject: bool = True) -> None:
        super().__init__()
        self.streams, wide = config["hc_count"], config["hc_count"] * config["hidden_size"]
        self.hc_norm = Weight(wide)
        self.input_mix_weight_down = _matrix(config["hc_lowrank"], wide)
        self.input_mix_weight_up = _matrix(wide, config["hc_lowrank"])
        self.block_inject_weight = _matrix(self.streams, wide) if inject else None

    def forward(self, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, T, C*H] to the layer's input and the logits of its injection."""
        inject = self.block_inject_weight
        mixer = Mixer(
            streams=self.streams,
            norm=self.hc_norm.weight,
            down=self.input_mix_weight_down.weight,
            up=self.input_mix_weight_up.weight,
            inject=None if inject is None else inject.weight,
        )
        return mix(residual, mixer, "fused")


class Delta(nn.Module):
    """A Gated DeltaNet layer."""

    def __init__(self, config: Config, gain: float) -> None:
        super().__init__()
        self.keys, self.values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.key_dim, self.value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        hidden, wide = config["hidden_size"], self.values * self.value_dim
        channels = 2 * self.keys * self.key_dim + wide
        self.activation = config["output_gate_type"]
        self.in_proj_qkv, self.in_proj_z = _matrix(channels, hidden), _matrix(wide, hidden)
        self.in_proj_a, self.in_proj_b = _matrix(self.values, hidden), _matrix(self.values, hidden)
        self.conv1d = Weight(channels, 1, config["linear_conv_kernel_dim"], spread=0.4)
        self.A_log = nn.Parameter(torch.linspace(0.5, 8, self.values).log())
        self.dt_bias = nn.Parameter(torch.full((self.values,), -2.0))
        self.norm, self.out_proj = Weight(self.value_dim), _matrix(hidden, wide, gain)
        nn.init.ones_(self.norm.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, H] to [B, T, H], and [B, T, HV] fp32 logarithms of the decays."""
        mixed = causal_conv(self.in_proj_qkv(x), self.conv1d.weight[:, 0])
        wide = self.keys * self.key_dim
        query, key, value = mixed.split([wide, wide, self.values * self.value_dim], -1)
        decay, strength = gates(self.in_proj_a(x), self.in_proj_b(x), self.A_log, self.dt_bias, "fused")
        heads = (
            query.unflatten(-1, (self.keys, self.key_dim)),
            key.unflatten(-1, (self.keys, self.key_dim)),
            value.unflatten(-1, (self.values, self.value_dim)),
        )
        said = delta_rule(*heads, decay, strength)
        gate = self.in_proj_z(x).unflatten(-1, (self.values, self.value_dim))
        normed = gated_norm(said, self.norm.weight, gate, activation=self.activation, rounding="fused")
        return self.out_proj(normed.flatten(-2)), decay


class Indexer(nn.Module):
    """Weights of a sparse layer's indexer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.dim = config["indexer_n_heads"], config["indexer_head_dim"]
        self.index_qk_proj = _matrix((self.heads + 1) * self.dim, config["hidden_size"])
        self.q_layernorm, self.k_layernorm = Weight(self.dim), Weight(self.dim)


class Sparse(nn.Module):
    """A sparse attention layer."""

    def __init__(self, config: Config, gain: float) -> None:
        super().__init__()
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim, hidden = config["head_dim"], config["hidden_size"]
        rope = config["rope_parameters"]
        self.dims, self.theta = round(self.dim * rope["partial_rotary_factor"]), rope["rope_theta"]
        self.ratio, self.budget = config["indexer_compress_ratio"], config["indexer_budget"]
        self.q_proj = _matrix(2 * self.heads * self.dim, hidden)
        self.k_proj, self.v_proj = (_matrix(self.kv_heads * self.dim, hidden) for _ in range(2))
        self.o_proj = _matrix(hidden, self.heads * self.dim, gain)
        self.q_norm, self.k_norm = Weight(self.dim), Weight(self.dim)
        self.indexer = Indexer(config)

    def forward(self, x: Tensor, weights: Tensor, sparse: bool, keys_of: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, T, H] to [B, T, H], and the indexer's loss.

        Args:
            x: of the queries.
            weights: [B, T], how much each query counts in that loss.
            sparse: attend to what the indexer selects; otherwise to everything before.
            keys_of: [B, T, H] the input that keys and values are made of, where it is another.
        """
        source = x if keys_of is None else keys_of
        query, gate = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.dim)).chunk(2, -1)
        key, value = (of(source).unflatten(-1, (self.kv_heads, self.dim)) for of in (self.k_proj, self.v_proj))
        query = self.rotate(gemma_norm(query, self.q_norm.weight))
        key = self.rotate(gemma_norm(key, self.k_norm.weight))
        # The indexer learns from what attention looks at, and from nothing else: the rest does not bend to it.
        index, own = self.indexer, (x.detach(), source.detach())
        split = index.heads * index.dim
        index_query = linear(own[0], index.index_qk_proj.weight[:split]).unflatten(-1, (index.heads, index.dim))
        raw = linear(own[1], index.index_qk_proj.weight[split:])
        whole = raw.shape[1] // self.ratio * self.ratio
        pooled = raw[:, :whole].float().unflatten(1, (-1, self.ratio)).mean(2).to(raw.dtype)
        index_key = self.rotate(gemma_norm(pooled, index.k_layernorm.weight)[:, :, None], self.ratio)[:, :, 0]
        index_query = self.rotate(gemma_norm(index_query, index.q_layernorm.weight))
        chosen = Selected(index_query, index_key, self.ratio, self.budget // self.ratio)
        said, loss = attend(query, key, value, chosen, weights, sparse)
        said = said * torch.sigmoid(gate.float()).to(said.dtype)
        return self.o_proj(said.flatten(-2)), loss

    def rotate(self, x: Tensor, stride: int = 1) -> Tensor:
        """Turns the first dimensions of [B, n, N, D] by positions 0, stride, 2 * stride ..."""
        half = self.dims // 2
        places = torch.arange(x.shape[1], device=x.device) * stride
        speeds = self.theta ** (-torch.arange(half, device=x.device) / half)
        angles = places[:, None, None] * speeds
        cosine, sine = angles.cos().to(x.dtype).float(), angles.sin().to(x.dtype).float()
        first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], -1)
        turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], -1)
        return turned.to(x.dtype)


class Routed(nn.Module):
    """Weights of all routed experts."""

    def __init__(self, count: int, hidden: int, inner: int, gain: float) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * inner, hidden) / math.sqrt(hidden))
        self.down_proj = nn.Parameter(torch.randn(count, hidden, inner) * gain / math.sqrt(inner))


class SharedExpert(nn.Module):
    """The expert of all tokens."""

    def __init__(self, hidden: int, inner: int, gain: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = _matrix(inner, hidden), _matrix(inner, hidden)
        self.down_proj = _matrix(hidden, inner, gain)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] to [B, T, H]."""
        made: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return made


class Experts(nn.Module):
    """Routed experts and a shared one; all are computed, and those that are not chosen count nothing."""

    def __init__(self, config: Config, gain: float) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
        self.count, self.taken = config["num_experts"], config["num_experts_per_tok"]
        self.gate = _matrix(self.count, hidden)
        self.experts = Routed(self.count, hidden, inner, gain)
        self.shared_expert = SharedExpert(hidden, config["shared_expert_intermediate_size"], gain)
        self.shared_expert_gate = _matrix(1, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, H] to [B, T, H], and how unevenly the experts are used."""
        shares = self.gate(x).float().softmax(-1)
        best, chosen = shares.topk(self.taken)
        weights = torch.zeros_like(shares).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        up = linear(x, self.experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (self.count, 2, -1))
        inner = silu(up[..., 0, :]) * up[..., 1, :] * weights.to(x.dtype)[..., None]
        routed = linear(inner.flatten(-2), self.experts.down_proj.transpose(0, 1).flatten(1))
        own = self.shared_expert(x)
        used = (weights > 0).float().mean((0, 1)) * shares.mean((0, 1))
        return routed + torch.sigmoid(self.shared_expert_gate(x)) * own, used.sum() * self.count / self.taken


class Table(nn.Module):
    """The rows that n-grams are hashed to."""

    def __init__(self, embed: int) -> None:
        super().__init__()
        self.ngram_embedding = Weight(rows(table()), embed // table().heads, spread=0.3)


class Ngrams(nn.Module):
    """The hashed n-gram embedding and its convolution."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.streams, hidden = config["hc_count"], config["hidden_size"]
        wide, embed, self.dilation = self.streams * hidden, config["ple_embed_dim"], config["ngram_size"]
        self.ple_embedding = Table(embed)
        self.key_proj, self.value_proj = _matrix(wide, embed), _matrix(hidden, embed)
        self.norm_key, self.norm_query, self.norm_conv = Weight(wide), Weight(wide), Weight(wide)
        self.conv1d = Weight(wide, 1, config["ple_conv_kernel_size"], spread=0.1)

    def forward(self, residual: Tensor, chosen: Tensor) -> Tensor:
        """What is added to [B, T, C*H], of rows [B, T, S]."""
        found = self.ple_embedding.ngram_embedding.weight[chosen].flatten(-2).to(residual.dtype)
        keys, values = self.key_proj(found), self.value_proj(found)
        gated = gated_values(residual, keys, values, self.norm_query.weight, self.norm_key.weight)
        normed = gemma_norm(gated, self.norm_conv.weight, groups=self.streams)
        return gated + causal_conv(normed, self.conv1d.weight[:, 0], self.dilation)


class Layer(nn.Module):
    """A layer of either kind, with n-grams or without."""

    def __init__(self, config: Config, *, sparse: bool, ngrams: bool, gain: float) -> None:
        super().__init__()
        self.attn_hyper_connection, self.mlp_hyper_connection = Residual(config), Residual(config)
        self.linear_attn = None if sparse else Delta(config, gain)
        self.self_attn = Sparse(config, gain) if sparse else None
        self.mlp = Experts(config, gain)
        self.ple = Ngrams(config) if ngrams else None

    def forward(
        self, residual: Tensor, chosen: Tensor, weights: Tensor, sparse: bool, keys_of: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The residual after it, the losses of indexer, balance and decay, and the input that keys were made of."""
        if self.ple is not None:
            residual = residual + self.ple(residual, chosen)
        x, injection = self.attn_hyper_connection(residual)
        nothing = x.new_zeros((), dtype=torch.float32)
        index_loss, decay_loss = nothing, nothing
        if self.self_attn is not None:
            said, index_loss = self.self_attn(x, weights, sparse, keys_of)
        elif self.linear_attn is not None:
            said, decay = self.linear_attn(x)
            decay_loss = (decay + LEAST_DECAY).relu().mean()
        residual = combine(residual, said, injection, "fused")
        inner, injection = self.mlp_hyper_connection(residual)
        made, balance = self.mlp(inner)
        return combine(residual, made, injection, "fused"), index_loss, balance, decay_loss, x


class Drafter(nn.Module):
    """The MTP head: a sparse layer that reads the token after each position."""

    def __init__(self, config: Config, gain: float) -> None:
        super().__init__()
        hidden, wide = config["hidden_size"], config["hc_count"] * config["hidden_size"]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Weight(hidden), Weight(wide)
        self.fc_embedding, self.fc_hidden = _matrix(hidden, hidden), _matrix(hidden, hidden)
        self.layers = nn.ModuleList([Layer(config, sparse=True, ngrams=False, gain=gain)])
        self.hyper_connection_mixer = Residual(config, inject=False)

    def forward(
        self, embedded: Tensor, residual: Tensor, weights: Tensor, sparse: bool, keys_of: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What goes to the head, the residual after it, the losses of indexer and balance, and the keys' input."""
        entered = enter(
            embedded,
            residual,
            self.pre_fc_norm_embedding.weight,
            self.pre_fc_norm_hidden.weight,
            self.fc_embedding.weight,
            self.fc_hidden.weight,
        )
        after, index_loss, balance, _, keys_of = self.layers[0](entered, entered, weights, sparse, keys_of)
        return self.hyper_connection_mixer(after)[0], after, index_loss, balance, keys_of


class Backbone(nn.Module):
    """The model without head and drafter."""

    def __init__(self, config: Config, gain: float) -> None:
        super().__init__()
        self.embed_tokens = Weight(config["vocab_size"], config["hidden_size"], spread=1.0)
        self.layers = nn.ModuleList(
            Layer(config, sparse=kind != LINEAR, ngrams=place + 1 in config["ple_layer_ids"], gain=gain)
            for place, kind in enumerate(config["layer_types"])
        )
        self.hyper_connection_mixer = Residual(config, inject=False)


class Flashlet(nn.Module):
    """The model with its drafter."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.streams = config["hc_count"]
        gain = 1 / math.sqrt(2 * len(config["layer_types"]))
        self.model = Backbone(config, gain)
        self.lm_head = _matrix(config["vocab_size"], config["hidden_size"])
        self.mtp = Drafter(config, gain)

    def embed(self, tokens: Tensor, kind: torch.dtype) -> Tensor:
        """[B, T] to [B, T, H]."""
        return self.model.embed_tokens.weight[tokens].to(kind)

    def forward(self, batch: Batch, *, sparse: bool, kind: torch.dtype = torch.bfloat16) -> Said:
        """The model without its drafter."""
        residual = self.embed(batch.tokens, kind).repeat(1, 1, self.streams)
        losses, worth = [], batch.worth(1)
        for layer in self.model.layers:
            residual, *loss, _ = layer(residual, batch.rows, worth, sparse)
            losses.append(torch.stack(loss))
        logits = self.lm_head(self.model.hyper_connection_mixer(residual)[0])
        return Said(logits, residual, *torch.stack(losses).sum(0).unbind())

    @torch.no_grad()
    def begin_drafter(self) -> None:
        """Let the drafter begin as the last sparse layer, which knows already how to find what came before."""
        last = next(layer for layer in reversed(self.model.layers) if layer.self_attn is not None)
        for own, other in (
            (self.mtp.layers[0], last),
            (self.mtp.hyper_connection_mixer, self.model.hyper_connection_mixer),
        ):
            own.load_state_dict(other.state_dict())
        for matrix in (self.mtp.fc_embedding, self.mtp.fc_hidden):
            matrix.weight.copy_(torch.eye(len(matrix.weight)))
        for norm in (self.mtp.pre_fc_norm_embedding, self.mtp.pre_fc_norm_hidden):
            norm.weight.zero_()

    def draft(self, batch: Batch, residual: Tensor, *, sparse: bool, steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """What the drafter foretells in so many steps, each reading the residual of the one before.

        Keys are those of the first step: later ones are the target's by then, all but the last few.

        Returns:
            A step each: [B, T, V] logits of the token after the next; and the losses of indexer and balance.
        """
        following = torch.cat([batch.tokens[:, 1:], batch.tokens[:, -1:]], 1)
        embedded = self.embed(following, residual.dtype)
        found, keys_of, worth = [], None, batch.worth(2)
        for _ in range(steps):
            said, after, index_loss, balance, made = self.mtp(embedded, residual, worth, sparse, keys_of)
            found.append((linear(said, self.lm_head.weight.detach()), index_loss, balance))
            keys_of = made if keys_of is None else keys_of
            # The next step stands one further, and reads what this one made of the place before.
            residual = torch.cat([after[:, :1], after[:, :-1]], 1)
        return found
