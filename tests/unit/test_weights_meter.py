"""Progress: one line on a terminal, a few lines in a log."""

from __future__ import annotations

import io

from slimserve.weights.meter import Meter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_every_ten_percent() -> None:
    out, now = io.StringIO(), iter(range(1000))
    meter = Meter(out, lambda: float(next(now)))
    for done in range(101):
        meter(done * 1_000_000, 100_000_000, "fetching x")
    lines = out.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "  0%  0.0 of 100.0 MB  fetching x"
    assert lines[5] == " 50%  50.0 of 100.0 MB, 1.0 MB/s  fetching x"
    assert lines[-1].startswith("100%  100.0 of 100.0 MB")


def test_what_was_there_at_the_start_has_no_rate() -> None:
    out, now = io.StringIO(), iter((0.0, 1.0))
    meter = Meter(out, lambda: next(now))
    meter(50_000_000, 100_000_000, "x")
    meter(60_000_000, 100_000_000, "x")
    assert "10.0 MB/s" in out.getvalue()


def test_another_step_starts_anew() -> None:
    out, now = io.StringIO(), iter(range(10))
    meter = Meter(out, lambda: float(next(now)))
    meter(10_000_000, 10_000_000, "fetching")
    meter(0, 20_000_000, "converting")
    meter(20_000_000, 20_000_000, "converting")
    assert out.getvalue().splitlines()[1:] == [
        "  0%  0.0 of 20.0 MB  converting",
        "100%  20.0 of 20.0 MB, 20.0 MB/s  converting",
    ]


def test_a_terminal_gets_one_line_redrawn() -> None:
    out, now = Terminal(), iter((0.0, 0.05, 0.2, 0.21))
    meter = Meter(out, lambda: next(now))
    for done in (0, 1, 2, 4):
        meter(done, 4, "x")
    meter.close()
    meter.close()
    drawn = out.getvalue()
    assert drawn.count("\r") == 3  # too soon after the first, the second is left out; the last is always shown
    assert drawn.count("\n") == 1
    assert drawn.endswith("\n")


def test_nothing_to_do_is_done() -> None:
    out = io.StringIO()
    Meter(out)(0, 0, "x")
    assert out.getvalue().startswith("100%")
