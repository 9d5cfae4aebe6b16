"""The reader of tests/fakes as a process, and batteries that are asked of it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from harness.recall import Settings
from harness.recall.conversation import Shape
from slimserve.client_faults import Endpoint

ROOT = Path(__file__).resolve().parents[2]
READER = ROOT / "tests" / "fakes" / "reader.py"
CACHE_TOKENS = 20_000

# The standard battery over short documents, with an eviction.
SHORT = replace(Settings(), shapes=(Shape(400),), churn_tokens=CACHE_TOKENS + 10_000)


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
