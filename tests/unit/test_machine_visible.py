"""CUDA_VISIBLE_DEVICES in every legal form, and in the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimserve.probe.visible import Candidate, select

CARDS = [Candidate("GPU-1a2b-00"), Candidate("GPU-1a2c-11"), Candidate("GPU-9f00-22"), Candidate("GPU-ffff-33")]
SLICES = [Candidate("MIG-aaaa", "GPU-ffff-33", (1, 0)), Candidate("MIG-bbbb", "GPU-ffff-33", (2, 0))]
ALL = [*CARDS, *SLICES]

CASES = {
    # value: (visible positions, words that the problem holds; none when the form is legal)
    None: ([0, 1, 2, 3], ""),
    "": ([], ""),
    "  ": ([], ""),
    "-1": ([], ""),
    "0": ([0], ""),
    "2,0": ([2, 0], ""),
    " 3 , 1 ": ([3, 1], ""),
    "0,1,-1,2": ([0, 1], ""),
    "0,1,": ([0, 1], "entry 3, ''"),
    "0,9,1": ([0], "entry 2, '9', names a GPU that is not there: 4 found, counted from 0; with it the 1 after it"),
    "1,1": ([], "names a GPU that is named before it, which hides every GPU"),
    "2gpu,0": ([2, 0], "read by its first digits alone"),
    "none": ([], "neither a number nor a UUID"),
    "NoDevFiles": ([], "neither a number nor a UUID"),
    "0,GPU-9f": ([0], "is a UUID in a list of numbers"),
    "GPU-9f00-22": ([2], ""),
    "GPU-9f,GPU-1a2b": ([2, 0], ""),
    "GPU-1a2": ([], "is the beginning of 2 UUIDs"),
    "GPU-9f,GPU-1a2,GPU-ff": ([2], "is the beginning of 2 UUIDs; with it the 1 after it"),
    "GPU-0000": ([], "names no GPU of this machine"),
    "GPU-9f,0": ([2], "is not one of GPU-..."),
    "GPU-9f,GPU-9f00": ([], "hides every GPU"),
    "MIG-aaaa": ([4], ""),
    "MIG-b": ([5], ""),
    "MIG-bbbb,MIG-aaaa": ([5], "names 2 MIG instances, and a program sees the first alone"),
    "MIG-GPU-ffff-33/2/0": ([5], ""),
    "MIG-GPU-ffff-33/7/0": ([], "names no MIG instance"),
    "MIG-GPU-9f00-22/1/0": ([], "names no MIG instance"),
    "MIG-zzzz": ([], "names no MIG instance"),
    "9" * 30: ([], "not there"),
    "\u0661": ([], "neither a number nor a UUID"),  # an Arabic digit one: a digit to Python, not to CUDA
}


@pytest.mark.parametrize(
    ("value", "positions", "said"), [(v, *rest) for v, rest in CASES.items()], ids=map(repr, CASES)
)
def test_each_form(value: str | None, positions: list[int], said: str) -> None:
    selection = select(value, ALL)
    assert list(selection.positions) == positions
    problems = "; ".join(selection.problems)
    assert said in problems
    assert bool(said) == bool(problems)


entries = st.sampled_from(
    [
        "0",
        "1",
        "2",
        "3",
        "-1",
        "",
        "9",
        "x",
        " 1 ",
        *(c.uuid for c in ALL),
        "GPU-",
        "MIG-",
        "GPU-1",
        "MIG-GPU-ffff-33/1/0",
    ]
)


@given(
    st.none() | st.text(max_size=30) | st.lists(entries | st.text(max_size=8), max_size=6).map(",".join),
    st.integers(0, 6),
)
def test_it_never_raises_and_shows_a_part_without_repeats(value: str | None, count: int) -> None:
    selection = select(value, ALL[:count])
    assert len(set(selection.positions)) == len(selection.positions)
    assert set(selection.positions) <= set(range(count))
    assert all(problem.isprintable() for problem in selection.problems)


@given(st.permutations(range(4)), st.integers(0, 4), st.sampled_from(["number", "uuid", "prefix"]))
def test_the_order_of_the_list_is_the_order_that_is_seen(order: list[int], count: int, form: str) -> None:
    chosen = order[:count]
    names = {"number": str, "uuid": lambda i: CARDS[i].uuid, "prefix": lambda i: CARDS[i].uuid[:8]}
    selection = select(",".join(names[form](index) for index in chosen), CARDS)
    assert list(selection.positions) == chosen
    assert not selection.problems


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
    st.integers(4, 99),
    st.lists(st.integers(0, 3), max_size=3),
)
def test_the_first_entry_that_names_nothing_ends_the_list(good: list[int], bad: int, rest: list[int]) -> None:
    selection = select(",".join(map(str, [*good, bad, *rest])), CARDS)
    assert list(selection.positions) == good
    assert len(selection.problems) == 1
