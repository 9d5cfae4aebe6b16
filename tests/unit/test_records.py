"""Dataclasses without generated code do what the standard ones do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import field
from functools import cached_property
from typing import Any, Generic, TypeVar

import pytest

from slimserve import records

T = TypeVar("T")


@records.dataclass(frozen=True)
class Ours(Generic[T]):
    """One."""

    first: T
    second: int = 2
    third: list[int] = field(default_factory=list, compare=False)
    hidden: int = field(default=4, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.second < 0:
            raise ValueError("below 0")

    @cached_property
    def sum(self) -> int:
        return self.second + self.hidden


@dataclasses.dataclass(frozen=True)
class Standard(Generic[T]):
    """The same."""

    first: T
    second: int = 2
    third: list[int] = field(default_factory=list, compare=False)
    hidden: int = field(default=4, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.second < 0:
            raise ValueError("below 0")


@records.dataclass(frozen=True, kw_only=True)
class Own:
    """With methods of its own."""

    value: int

    def __repr__(self) -> str:
        return "own"

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 7


BOTH = pytest.mark.parametrize("kind", [Ours, Standard])


@BOTH
def test_what_it_is_made_of(kind: Any) -> None:
    one = kind("a", 3, third=[1])
    assert (one.first, one.second, one.third, one.hidden) == ("a", 3, [1], 4)
    assert kind("a").third is not kind("a").third
    assert repr(one) == f"{kind.__name__}(first='a', second=3, third=[1])"
    assert [each.name for each in dataclasses.fields(kind)] == ["first", "second", "third", "hidden"]
    assert dataclasses.asdict(one) == {"first": "a", "second": 3, "third": [1], "hidden": 4}
    assert kind[str]("a") == kind("a")


@BOTH
def test_equal_and_hashed_by_what_is_compared(kind: Any) -> None:
    assert kind("a", third=[1]) == kind("a")
    assert hash(kind("a", third=[1])) == hash(kind("a"))
    assert kind("a") != kind("b")
    assert kind("a") != object()
    assert kind("a").__eq__("a") is NotImplemented


@BOTH
@pytest.mark.parametrize(
    ("args", "given"),
    [((), {}), ((1, 2, [], 4), {}), ((1,), {"first": 1}), ((1,), {"fourth": 1}), ((), {"second": 1})],
)
def test_what_it_is_not_made_of(kind: Any, args: Any, given: Any) -> None:
    with pytest.raises(TypeError):
        kind(*args, **given)


@BOTH
def test_it_stays_as_it_was_made(kind: Any) -> None:
    one = kind("a")
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'first'"):
        one.first = "b"
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'first'"):
        del one.first
    assert dataclasses.replace(one, first="b") == kind("b")
    with pytest.raises(ValueError, match="below 0"):
        dataclasses.replace(one, second=-1)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one


def test_what_is_computed_once_is_kept_and_no_part_of_it() -> None:
    one = Ours("a")
    assert one.sum == 6
    assert "sum" in vars(one)
    assert one == Ours("a")


@pytest.mark.parametrize("what", [{"init": False, "default": 1}, {"hash": False}])
def test_a_field_that_would_not_do_what_it_says(what: Any) -> None:
    with pytest.raises(AssertionError):
        records.dataclass(frozen=True)(type("Odd", (), {"__annotations__": {"x": "int"}, "x": field(**what)}))


def test_a_class_that_compares_itself_and_cannot_be_hashed() -> None:
    with pytest.raises(AssertionError):
        records.dataclass(frozen=True)(type("Odd", (), {"__eq__": lambda self, other: True}))


def test_methods_of_its_own_stay() -> None:
    assert (repr(Own(value=1)), hash(Own(value=1))) == ("own", 7)
    assert Own(value=1) == Own(value=2)
    with pytest.raises(TypeError):
        Own(1)  # type: ignore[misc]
