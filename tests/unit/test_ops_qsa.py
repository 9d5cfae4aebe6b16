"""The reference of sparse attention: its order, its edges, and against transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quixicore.ops.norm.reference import gemma_norm
from quixicore.ops.qsa import reference as qsa
from slimserve.engine import torchvision_cpu

RATIO, DIMS, THETA = 4, 8, 1e4


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


# Selection and expansion


@pytest.mark.parametrize(
    ("scored", "seen", "chosen"),
    [
        ([0.0, 3.0, 1.0, 2.0], 4, [1, 3]),
        ([1.0, 1.0, 1.0, 1.0], 4, [0, 1]),  # of equal ones the lower
        ([0.0, -0.0, 0.0, 5.0], 4, [0, 3]),  # -0 is 0
        ([0.0, 0.0, 0.0, 5.0], 3, [0, 1]),  # what is not visible is not chosen
        ([7.0, 1.0, 1.0, 5.0], 1, [0, -1]),
        ([7.0, 1.0, 1.0, 5.0], 0, [-1, -1]),
    ],
)
def test_blocks_are_chosen_by_one_order(scored: list[float], seen: int, chosen: list[int]) -> None:
    assert qsa.select(torch.tensor([scored]), torch.tensor([seen]), 2)[0].tolist() == chosen


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 6))
@settings(max_examples=80, deadline=None)
def test_the_order_is_total(levels: list[int], most: int) -> None:
    found = qsa.select(torch.tensor([levels], dtype=torch.float32), torch.tensor([len(levels)]), most)[0].tolist()
    best = sorted(sorted(range(len(levels)), key=lambda block: (-levels[block], block))[:most])
    assert found == best + [-1] * (most - len(best))


@pytest.mark.parametrize(
    ("position", "blocks", "tokens"),
    [
        (0, [-1, -1], [0]),
        (2, [-1, -1], [0, 1, 2]),
        (3, [0, -1], [0, 1, 2, 3]),  # complete with the query's own token: no tail
        (9, [0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (14, [0, 2], [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14]),
    ],
)
def test_blocks_become_tokens_and_a_tail(position: int, blocks: list[int], tokens: list[int]) -> None:
    row = qsa.expand(torch.tensor([blocks]), torch.tensor([position]), RATIO)[0].tolist()
    assert row == tokens + [-1] * (11 - len(tokens))


def test_a_query_whose_block_has_just_been_completed_competes_for_itself() -> None:
    """Semantics A.2: its own token is then in no tail."""
    scored, position = torch.tensor([[9.0, 8.0, 0.0]]), torch.tensor([11])
    seen = qsa.visible(position, 12, RATIO)
    assert seen.tolist() == [3]
    row = qsa.expand(qsa.select(scored, seen, 2), position, RATIO)[0].tolist()
    assert row == [0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1]


@pytest.mark.parametrize("position", [0, 3, 2047, 2050, 2051, 2060])
def test_up_to_2051_tokens_everything_is_read(position: int) -> None:
    """Semantics A.2: 512 blocks and a tail of three are dense attention; one token more is not."""
    place = torch.tensor([position])
    seen = qsa.visible(place, position + 1, RATIO)
    row = qsa.expand(qsa.select(torch.rand(1, 600), seen, 512), place, RATIO)[0]
    assert row.shape == (2051,)
    held = set(row[row >= 0].tolist())
    assert held <= set(range(position + 1))
    assert (held == set(range(position + 1))) == (position <= 2050)


def test_a_later_draft_reads_what_was_chosen_and_what_was_drafted() -> None:
    chosen = torch.tensor([[0, 1, 2, 3, 8], [4, 5, 6, 7, -1]])
    found = qsa.reused(chosen, torch.tensor([9, 8]), torch.tensor([10, 8]), 2)
    assert found.tolist() == [[0, 1, 2, 3, 8, 9, 10, -1], [4, 5, 6, 7, -1, 8, -1, -1]]
    assert torch.equal(qsa.reused(chosen, torch.tensor([9, 8]), torch.tensor([10, 8]), -1), chosen)


# The ring


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_steps_of_any_length_make_the_same_keys(lengths: list[int]) -> None:
    raw, start, ring = noise(sum(lengths), 6), 0, torch.zeros(4, 6, dtype=torch.bfloat16)
    blocks, means = [], []
    for length in lengths:
        found, mean, ring = qsa.pool(raw[start : start + length], start, ring, RATIO)
        blocks.append(found)
        means.append(mean)
        start += length
    whole, expected, _ = qsa.pool(raw, 0, torch.zeros(4, 6, dtype=torch.bfloat16), RATIO)
    assert torch.equal(torch.cat(blocks), whole)
    assert torch.equal(torch.cat(means), expected)
    assert whole.tolist() == list(range(len(raw) // RATIO))


@given(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_refused_drafts_leave_the_keys_as_they_were(drafts: int, accepted: list[int], seed: int) -> None:
    """Semantics A.5: no rollback is needed, whatever is refused."""
    rows = qsa.ring_rows(RATIO, drafts)
    assert rows == (4 if drafts == 0 else 8)
    taken = [min(count, drafts) + 1 for count in accepted]
    raw, ring, start = noise(sum(taken) + drafts, 6, seed=seed), torch.zeros(rows, 6, dtype=torch.bfloat16), 0
    keys: dict[int, Tensor] = {}
    for count in taken:
        step = raw[start : start + 1 + drafts].clone()
        step[count:] = noise(1 + drafts - count, 6, seed=seed + start + 1) if count <= drafts else step[count:]
        blocks, means, ring = qsa.pool(step, start, ring, RATIO)
        keys |= dict(zip(blocks.tolist(), means, strict=True))
        start += count
    whole, expected, _ = qsa.pool(raw[:start], 0, torch.zeros(rows, 6, dtype=torch.bfloat16), RATIO)
    for block, mean in zip(whole.tolist(), expected, strict=True):
        assert torch.equal(keys[block], mean)


# Against transformers


@pytest.fixture(scope="module")
def hf() -> Any:
    """The module of transformers in which the model is defined."""
    torchvision_cpu.install()
    return pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 5, 16, 17, 43])
def test_attention_is_that_of_transformers(hf: Any, length: int) -> None:
    """Sixteen tokens of budget, so that a longer sequence is selected from."""
    config = SimpleNamespace(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, attention_bias=False,
        attention_dropout=0.0, rms_norm_eps=1e-6, indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=16,
        indexer_budget=16, indexer_compress_ratio=RATIO, _attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(length)
    layer = hf.Qwen4ExpTextAttention(config, 0).to(torch.bfloat16).eval()
    indexer = layer.indexer
    for weight in (layer.q_norm.weight, layer.k_norm.weight, indexer.q_layernorm.weight, indexer.k_layernorm.weight):
        torch.nn.init.normal_(weight, std=0.3)
    hidden, places = noise(length, 48, seed=length), torch.arange(length)
    angles = places[:, None].float() * THETA ** (-torch.arange(0, DIMS, 2) / DIMS)
    turns = tuple(wave(torch.cat([angles, angles], -1)).to(torch.bfloat16)[None] for wave in (torch.cos, torch.sin))
    mask = torch.full((length, length), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16).triu(1)[None, None]
    expected = layer(hidden[None], turns, mask)[0][0]

    def rotated(x: Tensor) -> Tensor:
        return qsa.rope(x, places, "hf", dims=DIMS, theta=THETA)

    projected = indexer.index_qk_proj(hidden)
    turned = {"rounding": "hf", "dims": DIMS, "theta": THETA}
    asked = qsa.index_queries(projected[:, :64].reshape(length, 4, 16), indexer.q_layernorm.weight, places, **turned)
    blocks, means, _ = qsa.pool(projected[:, 64:], 0, torch.zeros(4, 16, dtype=torch.bfloat16), RATIO)
    offered = qsa.index_keys(means, indexer.k_layernorm.weight, blocks, ratio=RATIO, **turned)
    chosen = qsa.select(qsa.scores(asked, offered), qsa.visible(places, length, RATIO), 16 // RATIO)
    tokens = qsa.expand(chosen, places, RATIO)
    queries, gate = layer.q_proj(hidden).reshape(length, 4, 32).chunk(2, -1)
    queries = rotated(gemma_norm(queries, layer.q_norm.weight))
    keys = rotated(gemma_norm(layer.k_proj(hidden).reshape(length, 2, 16), layer.k_norm.weight))
    values = layer.v_proj(hidden).reshape(length, 2, 16)
    for rounding in ("hf", "fused"):
        found = layer.o_proj(qsa.attend(queries, keys, values, tokens, gate, rounding).flatten(1))  # type: ignore[arg-type]
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=5e-3)
