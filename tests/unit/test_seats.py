"""Seats are taken as their module is imported, where the source is that which ours were made for, and nowhere else."""

from __future__ import annotations

import hashlib
import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from quixicore import dispatch, engine
from quixicore.engine import GROUPS, MisfitError, Seat

SOURCES = ("def double(x):\n    return 2 * x\n", "    def count(self):\n        return 1\n")
SOURCE = f"{SOURCES[0]}\n\nclass Counter:\n{SOURCES[1]}"
OURS = """
def triple(x):
    return 3 * x

def more(real, self):
    return real(self) + 10

def added(x):
    return -x
"""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """A module of an engine's, and one that has copied a name of it."""
    stem = f"engine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{stem}.py").write_text(SOURCE)
    (tmp_path / f"{stem}_user.py").write_text(f"from {stem} import double\n")
    (tmp_path / "ours_of_a_test.py").write_text(OURS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(engine, "_taken", set())
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: real(name.removeprefix("quixicore.")))
    finders = list(sys.meta_path)
    yield stem, f"{stem}_user"
    sys.meta_path[:] = finders
    for name in (stem, f"{stem}_user", "ours_of_a_test"):
        sys.modules.pop(name, None)


def seat(module: str, path: str, way: engine.Way, ours: str, digest: str | None = None) -> Seat:
    if digest is None:  # of the source as it is written
        name = path.rsplit(".", 1)[-1]
        text = textwrap.dedent(next(part for part in SOURCES if f"def {name}" in part))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Seat("group", module, path, way, f"ours_of_a_test:{ours}", digest)


def raise_it(misfit: MisfitError) -> None:
    raise misfit


def test_ours_sit_before_anybody_calls_the_engines(names: tuple[str, str]) -> None:
    module, user = names
    seats = [
        seat(module, "double", "function", "triple"),
        seat(module, "Counter.count", "around", "more"),
        seat(module, "negative", "addition", "added", ""),
    ]
    engine.take(seats, raise_it)
    assert module not in sys.modules
    copied, real = importlib.import_module(user), importlib.import_module(module)
    assert (real.double(1), copied.double(1), real.Counter().count(), real.negative(4)) == (3, 3, 11, -4)
    engine.take(seats, raise_it)  # the engine loads its plugins again
    assert real.Counter().count() == 11
    assert engine.all_taken(seats)


def test_what_was_copied_before_is_ours_too(names: tuple[str, str]) -> None:
    module, user = names
    copied = importlib.import_module(user)
    engine.take([seat(module, "double", "function", "triple")], raise_it)
    assert copied.double(1) == 3


@pytest.mark.parametrize(
    ("path", "way", "digest", "words"),
    [
        ("double", "function", "0" * 16, "is not the source that our operation was made for"),
        ("halve", "function", "", "the engine has no"),
        ("Other.count", "function", "", "the engine has no"),
        ("double", "addition", "", "the engine has already"),
    ],
)
def test_another_engine_is_refused_by_name(
    path: str, way: engine.Way, digest: str, words: str, names: tuple[str, str]
) -> None:
    module, _ = names
    real = importlib.import_module(module)
    said: list[str] = []
    subject = seat(module, path, way, "triple", digest)
    engine.take([subject], lambda misfit: said.append(str(misfit)))
    assert len(said) == 1
    assert words in said[0]
    assert f"{module}.{path}" in said[0]
    assert real.double(1) == 2
    assert not engine.all_taken([subject])


def test_every_group_has_seats_and_every_seat_an_operation() -> None:
    assert len(GROUPS) >= 8
    for seats in GROUPS.values():
        for one in seats:
            module, _, name = one.ours.partition(":")
            assert hasattr(importlib.import_module(f"quixicore.{module}"), name), one
            assert bool(one.digest) == (one.way != "addition")
    names = [one.name for seats in GROUPS.values() for one in seats]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("choice", "architecture", "on_cards", "words"),
    [
        ({"qsaa": "reference"}, "LlamaForCausalLM", False, "there are no seats called qsaa"),
        ({"qsa": "fastest"}, "LlamaForCausalLM", True, "seats.qsa = fastest"),
        ({"qsa": "reference"}, "Qwen4ExpForCausalLM", True, "seats.qsa = reference on cards"),
        ({}, "Qwen4ExpForCausalLM", False, "seats.platform is not reference"),
    ],
)
def test_what_a_profile_may_not_say(choice: dict[str, str], architecture: str, on_cards: bool, words: str) -> None:
    found = list(dispatch.refusals(choice, architecture, on_cards=on_cards))
    assert words in found[0][1]
    assert all(part for refusal in found for part in refusal)


def test_what_it_may() -> None:
    whole = dict.fromkeys(GROUPS, dispatch.REFERENCE)
    assert not list(dispatch.refusals(whole, "Qwen4ExpForCausalLM", on_cards=False))
    assert not list(dispatch.refusals({"qsa": "engine"}, "Qwen4ExpForCausalLM", on_cards=True))
    assert dispatch.who_sits({"qsa": "reference"})["qsa"] == dispatch.REFERENCE
    assert dispatch.who_sits({})["gdn"] == dispatch.ENGINE
    assert dispatch.ours(whole) == engine.SEATS
    assert dispatch.ours({"gdn": "reference"}) == GROUPS["gdn"]
