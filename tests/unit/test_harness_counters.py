"""What a server counted, from texts of its metrics."""

from __future__ import annotations

import pytest

from harness.counters import counted, growth, reading, together
from harness.receipt import ServerCounts
from slimserve.operator.prometheus import Reading

NAME = "vllm:spec_decode_num_drafts_total"


def told(drafts: float, accepted: float, born: float = 7.0) -> Reading | None:
    """A reading of an engine of two ranks that drafts."""
    return reading(
        lambda: (
            f'{NAME}{{engine="0"}} {drafts}\n{NAME}{{engine="1"}} 5\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}\n'
            f"process_start_time_seconds {born}\n"
        )
    )


def test_a_load_has_what_grew_during_it() -> None:
    counts = counted(told(100, 500), told(140, 550))
    assert counts == ServerCounts(drafts=40, accepted_tokens=50)
    assert counts.acceptance_length == 2.25


def test_rounds_are_pooled_by_their_drafts_and_not_by_their_means() -> None:
    rounds = counted(told(0, 0), told(10, 20)), counted(told(50, 60), told(80, 90))
    assert [one.acceptance_length for one in rounds] == [3, 2]
    assert together(*rounds) == ServerCounts(drafts=40, accepted_tokens=50)
    assert together(rounds[0], ServerCounts()) == ServerCounts()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (told(100, 500), told(10, 20)),  # begun anew
        (told(100, 500), told(110, 20)),  # and soon as many
        (told(100, 500), told(110, 520, born=9.0)),  # and soon more
        (told(100, 500), told(100, 500)),  # nothing was drafted
        (told(100, 500), reading(lambda: f"{NAME} 200\n")),  # half of it
        (None, told(100, 500)),
        (told(100, 500), None),
    ],
)
def test_what_is_not_known_is_no_acceptance_length(before: Reading | None, after: Reading | None) -> None:
    assert counted(before, after).acceptance_length is None


def test_an_engine_that_accepts_nothing_makes_a_token_a_step() -> None:
    assert ServerCounts(drafts=4, accepted_tokens=0).acceptance_length == 1
    assert ServerCounts(drafts=4).acceptance_length is None


def test_a_counter_that_grew_more_than_can_be_is_not_known() -> None:
    assert growth(told(0, 0), told(1e16, 0), NAME) is None
