"""One step of set-up: a command, its log, its failure. Used by setup_venv.py; standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# A user's settings that would send packages elsewhere than into .venv, or other modules into it.
FOREIGN_VARIABLES = (
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_REQUIRE_VIRTUALENV",
)


class SetupError(Exception):
    """Set-up cannot go on. Carries what, why, do; `code` is the exit code."""

    def __init__(self, what: str, why: str, do: str, code: int = 1) -> None:
        super().__init__(f"{what}\n  why: {why}\n  do:  {do}")
        self.code = code


def say(text: str) -> None:
    """One line for the person, on stderr."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


class StepFailed(SetupError):
    """A command of set-up failed. `output` is what it printed."""

    def __init__(self, title: str, output: str, returncode: int) -> None:
        self.output = output
        tail = "\n".join(f"    {line}" for line in output.strip().splitlines()[-12:])
        offline = any(sign in output for sign in ("Retrying (", "NewConnectionError", "Temporary failure in name"))
        super().__init__(
            f"'{title}' failed with exit code {returncode}",
            ("the package index did not answer" if offline else "its last lines were") + f"\n{tail}",
            ("mend the connection or pip's index settings" if offline else "mend that (all of it: .stamps/setup.log)")
            + ", then the same again",
        )
        self.offline = offline
        self.began_to_install = "Installing collected packages" in output


class Step:
    """One command with its output in a log: a line when it starts and ends, the log's tail when it fails.

    Args:
        root: the folder that commands run in.
        log: the file that their output is added to.
        lock: a file descriptor that they inherit, so that set-up's lock is held while any of them lives.
    """

    def __init__(self, root: Path, log: Path, lock: int) -> None:
        self.root = root
        self.log = log
        self.lock = lock
        self.environment = {key: value for key, value in os.environ.items() if key not in FOREIGN_VARIABLES}
        self.environment |= {"PIP_USER": "0", "PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.environment |= {"PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore"}

    def run(self, title: str, command: Sequence[str | Path]) -> str:
        """Run `command`; its output. A terminal sees the latest line of it.

        Raises:
            StepFailed: on any exit code but 0.
        """
        start, live = time.monotonic(), sys.stderr.isatty()
        say(title)
        lines: list[str] = []
        with (
            open(self.log, "a", encoding="utf-8") as log,
            subprocess.Popen(
                [str(word) for word in command],
                cwd=self.root,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(self.lock,),
                text=True,
                errors="replace",
            ) as process,
        ):
            assert process.stdout is not None  # stdout=PIPE
            try:
                for line in process.stdout:
                    log.write(line)
                    lines.append(line)
                    if live:
                        width = shutil.get_terminal_size().columns - 1
                        sys.stderr.write(f"\r\033[K{line.strip()[:width]}\r")
                        sys.stderr.flush()
            except BaseException:
                process.terminate()
                raise
            finally:
                if live:
                    sys.stderr.write("\r\033[K")
        if process.returncode != 0:
            raise StepFailed(title, "".join(lines), process.returncode)
        say(f"  done in {time.monotonic() - start:.0f} s")
        return "".join(lines)


def install_torch(step: Step, pip: Sequence[str | Path], lock_file: Path, torch_index: str = TORCH_INDEX) -> None:
    """Install the one wheel of torch: from pip's own index or, when that has no such version, from PyTorch's.

    Raises:
        SetupError: neither has it, or what came does not have the locked hash.
    """
    command = [*pip, "-r", lock_file]
    try:
        step.run("torch for the CPU (about 190 MB)", command)
    except StepFailed as failure:
        # Only the index's own "no" leads on: a broken connection or a wrong hash would be hidden by a second source.
        if failure.offline or "No matching distribution found for torch==" not in failure.output:
            raise
        say("  the configured index has no such version of torch")
        step.run(f"torch for the CPU from {torch_index}", [*command, "--index-url", torch_index])
