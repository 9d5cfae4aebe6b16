"""The bar on a terminal, and the lines elsewhere."""

from __future__ import annotations

import io

import pytest

from harness import progress
from harness.progress import Progress


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    """A stream whose reader went away."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_bar_says_where_how_much_and_how_long(clock: list[float]) -> None:
    terminal = Terminal()
    bar = Progress("tiny", 8, terminal)
    bar.enter("c2, round 1 of 2")
    for second, outcome in enumerate(("ok", "ok"), 1):
        clock[0] = second * 3.0
        bar.add(outcome)
    # Six seconds for a quarter of it.
    expected = "tiny [######..................]  25% c2, round 1 of 2: 2 of 8, 18 s left"
    assert bar.line() == expected
    assert terminal.getvalue().endswith(f"\r{expected}\x1b[K")
    bar.add("failed")
    assert bar.line().endswith(", 1 failed")
    bar.close()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_a_bar_is_not_drawn_for_each_of_many_answers(clock: list[float]) -> None:
    terminal = Terminal()
    bar = Progress("tiny", 10_000, terminal)
    for number in range(10_000):
        clock[0] = number * 1e-4
        bar.add("ok")
    assert 5 <= terminal.getvalue().count("\r") <= 11
    assert bar.done == 10_000


def test_elsewhere_each_load_is_a_line() -> None:
    stream = io.StringIO()
    bar = Progress("tiny", 2, stream)
    for where in ("c1", "c2"):
        bar.enter(where)
        bar.add("ok")
    bar.close()
    assert stream.getvalue() == "tiny: c1, 0 of 2 requests done\ntiny: c2, 1 of 2 requests done\n"


def test_a_run_goes_on_that_nobody_watches() -> None:
    bar = Progress("tiny", 1, Gone())
    bar.enter("c1")
    bar.add("ok")
    bar.close()
    assert bar.done == 1
