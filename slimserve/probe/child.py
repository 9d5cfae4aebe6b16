"""Run the process that asks the driver, and outlive whatever happens in it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from slimserve.probe.problems import LOOK, Problem
from slimserve.probe.text import printable

# -P: a json.py in the working directory must not be imported in the place of the real one.
COMMAND = (sys.executable, "-P", "-m", "slimserve.probe.nvml")
DEADLINE_SECONDS = 10.0


def ask_driver(command: Sequence[str], deadline_seconds: float) -> tuple[dict[str, Any], Problem | None]:
    """Ask the driver in a child process.

    Args:
        command: what asks; it prints what `slimserve.probe.nvml` does.
        deadline_seconds: after this long the driver counts as hung.

    Returns:
        The answer, empty when there is none, and the problem, None when there is an answer.
    """
    import signal
    import subprocess

    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # a Ctrl-C is the caller's to handle
        )
    except OSError as error:
        return {}, Problem(
            f"GPUs cannot be read: the process that asks the driver did not start: {error.strerror}",
            "the driver is asked in a process of its own, so that a hang or a crash in it ends there",
            f"check that {printable(command[0])} can be run",
        )
    hung = False
    try:
        output = child.communicate(timeout=deadline_seconds)[0]
    except subprocess.TimeoutExpired:
        hung = True
        child.kill()
        try:
            output = child.communicate(timeout=1.0)[0]
        except subprocess.TimeoutExpired as error:
            # A process that is stuck inside the driver cannot be killed. It is left behind, and so is its pipe.
            output = error.output or b""
            if child.stdout:
                child.stdout.close()
            child.poll()
    except BaseException:
        child.kill()
        raise
    answer, call = _parse(output)
    if answer is not None:
        return answer, None
    at = f" in {call}" if call else ""
    if hung:
        return {}, Problem(
            f"GPUs cannot be read: the driver did not answer within {deadline_seconds:g} s{at}",
            "a driver that hangs here hangs the engine too",
            f"{LOOK}; then reset the GPU or restart the machine",
        )
    code = child.returncode
    end = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return {}, Problem(
        f"GPUs cannot be read: the process that asks the driver {end}{at}",
        "the driver library is the only source for what the GPUs are",
        f"{LOOK}; a library and a driver of different versions do this",
    )


def _parse(output: bytes) -> tuple[dict[str, Any] | None, str]:
    """The answer, if there is one, and the last call that was begun."""
    call = ""
    for line in output.decode("utf-8", "replace").splitlines():
        try:
            data = json.loads(line)
        except ValueError:
            continue
        if isinstance(data, dict) and isinstance(data.get("answer"), dict):
            return data["answer"], call
        if isinstance(data, dict) and isinstance(data.get("at"), list):
            name, gpu = data["at"]
            call = name if gpu is None else f"{name} of GPU {gpu}"
    return None, call
