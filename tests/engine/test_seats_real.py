"""Every seat is in the pinned engine as our operation was made for it, and takes what the engine's callers give."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from quixicore.engine import SEATS

# In a process of its own: the modules are many, and some of them bind names of torch's.
_LOOK = """
import importlib, inspect, json, sys
from slimserve.engine import torchvision_cpu
torchvision_cpu.install()
import vllm.models.qwen4_exp.nvidia.model
from quixicore import engine
found = {}
for seat in engine.SEATS:
    importlib.import_module(seat.module)
    owner, name = engine.find(seat)
    if seat.way in ("addition", "name"):
        found[seat.name] = [engine.digest(owner) if seat.way == "name" else "", [], []]
        continue
    real = vars(owner)[name]
    module, _, ours = seat.ours.partition(":")
    ours = getattr(importlib.import_module(f"quixicore.{module}"), ours)
    names = [list(inspect.signature(each).parameters) for each in (real, ours)]
    found[seat.name] = [engine.digest(real), *names]
json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("seats") / "found.json"
    done = subprocess.run([sys.executable, "-c", _LOOK, str(out)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(out.read_text()))


@pytest.mark.parametrize("seat", SEATS, ids=lambda seat: seat.name)
def test_a_seat_is_as_it_was(seat: Any, found: dict[str, Any]) -> None:
    digest, theirs, ours = found[seat.name]
    assert digest == seat.digest
    if seat.way == "function":  # callers may name what they give
        assert ours == theirs
    elif seat.way == "kernel":  # they give it in order, and tuning by name
        named = [name for name in theirs if name.isupper()]
        given = len(theirs) - len(named)
        positional = [name for name in ours if not name.isupper() and name != "_tuning"]
        assert len(positional) == given
