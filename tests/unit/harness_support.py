"""The fake OpenAI server as a process, for the tests of the harness."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from harness.sample import Conversation, Job

MODEL_SERVER = Path(__file__).resolve().parent.parent / "fakes" / "model_server.py"


class ModelServer:
    """A fake server, as long as `with` lasts.

    Args:
        switches: of `tests/fakes/model_server.py`, for all requests.
    """

    def __init__(self, **switches: Any) -> None:
        argv = [sys.executable, str(MODEL_SERVER), "--set", json.dumps(switches)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.port = int(self.process.stdout.readline().split()[-1])
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> ModelServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        _, self.said = self.process.communicate(timeout=30)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return json.load(answer)

    @property
    def state(self) -> dict[str, Any]:
        """What it saw."""
        return dict(self.get("/fake/state"))


def job(name: str, /, *, fake: dict[str, Any] | None = None, **more: Any) -> Job:
    """A completion of exactly 8 tokens after a prompt of 5, which the server is to treat so."""
    wanted = {"phase": "measure", "max_tokens": 8, "prompt_ids": (1, 2, 3, 4, 5), "asked_prompt_tokens": 5}
    return Job(name, **{**wanted, "ignore_eos": True, "sampling": {"fake": fake or {}}, **more})


def alone(*jobs: Job) -> list[Conversation]:
    """Each job a conversation of its own."""
    return [Conversation((one,)) for one in jobs]
