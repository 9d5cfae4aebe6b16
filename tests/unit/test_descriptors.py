"""Many descriptors, few descriptors, and time that does not count."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import pytest
from supervisor_support import ROOT

from slimserve.engine import descriptors
from slimserve.engine.descriptors import wait_awake, wait_readable
from slimserve.engine.waiting import Question, wait


def test_descriptors_beyond_those_that_select_knows() -> None:
    with contextlib.ExitStack() as still_open:
        for _ in range(1030):
            still_open.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        reader, writer = os.pipe()
        still_open.callback(os.close, reader)
        assert reader > 1024
        assert not wait_readable([reader], 0.01)
        os.close(writer)
        assert wait_readable([reader], None)
        with Question(lambda cancelled: "the answer") as question:
            assert wait(question, None, None, 60.0) == "answered"
            assert question.result == "the answer"


def test_a_wait_is_not_over_too_early() -> None:
    reader, writer = os.pipe()
    begun = time.monotonic()
    assert not wait_readable([reader], 0.0507)
    assert time.monotonic() - begun >= 0.0507
    os.close(reader)
    os.close(writer)


def test_time_asleep_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def slept(handles: object, seconds: float) -> bool:
        """Each wait takes an hour, as for a process that is stopped in it."""
        waits.append(seconds)
        return len(waits) == 4

    monkeypatch.setattr(descriptors, "wait_readable", slept)
    assert wait_awake(0, 3.5)
    assert waits == [1.0, 1.0, 1.0, 0.5]
    waits.clear()
    assert not wait_awake(0, 3.0)


def test_the_limit_is_raised_to_what_is_allowed() -> None:
    code = (
        "import resource; from slimserve.engine import descriptors\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 700)); descriptors.raise_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "(700, 700)\n", done.stderr
