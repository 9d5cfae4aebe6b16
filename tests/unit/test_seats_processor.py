"""What sits in the engine's seats on a processor and computes several requests at once: as each by itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from quixicore.ops.gated_delta import reference
from quixicore.ops.qsa import reference as qsa
from quixicore.seats import gdn, linear, sparse


@pytest.mark.parametrize("lengths", [(3,), (3, 3, 3), (1, 3, 2)])
def test_drafts_of_all_requests_are_computed_as_each_request_alone(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    total, rows = sum(lengths), len(lengths)
    query, key = torch.randn(total, 2, 16), torch.randn(total, 2, 16)
    value, a, b = torch.randn(total, 4, 8), torch.randn(total, 4), torch.randn(total, 4)
    a_log, dt_bias = torch.randn(4), torch.randn(4)
    blocks = torch.randperm(4 * rows)[: 3 * rows].view(rows, 3)
    accepted = torch.arange(rows) % 3 + 1
    starts = torch.tensor([0, *lengths]).cumsum(0)
    states = torch.randn(4 * rows, 4, 16, 8)
    kept = states.clone()
    said = gdn.operations.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        a_log, dt_bias, query, key, value, a, b, states, blocks.int(), accepted.int(), starts.int(), True
    )
    decay, strength = reference.gates(a, b, a_log, dt_bias, "fused")
    for row, length in enumerate(lengths):
        state = kept[blocks[row, accepted[row] - 1]].clone()
        for place in range(length):
            at = slice(int(starts[row]) + place, int(starts[row]) + place + 1)
            expected, state = reference.recurrent(query[at], key[at], value[at], decay[at], strength[at], state)
            torch.testing.assert_close(said[at], expected)
            torch.testing.assert_close(states[blocks[row, place]], state)
            kept[blocks[row, place]] = state
    torch.testing.assert_close(states, kept)  # and nothing else was written


def test_the_convolution_of_drafts_is_the_grouped_one() -> None:
    inputs, weight = torch.randn(2, 24, 6), torch.randn(24, 1, 4)
    torch.testing.assert_close(
        gdn.functions.conv1d(inputs, weight, None, 24), functional.conv1d(inputs, weight, groups=24)
    )
    with pytest.raises(NotImplementedError):
        gdn.functions.conv1d(inputs, weight, torch.zeros(24), 24)


@pytest.mark.parametrize("counts", [(40,), (1, 3, 20, 3, 17), (3, 3), (16, 100), (3,) * 8, (10, 10), (15, 3, 40)])
def test_attention_is_the_same_however_rows_are_put_together(counts: tuple[int, ...]) -> None:
    """Many rows of one request meet all of its keys at once, few have theirs gathered; a row of nobody is zeros."""
    torch.manual_seed(2)
    page, pages, width = 8, 6, 19
    requests = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    total = len(requests)
    table = torch.randperm(pages * len(counts) + 3)[: pages * len(counts)].view(len(counts), pages)
    keys, values = (torch.randn(pages * len(counts) + 3, page, 2, 32, dtype=torch.bfloat16) for _ in range(2))
    query, gate = (torch.randn(total, 4, 32, dtype=torch.bfloat16) for _ in range(2))
    chosen = torch.full((total, width + 1), -1)
    for row in range(total):
        held = int(torch.randint(0, width + 1, ()))
        chosen[row, :held] = torch.randperm(page * pages)[:held].sort().values
        chosen[row, -1] = held
    said = sparse.attend(query, keys, values, chosen.int(), table.int(), requests.int(), False, output_gate=gate)
    for row in range(total):
        own = table[requests[row]]
        whole = (cache[own].flatten(0, 1) for cache in (keys, values))
        one = slice(row, row + 1)
        expected = qsa.attend(query[one], *whole, chosen[one, :-1], gate[one], "fused")
        torch.testing.assert_close(said[one], expected, rtol=1e-2, atol=1e-2)
        assert chosen[row, -1] or not said[row].any()


@pytest.mark.parametrize("rounding", ["hf", "fused"])
def test_one_product_with_all_keys_says_the_same(rounding: str) -> None:
    torch.manual_seed(3)
    query, gate = torch.randn(9, 6, 16), torch.randn(9, 6, 16)
    keys, values = torch.randn(30, 3, 16), torch.randn(30, 3, 16)
    tokens = torch.stack([torch.randperm(30)[:7] for _ in range(9)])
    tokens[4, 2:] = -1
    one = qsa.attend(query, keys, values, tokens, gate, rounding)  # type: ignore[arg-type]
    other = qsa.attend_among(query, keys, values, tokens, gate, rounding)  # type: ignore[arg-type]
    torch.testing.assert_close(one, other)


def test_a_product_is_rounded_once_and_follows_its_weight() -> None:
    layer = SimpleNamespace()
    x, weight, bias = torch.randn(5, 16).bfloat16(), torch.randn(8, 16).bfloat16(), torch.randn(8).bfloat16()
    for other in (weight, -weight):
        said = linear.product(None, layer, x, other, bias)
        assert said.equal(functional.linear(x.float(), other.float(), bias.float()).bfloat16())


@pytest.mark.parametrize("weight", [torch.empty(0, dtype=torch.bfloat16), torch.randn(8, 16)])
def test_what_the_engine_has_packed_or_holds_in_fp32_stays_its_own(weight: torch.Tensor) -> None:
    asked = []
    linear.product(lambda *given: asked.append(given) or torch.zeros(1), SimpleNamespace(), torch.randn(5, 16), weight)
    assert len(asked) == 1
