"""The deadlines of connections cost no timers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slimserve.admission.deadline import Deadline


class Clock:
    """A loop's clock and timers, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, then: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, then))
        return self.timers[-1]

    def move(self, now: float) -> None:
        while due := [timer for timer in self.timers if timer.when <= now and not timer.over]:
            first = min(due, key=lambda timer: timer.when)
            self.now, first.over = first.when, True
            first.then()
        self.now = now


class Timer:
    def __init__(self, when: float, then: Callable[[], None]) -> None:
        self.when, self.then, self.over = when, then, False

    def cancel(self) -> None:
        self.over = True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_deadline_that_is_moved_on_costs_no_timer(clock: Clock) -> None:
    called: list[float] = []
    deadline = Deadline(clock)  # type: ignore[arg-type]  # what it uses of a loop
    for now in range(9):
        clock.move(float(now))
        deadline.set(10, lambda: called.append(clock.now))
    assert len(clock.timers) == 1
    clock.move(17.9)
    assert not called
    assert deadline.is_set
    clock.move(100.0)
    assert called == [18.0]
    assert not deadline.is_set


def test_a_deadline_that_comes_nearer_is_kept(clock: Clock) -> None:
    called: list[str] = []
    deadline = Deadline(clock)  # type: ignore[arg-type]
    deadline.set(75, lambda: called.append("far"))
    deadline.set(10, lambda: called.append("near"))
    clock.move(10.0)
    assert called == ["near"]
    clock.move(100.0)
    assert called == ["near"]


def test_a_deadline_that_is_lifted_or_over(clock: Clock) -> None:
    called: list[str] = []
    deadline = Deadline(clock)  # type: ignore[arg-type]
    deadline.set(10, lambda: called.append("lifted"))
    deadline.lift()
    assert not deadline.is_set
    clock.move(20.0)
    deadline.set(10, lambda: called.append("again"))
    clock.move(30.0)
    assert called == ["again"]
    deadline.set(10, lambda: called.append("over"))
    deadline.end()
    assert all(timer.over for timer in clock.timers)
    clock.move(50.0)
    assert called == ["again"]
