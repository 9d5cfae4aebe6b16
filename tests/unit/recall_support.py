"""The reader of tests/fakes, as a process or without one, and batteries that are asked of it."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from harness.recall import Settings, asking
from harness.recall.conversation import Shape
from slimserve.client_faults import Endpoint

ROOT = Path(__file__).resolve().parents[2]
READER = ROOT / "tests" / "fakes" / "reader.py"
CACHE_TOKENS = 10_000

# The standard battery over short documents, with an eviction. One conversation at a time: what a mode does by chance it
# then does in the same places each time.
SHORT = replace(Settings(), shapes=(Shape(400),), churn_tokens=CACHE_TOKENS + 5_000, concurrency=1)


@contextlib.contextmanager
def reader(mode: str = "honest", *quirks: str) -> Iterator[Endpoint]:
    """A server in that mode."""
    argv = [sys.executable, str(READER), "--mode", mode, "--cache-tokens", str(CACHE_TOKENS)]
    for quirk in quirks:
        argv += ["--quirk", quirk]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().split()[-1]
        yield Endpoint(f"http://127.0.0.1:{port}/v1", "reader")
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class NoThreading:
    """Deadlines that nobody keeps."""

    class Timer:
        def __init__(self, seconds: float, function: object) -> None:
            self.daemon = False

        def start(self) -> None: ...

        def cancel(self) -> None: ...


@contextlib.contextmanager
def reading(mode: str = "honest", *quirks: str) -> Iterator[Endpoint]:
    """The same within this process: a battery takes a fifth of the time, so that twenty can be asked of each mode."""
    spec = importlib.util.spec_from_file_location("reader", READER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.Reader(mode, CACHE_TOKENS, 1, list(quirks))

    def stream_events(endpoint: Endpoint, path: str, body: dict[str, Any], stop: object) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = model.events(body)
        return events

    # A thread for each deadline would take longer than the answer.
    with mock.patch.object(asking, "stream_events", stream_events), mock.patch.object(asking, "threading", NoThreading):
        yield Endpoint("http://in-this-process/v1", "reader")
