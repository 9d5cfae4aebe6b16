"""TurboQuant: keys are rotated and kept as the nearest of a few values each, values as levels between their extremes.

A slot holds one key and one value of D dimensions of one head: the key's codes, its length in fp16, the value's codes,
the size of a level and the lowest in fp16, and a byte to make the number of bytes even. Keys of eight bits are
float8_e4m3fn as they are, without a length. Codes lie side by side, the first in the lowest bits.

Source: vllm 0.32, model_executor/layers/quantization/turboquant/{config,centroids}.py and
v1/attention/ops/triton_turboquant_{store,decode}.py. Other formats of this name are not the same bytes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_SPAN = 3.5  # standard deviations between which centroids begin
_EDGE = 3  # spans beyond which nothing lies
_STEPS = 200
_SETTLED = 1e-10


@dataclass(frozen=True)
class Format:
    """One of the engine's cache types.

    Args:
        key_bits: 3 or 4; 8 is float8_e4m3fn.
        value_bits: 3 or 4.
        corrected: keys are read with the length that they had, not with that of their centroids.
    """

    key_bits: int
    value_bits: int
    corrected: bool

    def key_bytes(self, dims: int) -> int:
        """Of a key of `dims` dimensions, its length included."""
        return dims if self.key_bits == 8 else _packed(dims, self.key_bits) + 2

    def slot_bytes(self, dims: int) -> int:
        """Of a key and a value."""
        size = self.key_bytes(dims) + _packed(dims, self.value_bits) + 4
        return size + size % 2


FORMATS = {
    "turboquant_k8v4": Format(8, 4, corrected=False),
    "turboquant_4bit_nc": Format(4, 4, corrected=True),
    "turboquant_k3v4_nc": Format(3, 4, corrected=True),
    "turboquant_3bit_nc": Format(3, 3, corrected=True),
}


@cache
def centroids(dims: int, bits: int) -> Tensor:
    """The best 2^bits values for a coordinate of a rotated unit vector, which is nearly normal, by Lloyd and Max.

    Args:
        dims: of the vector; its coordinates vary by 1 / dims.
        bits: of a code.

    Returns:
        [2^bits] fp32, rising.
    """
    deviation = 1 / math.sqrt(dims)
    lowest, count = -_SPAN * deviation, 1 << bits
    found = [lowest + 2 * _SPAN * deviation * (number + 0.5) / count for number in range(count)]
    for _ in range(_STEPS):
        edges = [_EDGE * lowest, *((a + b) / 2 for a, b in itertools.pairwise(found)), -_EDGE * lowest]
        before, found = found, [_mean(low, high, deviation) for low, high in itertools.pairwise(edges)]
        if max(abs(a - b) for a, b in zip(found, before, strict=True)) < _SETTLED:
            found = before  # the engine keeps those from which it found that nothing moves
            break
    return torch.tensor(found, dtype=torch.float32)


def rotation(dims: int) -> Tensor:
    """The orthonormal Hadamard matrix of Sylvester's order: [dims, dims] fp32; dims is a power of 2."""
    matrix = torch.ones(1, 1)
    while len(matrix) < dims:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(dims)


def encode(keys: Tensor, values: Tensor, form: Format) -> Tensor:
    """Slots of keys and values.

    Args:
        keys, values: [..., D].
        form: of the cache.

    Returns:
        [..., slot bytes] uint8.
    """
    dims = keys.shape[-1]
    if form.key_bits == 8:
        key = keys.float().to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        wide = keys.float()
        length = wide.norm(dim=-1, keepdim=True)
        turned = wide / (length + 1e-8) @ rotation(dims)
        levels = centroids(dims, form.key_bits)
        codes = torch.bucketize(turned, (levels[1:] + levels[:-1]) / 2, right=True)  # on a boundary the upper one
        key = torch.cat([pack(codes, form.key_bits), _half(length)], -1)
    wide = values.float()
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    step = ((high - low) / ((1 << form.value_bits) - 1)).clamp_min(1e-8)
    codes = ((wide - low) / step + 0.5).to(torch.int64).clamp(0, (1 << form.value_bits) - 1)
    slot = torch.cat([key, pack(codes, form.value_bits), _half(step), _half(low)], -1)
    return torch.nn.functional.pad(slot, (0, form.slot_bytes(dims) - slot.shape[-1]))


def decode(slots: Tensor, dims: int, form: Format) -> tuple[Tensor, Tensor]:
    """Keys and values of slots, the keys turned back.

    Args:
        slots: [..., slot bytes] uint8.
        dims: D.
        form: of the cache.

    Returns:
        [..., D] fp32 twice.
    """
    reach = form.key_bytes(dims)
    if form.key_bits == 8:
        keys = slots[..., :dims].contiguous().view(torch.float8_e4m3fn).float()
    else:
        near = centroids(dims, form.key_bits)[unpack(slots[..., : reach - 2], form.key_bits, dims)]
        if form.corrected:
            near = near / (near.square().sum(-1, keepdim=True) + 1e-16).sqrt()
        keys = _whole(slots[..., reach - 2 : reach]) * near @ rotation(dims).T
    end = reach + _packed(dims, form.value_bits)
    step, low = _whole(slots[..., end : end + 2]), _whole(slots[..., end + 2 : end + 4])
    return keys, unpack(slots[..., reach:end], form.value_bits, dims) * step + low


def pack(codes: Tensor, bits: int) -> Tensor:
    """[..., D] codes of some bits to [..., D * bits / 8] uint8, the first in the lowest bits."""
    flags = (codes[..., None] >> torch.arange(bits)) & 1
    flags = flags.flatten(-2).reshape(*codes.shape[:-1], -1, 8)
    return (flags << torch.arange(8)).sum(-1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, dims: int) -> Tensor:
    """[..., D * bits / 8] uint8 to [..., D] int64 codes."""
    flags = (packed.long()[..., None] >> torch.arange(8)) & 1
    flags = flags.flatten(-2).reshape(*packed.shape[:-1], dims, bits)
    return (flags << torch.arange(bits)).sum(-1)


def _packed(dims: int, bits: int) -> int:
    return -(-dims * bits // 8)


def _half(values: Tensor) -> Tensor:
    return values.to(torch.float16).contiguous().view(torch.uint8)


def _whole(halves: Tensor) -> Tensor:
    return halves.contiguous().view(torch.float16).float()


def _mean(low: float, high: float, deviation: float, steps: int = 200) -> float:
    """The mean of a normal number that lies between two others, by the trapezium rule."""

    def density(x: float) -> float:
        return math.exp(-x * x / (2 * deviation**2)) / math.sqrt(2 * math.pi * deviation**2)

    width = (high - low) / steps
    points = [low + number * width for number in range(steps + 1)]
    weights = [0.5, *[1.0] * (steps - 1), 0.5]
    mass = sum(w * density(x) for w, x in zip(weights, points, strict=True)) * width
    moment = sum(w * x * density(x) for w, x in zip(weights, points, strict=True)) * width
    return moment / mass
