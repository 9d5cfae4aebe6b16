"""The shapes of files: what is taken, what is refused, and that it is the same as what pydantic's strict mode says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimserve.shapes import Between, Matching, Problem, Satisfying, ShapeError, build, nearest, plain

T = TypeVar("T")
Small = Annotated[int, Between(1, 9)]
Word = Annotated[str, Matching(r"[a-z]+", "lower-case letters")]


@dataclass(frozen=True, kw_only=True)
class Leaf(Generic[T]):
    value: T
    why: Word


class Bark(StrEnum):
    ROUGH = "rough"
    SMOOTH = "smooth"


@dataclass(frozen=True, kw_only=True)
class Tree:
    name: Word
    leaf: Leaf[Small]
    kind: Literal["oak", "fir"] | None = None
    heights: tuple[float, ...] = ()
    pair: tuple[int, int] | None = None
    by_number: dict[Small, Word] = field(default_factory=dict)
    flag: bool = False
    limited: Annotated[tuple[int, ...], Satisfying(lambda value: "it is too long" if len(value) > 2 else None)] = ()

    def __post_init__(self) -> None:
        if self.name == self.leaf.why:
            raise ValueError("name and why are the same")


GOOD: dict[str, Any] = {"name": "a", "leaf": {"value": 3, "why": "b"}}


def problems(data: Any) -> list[str]:
    with pytest.raises(ShapeError) as caught:
        build(Tree, data)
    return [f"{problem.what}: {problem.why}" for problem in caught.value.problems]


def test_what_fits_becomes_an_object() -> None:
    more = {"kind": "fir", "heights": [1, 2.5], "pair": [1, 2], "by_number": {"3": "c"}, "flag": True}
    tree = build(Tree, {**GOOD, **more})
    assert tree == Tree(
        name="a",
        leaf=Leaf(value=3, why="b"),
        kind="fir",
        heights=(1.0, 2.5),
        pair=(1, 2),
        by_number={3: "c"},
        flag=True,
    )
    assert isinstance(tree.heights[0], float)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nam": "x"}, "unknown key nam"),
        ({"name": None}, 'name = null is not valid: nothing is given'),
        ({"name": 3}, "name = 3 is not valid: a whole number is given"),
        ({"name": "A"}, "it must be lower-case letters"),
        ({"leaf": 3}, "leaf = 3 is not valid: a whole number is given"),
        ({"leaf": {"value": 3}}, "leaf.why is missing"),
        ({"leaf": {"value": True, "why": "b"}}, "leaf.value = true is not valid: a boolean is given"),
        ({"leaf": {"value": 3.0, "why": "b"}}, "leaf.value = 3.0 is not valid: a number is given"),
        ({"leaf": {"value": 10, "why": "b"}}, "it must be from 1 to 9"),
        ({"leaf": {"value": 3, "why": "b", "x": 1}}, "unknown key leaf.x"),
        ({"kind": "elm"}, "it is not one of the known values"),
        ({"kind": 1}, "it is not one of the known values"),
        ({"heights": ["1"]}, 'heights[0] = "1" is not valid'),
        ({"heights": {"a": 1}}, "a mapping is given"),
        ({"heights": [True]}, "heights[0] = true is not valid"),
        ({"heights": [10**400]}, "is not valid: a whole number beyond every float is given"),
        ({"heights": [-(10**400)]}, "is not valid: a whole number beyond every float is given"),
        ({"pair": [1]}, "1 items are given"),
        ({"pair": [1, 2, 3]}, "3 items are given"),
        ({"by_number": {"x": "c"}}, 'by_number.x = "x" is not valid'),
        ({"by_number": {"03": "c"}}, "by_number.03"),
        ({"flag": "true"}, 'flag = "true" is not valid: a text is given'),
        ({"flag": 1}, "flag = 1 is not valid"),
        ({"flag": None}, "nothing is given"),
        ({"limited": [1, 2, 3]}, "it is too long"),
        ({"name": "b"}, "name and why are the same"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(change: dict[str, Any], says: str) -> None:
    (only,) = problems({**GOOD, **change})
    assert says in only


def test_all_problems_at_once() -> None:
    found = problems({"nam": 1, "leaf": {"value": 0, "wy": "b"}, "kind": "elm", "pair": [1]})
    assert len(found) == 7


@pytest.mark.parametrize("data", [None, [], 3, "x", True, 1.5])
def test_something_else_than_a_mapping(data: Any) -> None:
    assert len(problems(data)) == 1


def test_plain_data_comes_back() -> None:
    tree = build(Tree, {**GOOD, "by_number": {"3": "c"}, "heights": [1.5]})
    assert build(Tree, json.loads(json.dumps(plain(tree)))) == tree
    assert plain(tree, nulls=False) == {
        **GOOD, "by_number": {"3": "c"}, "heights": [1.5], "flag": False, "limited": []
    }  # fmt: skip


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 12)
    | st.just(10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("abAB", max_size=3)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc3", max_size=2), inner, max_size=3)
)
NAMES = st.sampled_from(
    ["name", "leaf", "kind", "heights", "pair", "by_number", "flag", "limited", "value", "why", "x"]
)
NEAR = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["a", "b", "", "A"]) | LEAVES,
        "leaf": st.fixed_dictionaries(
            {}, optional={"value": LEAVES, "why": st.sampled_from(["a", "b"]) | LEAVES, "x": LEAVES}
        ),
        "kind": st.sampled_from(["oak", "elm", None, 1]),
        "heights": st.lists(st.floats(0, 9) | LEAVES, max_size=2) | LEAVES,
        "pair": st.lists(st.integers(0, 3) | LEAVES, max_size=3),
        "by_number": st.dictionaries(
            st.sampled_from(["1", "9", "10", "a"]), st.sampled_from(["a", "A", 1]), max_size=2
        ),
        "flag": st.booleans() | LEAVES,
    },
)


@given(VALUES | NEAR | st.dictionaries(NAMES, VALUES))
def test_any_plain_data_gives_an_object_or_problems(data: Any) -> None:
    found: list[Problem] = []
    try:
        tree = build(Tree, data)
    except ShapeError as error:
        found = error.problems
        assert found
    else:
        assert build(Tree, json.loads(json.dumps(plain(tree)))) == tree
    assert all(problem.what and problem.why and problem.do for problem in found)


@given(NEAR)
def test_the_verdict_is_that_of_pydantic_in_strict_mode(data: dict[str, Any]) -> None:
    pydantic = pytest.importorskip("pydantic", reason="pydantic comes with the engine: make setup")

    PWord = Annotated[str, pydantic.Field(pattern="^[a-z]+$")]
    PNumber = Annotated[int, pydantic.Field(ge=1, le=9)]

    class PLeaf(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        model_config = pydantic.ConfigDict(strict=True, extra="forbid")
        value: PNumber
        why: PWord

    class PTree(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        model_config = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
        name: PWord
        leaf: PLeaf
        kind: Literal["oak", "fir"] | None = None
        heights: tuple[float, ...] = ()
        pair: tuple[int, int] | None = None
        by_number: dict[PNumber, PWord] = pydantic.Field(default_factory=dict)
        flag: bool = False
        limited: tuple[int, ...] = ()

        @pydantic.model_validator(mode="after")
        def _differ(self) -> PTree:
            if self.name == self.leaf.why:
                raise ValueError("same")
            return self

    PTree.model_rebuild(_types_namespace=locals())
    try:
        PTree.model_validate_json(json.dumps(data), strict=True)
        theirs = True
    except pydantic.ValidationError:
        theirs = False
    try:
        build(Tree, data)
        ours = True
    except ShapeError:
        ours = False
    assert ours == theirs


def test_a_name_of_an_enumeration_becomes_its_member_and_is_plain_again() -> None:
    @dataclass(frozen=True)
    class Trunk:
        bark: Bark

    trunk = build(Trunk, {"bark": "rough"})
    assert trunk == Trunk(Bark.ROUGH)
    assert isinstance(trunk.bark, Bark)
    assert type(plain(trunk)["bark"]) is str
    assert build(Trunk, plain(trunk)) == trunk
    for wrong in ("ROUGH", "soft", 1, None, ["rough"]):
        with pytest.raises(ShapeError, match=r"bark = .* is not valid") as caught:
            build(Trunk, {"bark": wrong})
        assert caught.value.problems[0].do == "use rough or smooth"


def test_names_that_are_equally_near_are_all_named() -> None:
    names = ["h200x1", "h200x2", "h200x8", "b200x4"]
    assert nearest("h200", names).startswith("did you mean h200x1 or h200x2 or h200x8? valid: b200x4")
    assert nearest("h200x", ["h200x8", "b200x4"]).startswith("did you mean h200x8? ")
    assert nearest("", names).startswith("valid: ")
    assert nearest("zz", names).startswith("valid: ")
    assert nearest("zz", []) == "valid: "
