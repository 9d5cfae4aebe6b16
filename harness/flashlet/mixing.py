"""What mixes tokens, over batches and differentiable: convolution, delta rule, attention to what an indexer selects.

Same results as quixicore's references, which say what the arguments mean (`gated_delta`, `qsa`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from quixicore.ops.gated_delta.reference import NORM_EPS

CHUNK = 64
_SMALL = 8


def causal_conv(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """A depthwise convolution with what came before, then SiLU: [B, T, D] with [D, W], the newest token last."""
    width, length = weight.shape[-1], x.shape[1]
    seen = pad(x, (0, 0, (width - 1) * dilation, 0))
    taps = [weight[:, tap] * seen[:, tap * dilation : tap * dilation + length].float() for tap in range(width)]
    return silu(sum(taps[1:], start=taps[0])).to(x.dtype)


@torch.autocast("cuda", enabled=False)
def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
    """The gated delta rule from an empty state.

    Args:
        query, key: [B, T, HK, K], not normalised yet.
        value: [B, T, HV, V].
        decay, strength: [B, T, HV] fp32.

    Returns:
        [B, T, HV, V], of the type of `value`.
    """
    length, groups = value.shape[1], value.shape[2] // query.shape[2]
    unit = [x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + NORM_EPS) for x in (query, key)]
    q, k = (x.repeat_interleave(groups, 2) for x in unit)
    q = q * query.shape[-1] ** -0.5
    behind = -length % CHUNK
    # [B, HV, N, C, .]: N chunks of C tokens; what is filled up neither decays nor writes.
    q, k, v, g, beta = (
        pad(x.float(), (0, 0, 0, 0, 0, behind)).unflatten(1, (-1, CHUNK)).movedim(3, 1)
        for x in (q, k, value, decay[..., None], strength[..., None])
    )
    total = g[..., 0].cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    written = (beta * (k @ k.mT) * between).tril(-1)
    right = torch.cat([beta * v, beta * total[..., None].exp() * k], -1)
    own, carried = (_inverse(written) @ right).split([v.shape[-1], k.shape[-1]], -1)
    left = ((total[..., -1:] - total)[..., None].exp() * k).mT
    keep = torch.eye(k.shape[-1], device=k.device) * total[..., -1, None, None].exp() - left @ carried
    memory = _states(keep, left @ own)
    said = total[..., None].exp() * (q @ memory) + ((q @ k.mT) * between) @ (own - carried @ memory)
    return said.movedim(1, 3).flatten(1, 2)[:, :length].to(value.dtype)


def _inverse(lower: Tensor) -> Tensor:
    """The inverse of 1 + a strictly lower matrix, by blocks that double in size: [..., C, C]."""
    size = lower.shape[-1]
    inside = torch.block_diag(*[torch.ones(_SMALL, _SMALL, device=lower.device)] * (size // _SMALL))
    small, one = lower * inside, torch.eye(size, device=lower.device)
    square = small @ small
    done = (one - small) @ (one + square) @ (one + square @ square)  # the eighth power is zero
    width = _SMALL
    while width < size:
        wider = torch.block_diag(*[torch.ones(2 * width, 2 * width, device=lower.device)] * (size // (2 * width)))
        # 1 + both blocks + what joins them: the inverse has minus (one block's, what joins, the other's) in its place.
        done = done - done @ (lower * (wider - inside)) @ done
        inside, width = wider, 2 * width
    return done


def _states(keep: Tensor, add: Tensor) -> Tensor:
    """State before each chunk where each makes keep @ state + add of it: [B, HV, N, K, .], in log(N) rounds."""
    keep, add = (pad(x[:, :, :-1], (0, 0, 0, 0, 1, 0)) for x in (keep, add))
    reach, chunks = 1, add.shape[2]
    while reach < chunks:
        before = keep[:, :, reach:]
        joined = add[:, :, reach:] + before @ add[:, :, :-reach]
        if 2 * reach < chunks:
            keep = torch.cat([keep[:, :, :reach], before @ keep[:, :, :-reach]], 2)
        add = torch.cat([add[:, :, :reach], joined], 2)
        reach *= 2
    return add


@dataclass(frozen=True)
class Selected:
    """What an indexer goes by.

    Args:
        queries: [B, T, IN, ID]; keys: [B, N, ID], of the complete blocks.
        ratio: tokens of a block.
        most: blocks to select.
    """

    queries: Tensor
    keys: Tensor
    ratio: int
    most: int

    def scores(self) -> Tensor:
        """[B, T, N] fp32; minus infinity where a block is not complete yet."""
        heads = (torch.einsum("btd,bnd->btn", one, self.keys).float().relu() for one in self.queries.unbind(2))
        places = torch.arange(self.queries.shape[1], device=self.keys.device)
        blocks = torch.arange(self.keys.shape[1], device=self.keys.device)
        hidden = blocks >= ((places + 1) // self.ratio)[:, None]
        return (sum(heads) * self.queries.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)


def attend(
    query: Tensor, key: Tensor, value: Tensor, selected: Selected, weights: Tensor, sparse: bool
) -> tuple[Tensor, Tensor]:
    """Grouped attention to what is before, all of it or what is selected, and how well the selection foresees it.

    Args:
        query: [B, T, HQ, D]; key, value: [B, T, HK, D].
        selected: of the indexer, with gradients of its own.
        weights: [B, T], how much each query counts in the loss.
        sparse: attend to what is selected alone.

    Returns:
        [B, T, HQ, D]; and how far the indexer's scores are from where dense attention looks, by block, in nats.
    """
    length, groups = query.shape[1], query.shape[2] // key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)))
    products = (q @ k.mT).float() * query.shape[-1] ** -0.5
    places = torch.arange(length, device=query.device)
    later = places > places[:, None]
    shares = products.masked_fill(later, -torch.inf).softmax(-1)
    scores = selected.scores()
    loss = _foresight(shares.detach(), scores, selected.ratio, weights)
    if sparse and scores.shape[-1] > selected.most:
        least = scores.detach().topk(selected.most).values[..., -1:]
        blocks = (scores.detach() >= least).repeat_interleave(selected.ratio, -1)
        blocks = pad(blocks, (0, length - blocks.shape[-1]))
        tail = places >= ((places + 1) // selected.ratio * selected.ratio)[:, None]
        seen = (blocks | tail) & ~later
        shares = products.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return (shares.to(v.dtype) @ v).transpose(1, 2), loss


def _foresight(shares: Tensor, scores: Tensor, ratio: int, weights: Tensor) -> Tensor:
    """How far the softmax of scores, [B, T, N], is from the blocks' shares of [B, HQ, T, T], in nats."""
    length, hidden = scores.shape[-1] * ratio, scores == -torch.inf
    target = shares[..., :length].mean(1).unflatten(-1, (-1, ratio)).sum(-1).masked_fill(hidden, 0)
    known = target.sum(-1)
    target = target / known.clamp_min(1e-6)[..., None]
    said = scores.masked_fill(hidden, -1e4).log_softmax(-1)
    apart = (target * (target.clamp_min(1e-9).log() - said)).sum(-1)
    counted = weights * (known > 0.05)  # where next to nothing lies in complete blocks, there is nothing to foresee
    return (apart * counted).sum() / counted.sum().clamp_min(1e-6)
