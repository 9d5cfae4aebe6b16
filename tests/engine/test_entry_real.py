"""What the entry adds to the engine's processes, beside the installed torch and torchvision."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL = "from slimserve.engine import torchvision_cpu; torchvision_cpu.install()\n"
LOOK = """
import importlib.util, sys
assert importlib.util.find_spec("torchvision") is not None
assert "torch" not in sys.modules, "looking for torchvision imported torch"
"""
USE = """
import torch
import torchvision.transforms.v2.functional as functional
print(tuple(functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


def test_torchvision_imports_and_works() -> None:
    done = run(INSTALL + LOOK + INSTALL + USE)
    assert done.stdout == "(3, 4, 4)\n", done.stderr


def test_the_hook_is_still_needed() -> None:
    # When this fails, torch and torchvision fit each other by themselves, and the hook can go.
    done = run("import torch; assert torch.version.cuda is None\n" + USE)
    assert "torchvision::nms does not exist" in done.stderr


def test_the_registry_inspects_through_our_process() -> None:
    code = """
from slimserve.engine import entry
entry.prepare()
from vllm.model_executor.models import registry
print(registry._SUBPROCESS_COMMAND[1:])
print(registry._run_in_subprocess(lambda: 6 * 7))
"""
    done = run(code)
    assert done.stdout.splitlines()[-2:] == ["['-P', '-m', 'slimserve.engine.inspection']", "42"], done.stderr[-2000:]


def test_what_a_client_repeats_is_bounded_before_the_engine_searches_it() -> None:
    code = """
from slimserve.engine import entry
entry.prepare()
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
for run in ("/a", " ", "/a-", "/aaaa", "\\n", 'File "', " at 0x", "/home/a."):
    said = create_error_response(f"The model `{run * 100_000}` does not exist.").error.message
    assert len(said) < 20_000, run
print(create_error_response("weights at /home/a/b.bin, code in /a/b/c.py: no such model `x`").error.message)
"""
    done = run(code)
    last = done.stdout.splitlines()[-1:]
    assert last == ["weights at <path>, code in <path>: no such model `x`"], done.stderr[-2000:]
