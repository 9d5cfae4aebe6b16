"""The cases of harness.plan_check: each is a plan, and changes something that the gate looks at."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.plan_check import CASES, asked, compared, raised
from slimserve.engine.gate import expected
from slimserve.engine.record import LOG_NAME
from slimserve.session import Session, open_session

SLICE = "qwen38fn-slice12-fp8-h200x1"


@pytest.fixture(scope="module")
def session() -> Session:
    return open_session({}, platform="h200x1")


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_planned_and_differs_in_what_is_compared(name: str, session: Session) -> None:
    case, profile = CASES[name], session.resolve(SLICE)
    plan = session.what_if(profile, case.settings)[0] if case.settings else session.plan(profile)
    assert case.differs <= expected.planned(plan).keys()
    changed = bool(case.settings or case.arguments or case.variables)
    assert changed or case.must == "came up"


def test_what_must_come_up_is_told_apart_from_what_must_not() -> None:
    outcomes = {name: case.must for name, case in CASES.items()}
    assert {name for name, outcome in outcomes.items() if outcome == "came up"} == {"planned", "planned-mtp"}
    assert set(outcomes.values()) == {"came up", "refused", "ended by itself"}


def test_the_exceptions_of_a_log_are_found(tmp_path: Path) -> None:
    (tmp_path / LOG_NAME).write_text("INFO fine\n(core) ValueError: no such thing\n  at x\nan Error without a type\n")
    assert raised(tmp_path) == ["(core) ValueError: no such thing"]


def test_a_warning_that_quotes_an_exception_is_none(tmp_path: Path) -> None:
    (tmp_path / LOG_NAME).write_text(
        "(api) WARNING errors like `OSError: [Errno 24]`\n(core) ERROR ValueError: it is\n"
    )
    assert raised(tmp_path) == ["(core) ERROR ValueError: it is"]


def test_what_was_asked_is_not_hidden_by_what_was_compared(session: Session) -> None:
    plan = session.plan(session.resolve(SLICE))
    rank = {"cache_groups": [["attention", 1568]], "cache_blocks": 1, "block_bytes": 1, "weight_bytes": 1}
    seen = compared(plan, {"resolved": {"settings": {"rank-0-0": rank}}, "measured": {"rank-0-0": {}}})
    assert not seen.keys() & asked(CASES["planned-mtp"]).keys()
