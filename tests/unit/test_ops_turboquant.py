"""TurboQuant's bytes, the rows of n-gram tables in each of their types, and what the drafter reads."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quixicore.ops.drafter import reference as drafter
from quixicore.ops.ngram import reference as ngram
from quixicore.ops.norm.reference import gemma_norm
from quixicore.ops.turboquant import reference as turboquant
from quixicore.ops.turboquant.reference import FORMATS


@pytest.mark.parametrize(
    ("name", "dims", "size"),
    [("turboquant_k8v4", 256, 388), ("turboquant_4bit_nc", 256, 262), ("turboquant_3bit_nc", 64, 54)],
)
def test_a_slot_has_the_bytes_that_are_published(name: str, dims: int, size: int) -> None:
    """Semantics J.1; the last: 24 + 2 + 24 + 4."""
    form = FORMATS[name]
    assert form.slot_bytes(dims) == size
    assert turboquant.encode(torch.randn(3, dims), torch.randn(3, dims), form).shape == (3, size)


@given(st.sampled_from([3, 4]), st.lists(st.integers(0, 7), min_size=8, max_size=8))
def test_codes_lie_side_by_side_the_first_in_the_lowest_bits(bits: int, codes: list[int]) -> None:
    packed = turboquant.pack(torch.tensor(codes), bits)
    number = sum(code << (bits * place) for place, code in enumerate(codes))
    assert bytes(packed.tolist()) == number.to_bytes(bits, "little")
    assert turboquant.unpack(packed, bits, 8).tolist() == codes


def test_where_each_part_of_a_slot_lies() -> None:
    key, value = torch.randn(64), torch.linspace(-1, 2, 64)
    slot = bytes(turboquant.encode(key, value, FORMATS["turboquant_4bit_nc"]).tolist())
    (length,) = struct.unpack("<e", slot[32:34])
    assert length == pytest.approx(float(key.norm()), rel=1e-3)
    step, low = struct.unpack("<ee", slot[66:70])
    assert (step, low) == (pytest.approx(3 / 15, rel=1e-3), -1)
    assert (slot[34] & 15, slot[65] >> 4) == (0, 15)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_is_near_what_was_kept(name: str) -> None:
    torch.manual_seed(1)
    form = FORMATS[name]
    keys, values = torch.randn(200, 128) * 3, torch.randn(200, 128)
    read_keys, read_values = turboquant.decode(turboquant.encode(keys, values, form), 128, form)
    # The share of a normal number's variance that the best 2^bits levels miss (Max, 1960): 0.0345 and 0.0095.
    most = {8: 0.002, 4: 0.0095, 3: 0.0345}[form.key_bits]
    assert ((read_keys - keys).square().mean() / keys.square().mean()) < 1.15 * most
    step = (values.amax(-1) - values.amin(-1)) / ((1 << form.value_bits) - 1)
    assert ((read_values - values).abs() <= step[:, None] * 0.51 + 2e-3).all()
    if form.corrected:
        assert torch.allclose(read_keys.norm(dim=-1), keys.norm(dim=-1), rtol=2e-3)


def test_a_rotation_is_one() -> None:
    matrix = turboquant.rotation(64)
    assert torch.allclose(matrix @ matrix.T, torch.eye(64), atol=1e-5)
    assert torch.equal(matrix, matrix.T)


def test_rows_of_each_type_of_table() -> None:
    found = torch.tensor([[0, 2], [3, 1]])
    plain = torch.randn(4, 32).bfloat16()
    assert torch.equal(ngram.rows(plain, found), torch.cat([plain[[0, 3]], plain[[2, 1]]], -1))
    eight, scale = torch.randn(4, 32).to(torch.float8_e4m3fn), torch.tensor(0.0123)
    read = ngram.rows(eight, found, scale=scale)
    assert torch.equal(read[0, :32], eight[0].bfloat16() * scale.bfloat16())
    codes = torch.randint(0, 256, (4, 16), dtype=torch.uint8)
    scales = torch.tensor([[1.0, 2.0], [0.5, 1.0], [4.0, 1.0], [1.0, 1.0]]).to(torch.float8_e4m3fn)
    read = ngram.rows(codes, found, scales, torch.tensor(0.5))
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for place in range(32):
        code = int(codes[2, place // 2]) >> (4 * (place % 2)) & 15
        sign = -1 if code & 8 else 1
        assert float(read[0, 32 + place]) == sign * values[code & 7] * float(scales[2, place // 16]) * 0.5


def test_the_drafter_reads_the_next_token_and_every_stream() -> None:
    torch.manual_seed(2)
    hidden, streams = 16, 4
    embedded, residual = torch.randn(3, hidden).bfloat16(), torch.randn(3, streams * hidden).bfloat16()
    norms = torch.randn(hidden) * 0.1, torch.randn(streams * hidden) * 0.1
    weights = torch.randn(hidden, hidden).bfloat16(), torch.randn(hidden, hidden).bfloat16()
    entered = drafter.enter(embedded, residual, *norms, *weights)
    token = gemma_norm(embedded, norms[0]) @ weights[0].T
    normed = gemma_norm(residual, norms[1])  # over all streams together
    for stream in range(streams):
        part = slice(stream * hidden, (stream + 1) * hidden)
        expected = (normed[:, part] @ weights[1].T).float() + token.float()
        assert torch.equal(entered[:, part], expected.bfloat16())
    assert drafter.shifted(torch.tensor([5, 6, 7]), torch.tensor(8)).tolist() == [6, 7, 8]
