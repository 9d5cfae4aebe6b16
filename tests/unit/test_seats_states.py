"""Inputs of a step, block tables and recurrent states: against loops over what each request is said to have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quixicore.seats import batch, drafts, states, tables

BLOCK = 4


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int]]:
    """Slots of some requests, and of each how many tokens it has, has computed and feeds."""
    slots = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
    wholes = [draw(st.integers(1, 12)) for _ in range(6)]
    done = [draw(st.integers(0, 14)) for _ in range(6)]
    return slots, wholes, done, [draw(st.integers(0, 5)) for _ in slots]


def starts_of(fed: list[int]) -> Tensor:
    return torch.tensor([0, *fed]).cumsum(0)


@given(batches())
def test_prompts_are_fed_where_they_were_left(given: tuple[list[int], list[int], list[int], list[int]]) -> None:
    slots, wholes, done, fed = given
    tokens = torch.arange(6)[:, None] * 100 + torch.arange(24)
    total = sum(fed)
    input_ids, ahead = torch.full((total,), -1), torch.full((2, 6), -7)
    starts = starts_of(fed)
    batch.prefill_inputs(
        input_ids, ahead, 6, 2, torch.tensor(slots), starts, tokens, 24, torch.tensor(wholes), torch.tensor(done)
    )
    places, lengths = torch.full((total,), -1), torch.full((6,), -1)
    batch.positions(places, lengths, torch.tensor(slots), starts, torch.tensor(done), 6)
    for row, slot in enumerate(slots):
        first, last = int(starts[row]), int(starts[row + 1])
        own = list(range(done[slot], done[slot] + fed[row]))
        assert places[first:last].tolist() == own
        assert lengths[row] == done[slot] + fed[row]
        if done[slot] < wholes[slot]:
            assert input_ids[first:last].tolist() == [slot * 100 + place for place in own]
            reached = done[slot] + fed[row]
            assert ahead[:, slot].tolist() == [
                slot * 100 + place if place < wholes[slot] else 0 for place in (reached, reached + 1)
            ]
        else:
            assert (input_ids[first:last] == -1).all()
            assert (ahead[:, slot] == -7).all()
    assert (lengths[len(slots) :] == 0).all()


def test_a_decoding_request_is_fed_its_last_token_and_its_drafts() -> None:
    input_ids, rows = torch.full((6,), -1), torch.zeros(4, dtype=torch.int64)
    batch.sampled_and_drafts(
        input_ids,
        torch.tensor([2, 0]),
        torch.tensor([[50], [51], [52]]),
        torch.tensor([0, 3, 6]),
        torch.tensor([10, 6]),  # the second is still in its prompt
        torch.tensor([9, 9, 5]),
        torch.tensor([[1, 2], [3, 4], [7, 8]]),
        2,
        torch.tensor([0, 3, 4]),
        rows,
        NUM_NEW_SAMPLED_TOKENS=1,
    )
    assert input_ids.tolist() == [52, 7, 8, -1, -1, -1]
    assert rows.tolist() == [0, 1, 2, 5]


@given(batches(), st.data())
def test_a_step_leaves_what_it_sampled(
    given: tuple[list[int], list[int], list[int], list[int]], data: st.DataObject
) -> None:
    slots, totals, done, fed = given
    gained = [data.draw(st.integers(0, 3)) for _ in slots]
    refused = [data.draw(st.integers(0, min(2, each))) for each in fed]
    tokens, counts = torch.zeros(6, 40, dtype=torch.int64), torch.zeros(6, 9, dtype=torch.int32)
    sampled = torch.arange(3).expand(len(slots), 3) + torch.arange(len(slots))[:, None]
    computed, last, after = torch.tensor(done), torch.zeros(6, 1, dtype=torch.int64), torch.tensor(totals)
    batch.after_step(
        torch.tensor(slots),
        computed,
        last,
        counts,
        9,
        sampled,
        3,
        torch.tensor(gained),
        torch.tensor(refused),
        starts_of(fed),
        tokens,
        40,
        after,
    )
    for row, slot in enumerate(slots):
        said = sampled[row, : gained[row]].tolist()
        assert tokens[slot, totals[slot] : totals[slot] + gained[row]].tolist() == said
        assert after[slot] == totals[slot] + gained[row]
        assert counts[slot].sum() == gained[row]
        assert int(last[slot, 0]) == (said[-1] if said else 0)
        assert computed[slot] == done[slot] + fed[row] - refused[row]


def test_what_is_sampled_in_the_midst_of_a_prompt_does_not_count() -> None:
    sampled, rejected = torch.tensor([2, 1, 1]), torch.zeros(3, dtype=torch.int64)
    starts, slots = torch.tensor([0, 3, 4, 5]), torch.tensor([1, 0, 2])
    batch.sampled_and_rejected(sampled, rejected, torch.tensor([9, 3, 5]), starts, slots, torch.tensor([7, 4, 5]))
    assert (sampled.tolist(), rejected.tolist()) == ([2, 0, 1], [1, 0, 0])


def test_rows_of_logits_know_their_request() -> None:
    expanded, places = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int32)
    batch.expand(torch.tensor([4, 1]), expanded, places, torch.tensor([0, 3, 5]))
    assert (expanded.tolist(), places.tolist()) == ([4, 4, 4, 1, 1], [0, 1, 2, 0, 1])
    owners = torch.full((7,), -1, dtype=torch.int32)
    batch.requests_of_tokens(torch.tensor([0, 2, 2, 5], dtype=torch.int32), owners, 3, 5, 7)
    assert owners.tolist() == [0, 0, 2, 2, 2, 0, 0]
    targets = torch.zeros(3, dtype=torch.int64)
    batch.prompt_targets(
        targets, torch.tensor([0, 3]), torch.tensor([1]), torch.tensor([0, 2]), torch.arange(20).view(2, 10), 10
    )
    assert targets.tolist() == [13, 14, 15]


def block_tables() -> Any:
    """Two groups of different block sizes, the second of which has no slots of its own."""
    own = [torch.arange(12, dtype=torch.int32).view(3, 4), torch.arange(100, 112, dtype=torch.int32).view(3, 4)]
    return SimpleNamespace(
        block_tables=[SimpleNamespace(gpu=table) for table in own],
        input_block_tables=[torch.full((3, 4), -9, dtype=torch.int32) for _ in own],
        block_sizes=[4, 2],
        slot_mappings=torch.zeros(2, 8, dtype=torch.int64),
        _slot_mapping_enabled=[True, False],
        cp_size=1,
    )


def test_tokens_go_where_their_request_has_blocks() -> None:
    house = block_tables()
    gathered = tables.gather(house, torch.tensor([2, 0]), 3)
    assert [table.tolist() for table in gathered] == [
        [[8, 9, 10, 11], [0, 1, 2, 3], [0] * 4],
        [[108, 109, 110, 111], [100, 101, 102, 103], [0] * 4],
    ]
    slots = tables.slot_mappings(house, torch.tensor([2, -1]), torch.tensor([0, 3, 4]), torch.tensor([3, 4, 5, 0]), 6)
    assert slots[0].tolist() == [8 * 4 + 3, 9 * 4, 9 * 4 + 1, -1, -1, -1]
    assert (slots[1] == -1).all()


def test_staged_writes_are_made_in_their_order() -> None:
    class Staged(SimpleNamespace):
        def clear_staged_writes(self) -> None:
            self._staged_write_indices = []

    matrix = Staged(
        gpu=torch.zeros(2, 4, dtype=torch.int32),
        dtype=torch.int32,
        _staged_write_indices=[1, 0, 1],
        _staged_write_starts=[0, 2, 1],
        _staged_write_contents=[5, 6, 7, 8, 9],
        _staged_write_cu_lens=[2, 3, 5],
    )
    tables.write_staged(matrix)
    assert matrix.gpu.tolist() == [[0, 0, 7, 0], [5, 8, 9, 0]]
    assert matrix._staged_write_indices == []


def context(columns: int, drafts: int) -> Any:
    """A request whose window and state lie in blocks of their own, named by what they hold."""
    table = torch.arange(1, columns + 1, dtype=torch.int32).expand(2, -1)
    window = torch.arange(50.0)[:, None, None].expand(50, 3 + drafts, 2) * 10 + torch.arange(3 + drafts)[None, :, None]
    state = torch.arange(50.0)[:, None].expand(50, 4)
    return SimpleNamespace(
        is_initialized=True,
        block_size=BLOCK,
        quixicore_states=[(window.clone(), table, True), (state.clone(), table, False)],
        quixicore_batch_tables=[table],
        aligned_state_indices=torch.zeros(1, 2, 1 + drafts, dtype=torch.int32),
    )


@given(st.integers(0, 12), st.integers(1, 6), st.integers(1, 3))
def test_a_state_moves_on_when_its_tokens_pass_a_boundary(done: int, fed: int, kept: int) -> None:
    """Column c holds block c + 1: what comes is what was, shifted by the accepted tokens after the first."""
    house = context(8, 2)
    columns = torch.tensor([(done - 1) // BLOCK])
    before, accepted = int(columns[0]), torch.tensor([kept])
    source, offset = torch.full((1,), -1), torch.zeros(1, dtype=torch.int64)
    slots, starts = torch.tensor([0]), torch.tensor([0, fed])
    states.advance(slots, columns, torch.tensor([done]), starts, accepted, source, offset, 1, MAMBA_BLOCK_SIZE=BLOCK)
    after = -(-(done + fed) // BLOCK) - 1
    assert (int(source[0]), int(columns[0]), int(offset[0])) == (before, after, kept - 1)
    moved = before >= 0 and before != after
    assert int(accepted[0]) == (1 if moved else kept)
    states.move_on(house, 1, columns, source, offset, slots)
    window, state = house.quixicore_states[0][0], house.quixicore_states[1][0]
    block, old = after + 1, before + 1
    if moved:
        assert window[block, : 5 - (kept - 1), 0].tolist() == [old * 10 + place for place in range(kept - 1, 5)]
        assert state[block, 0] == old + kept - 1
    else:
        assert window[block, 0, 0] == block * 10
        assert state[block, 0] == block


@given(st.integers(1, 20), st.integers(1, 3))
def test_a_boundary_within_the_accepted_tokens_is_kept(reached: int, gained: int) -> None:
    """The state after `reached` tokens runs in a column; what it was at the boundary goes to the column before it."""
    gained = min(gained, reached)
    house = context(8, 2)
    running = reached - gained + 1
    column = -(-running // BLOCK) - 1 if running else 0
    accepted, columns = torch.tensor([gained]), torch.tensor([column])
    states.keep_boundary(house, 1, accepted, columns, torch.tensor([reached]), torch.tensor([0]))
    boundary = reached // BLOCK * BLOCK
    state = house.quixicore_states[1][0]
    if boundary >= running:
        target, offset = boundary // BLOCK - 1, boundary - running
        assert state[target + 1, 0] == column + offset + 1
        assert int(accepted[0]) == (1 if target == column else gained)
    else:
        assert torch.equal(state, torch.arange(50.0)[:, None].expand(50, 4))


def test_the_blocks_in_which_states_run() -> None:
    house = context(4, 2)
    found = states.blocks_of_running(house, torch.tensor([1, 9], dtype=torch.int32), 2)
    assert found.tolist() == [[[1, 2, 3], [3, 4, 4]]]
    accepted = torch.tensor([9, 9, 9], dtype=torch.int32)
    states.note_accepted(torch.tensor([2, -1]), torch.tensor([0, 5]), accepted)
    assert accepted.tolist() == [9, 9, 1]


def test_a_drafter_begins_where_the_accepted_tokens_end() -> None:
    last, step = torch.full((3,), 7), torch.tensor(5)
    ids, places = torch.full((6,), -1), torch.full((6,), -1)
    starts, lengths = torch.full((4,), -1), torch.full((3,), -1)
    drafts.first_inputs(
        last,
        step,
        ids,
        places,
        starts,
        lengths,
        torch.tensor([1, 2, 3, 4, 5, 6]),
        torch.arange(10, 16),
        torch.tensor([1, 0]),
        torch.tensor([[40], [41]]),
        torch.tensor([[90, 91]]),
        torch.tensor([2, 0]),
        torch.tensor([1, 0]),
        torch.tensor([0, 3, 6]),
        torch.tensor([13, 16]),
        3,
    )
    assert ids.tolist() == [2, 41, -1, 5, 6, 90]  # one draft was refused; the other is still in its prompt
    assert places.tolist() == [10, 11, -1, 13, 14, 15]
    assert (last.tolist(), int(step)) == ([1, 5, 0], 0)
    assert (starts.tolist(), lengths.tolist()) == ([0, 3, 6, 6], [13, 16, 0])
