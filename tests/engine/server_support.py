"""`slimserve PROFILE --serve` as a process that tests can talk to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from slimserve import paths

ROOT = Path(__file__).resolve().parents[2]
PROFILE = "smollm2-135m-bf16-cpu"
KEY = "sk-a-key-of-the-tests"


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def environment_of(home: Path, key: str | None = KEY) -> dict[str, str]:
    """The variables of a command whose state lies in `home` and whose caches are the user's own."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "SLIMSERVE_CACHE": str(paths.cache_folder(os.environ)),
        "SLIMSERVE_STATE": str(home / "state"),
        "PYTHONPATH": str(ROOT),
    }
    return environment if key is None else {**environment, "SLIMSERVE_API_KEY": key}


@dataclass
class Server:
    """`slimserve PROFILE --serve` as a process, its words read as they come."""

    process: subprocess.Popen[str]
    port: int
    environment: dict[str, str]
    words: list[str] = field(default_factory=list)
    spoke: threading.Condition = field(default_factory=threading.Condition)
    silent: bool = False

    @classmethod
    def start(cls, home: Path, *arguments: str, key: str | None = KEY) -> Server:
        port = free_port()
        environment = environment_of(home, key)
        command = [sys.executable, "-m", "slimserve", PROFILE, "--serve", "--port", str(port), *arguments]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=home
        )
        server = cls(process, port, environment)
        threading.Thread(target=server._listen, daemon=True).start()
        return server

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.spoke:
                self.words.append(line)
                self.spoke.notify_all()
        with self.spoke:
            self.silent = True
            self.spoke.notify_all()

    def wait_for(self, text: str, seconds: float = 240.0) -> str:
        """The first line that holds `text`."""
        with self.spoke:
            self.spoke.wait_for(lambda: self.silent or any(text in line for line in self.words), seconds)
            found = [line for line in self.words if text in line]
        assert found, f"never said {text!r}:\n{''.join(self.words)}"
        return found[0]

    @property
    def engine_log(self) -> Path:
        """What the engine of the one endpoint said."""
        (log,) = Path(self.environment["SLIMSERVE_STATE"]).glob("runs/*/engine.log")
        return log

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)
