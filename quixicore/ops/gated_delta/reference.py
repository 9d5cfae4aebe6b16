"""Gated DeltaNet: a recurrent state of K x V values a head that forgets, predicts, and is corrected token by token.

T tokens, HK key heads, HV value heads (each key head serves HV / HK of them), K and V dimensions of a head, D channels
of the convolution. States are [HV, K, V] here; the engine keeps them transposed.

Source: transformers, models/qwen4_exp/modeling_qwen4_exp.py, Qwen4ExpTextGatedDeltaNet and the two functions named
torch_..._gated_delta_rule; vllm 0.32, third_party/flash_linear_attention/ops.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from quixicore.ops import Rounding

NORM_EPS = 1e-6
"""of the norm of queries and keys, under the root"""


def conv(inputs: Tensor, weight: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution over time, then SiLU, on queries, keys and values alike.

    Args:
        inputs: [T, D], before the convolution.
        weight: [D, W], the newest token last.
        state: [W-1, D], the inputs before these, oldest first; None: there were none, which is zeros.

    Returns:
        [T, D] of the type of `inputs`, summed in fp32; and [W-1, D], the state after them.
    """
    tokens, width = len(inputs), weight.shape[-1]
    before = inputs.new_zeros(width - 1, inputs.shape[-1]) if state is None else state.to(inputs.dtype)
    seen = torch.cat([before, inputs])
    taps = [weight[:, place].float() * seen[place : place + tokens].float() for place in range(width)]
    return silu(torch.stack(taps).sum(0)).to(inputs.dtype), seen[tokens:]


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """How much of the state stays, and how much of the error is corrected.

    Args:
        a, b: [T, HV], projections of the token.
        a_log, dt_bias: [HV].
        rounding: `hf` rounds the second to the type of `b`.

    Returns:
        [T, HV] fp32 logarithms of the decay, at most 0; and [T, HV] strengths between 0 and 1, fp32.
    """
    decay = -a_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay, torch.sigmoid(b).float() if rounding == "hf" else torch.sigmoid(b.float())


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence, a token at a time.

    Args:
        query, key: [T, HK, K], not normalised yet.
        value: [T, HV, V].
        decay, strength: [T, HV] fp32, of `gates`.
        state: [HV, K, V] fp32; None is zeros.

    Returns:
        [T, HV, V] of the type of `value`; and [HV, K, V] fp32, the state after the last token.
    """
    memory = _start(query, value, state)
    outputs = torch.zeros_like(value)
    for token in range(len(value)):
        at = slice(token, token + 1)
        outputs[at], memory = step(query[at], key[at], value[at], decay[at], strength[at], memory[None])
        memory = memory[0]
    return outputs, memory


def step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of R sequences.

    Args:
        query, key: [R, HK, K], not normalised yet.
        value: [R, HV, V].
        decay, strength: [R, HV] fp32, of `gates`.
        states: [R, HV, K, V] fp32.

    Returns:
        [R, HV, V] of the type of `value`; and the states after it.
    """
    said, after = steps(query[:, None], key[:, None], value[:, None], decay[:, None], strength[:, None], states)
    return said[:, 0], after[:, 0]


def steps(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """N tokens of each of R sequences, and the state after each of them.

    Args:
        query, key: [R, N, HK, K], not normalised yet.
        value: [R, N, HV, V].
        decay, strength: [R, N, HV] fp32, of `gates`; a token with zeros leaves the state as it is.
        states: [R, HV, K, V] fp32.

    Returns:
        [R, N, HV, V] of the type of `value`; and [R, N, HV, K, V] fp32.
    """
    rows, tokens = value.shape[:2]
    flat = _heads(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1))
    queries, keys, values = (x.reshape(rows, tokens, *x.shape[1:]) for x in flat)
    queries, left, keys = queries[..., None, :], decay.exp()[..., None, None], keys[..., None]
    weighted, said, after = strength[..., None, None] * keys, [], []
    for place in range(tokens):
        states = states * left[:, place]
        error = values[:, place, :, None] - keys[:, place].mT @ states
        states = states + weighted[:, place] * error
        said.append((queries[:, place] @ states).squeeze(-2))
        after.append(states)
    return torch.stack(said, 1).to(value.dtype), torch.stack(after, 1)


def chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    state: Tensor | None = None,
    *,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """The same, with the tokens of a chunk at once: what they write depends on each other by a triangular system.

    Args:
        query, key, value, decay, strength, state: as for `recurrent`.
        chunk: tokens of a chunk; the last may be shorter.

    Returns:
        As `recurrent`.
    """
    queries, keys, values = (x.transpose(0, 1) for x in _heads(query, key, value))
    memory = _start(query, value, state)
    outputs = torch.zeros_like(values)
    for first in range(0, len(value), chunk):
        part = slice(first, min(first + chunk, len(value)))
        q, k, v, beta = queries[:, part], keys[:, part], values[:, part], strength[part].T[..., None]
        total = decay[part].T.cumsum(-1)  # [HV, C]
        # From token j to token i; above the diagonal lies the future, whose factor would overflow.
        between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        written = (beta * (k @ k.mT) * between).tril(-1)
        system = torch.eye(k.shape[1]) + written
        right = torch.cat([beta * v, beta * total[..., None].exp() * k], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        own, carried = solved.split([v.shape[-1], k.shape[-1]], -1)
        error = own - carried @ memory
        outputs[:, part] = total[..., None].exp() * (q @ memory) + ((q @ k.mT) * between) @ error
        left = (total[:, -1:] - total)[..., None].exp()
        memory = total[:, -1].exp()[:, None, None] * memory + (left * k).mT @ error
    return outputs.transpose(0, 1).to(value.dtype), memory


def _heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of length one, a head of each for every value head; queries divided by the root of K."""
    groups = value.shape[1] // query.shape[1]
    unit = [
        x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + NORM_EPS) for x in (query, key)
    ]  # fmt: skip
    queries, keys = (x.repeat_interleave(groups, 1) for x in unit)
    return queries * query.shape[-1] ** -0.5, keys, value.float()


def _start(query: Tensor, value: Tensor, state: Tensor | None) -> Tensor:
    shape = (value.shape[1], query.shape[-1], value.shape[-1])
    return value.new_zeros(shape, dtype=torch.float32) if state is None else state.float()


def window_after(inputs: Tensor, state: Tensor, accepted: int) -> Tensor:
    """The convolution's state when only the first `accepted` of `inputs` count: drafts behind them were refused.

    Args:
        inputs: [T, D].
        state: [W-1, D], before them.
        accepted: of 0 to T.

    Returns:
        [W-1, D].
    """
    return torch.cat([state.to(inputs.dtype), inputs[:accepted]])[accepted:]
