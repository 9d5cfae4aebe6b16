"""How long clients go without an engine: a start from nothing, against the recovery after `kill -9` of the engine.

    python -m harness.recovery_bench [--rounds 5] [--port 8012] [--state FOLDER]

Each round starts `slimserve PROFILE --serve`, takes the time to the first token of a completion, kills the engine's
API server with SIGKILL, takes the time to the next first token, and stops. In between clients ask five times a second;
what they met is counted, and how long the slowest answer took. Two runs of one thing in one round: the machine's moods
hit both sides. Nothing is claimed by this program; it prints JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness.host import host
from harness.serve_bench import DEADLINE_SECONDS, PROFILE, ROOT, complete

CLIENTS = 2


class Clients:
    """Threads that ask for the list of models again and again, as `with` lasts."""

    def __init__(self, port: int) -> None:
        self.met: Counter[str] = Counter()
        self.slowest = 0.0
        self._port, self._over, self._lock = port, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.2):  # often enough to meet every state, too seldom to slow the start down
            begun = time.perf_counter()
            met = self._ask()
            with self._lock:
                self.met[met] += 1
                self.slowest = max(self.slowest, time.perf_counter() - begun)

    def _ask(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request("GET", "/v1/models")
            response = connection.getresponse()
            response.read()
            known = response.status != 503 or response.getheader("Retry-After", "").isdecimal()
            return str(response.status) if known else "503 without Retry-After"
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()


def until_token(port: int, begun: float, server: subprocess.Popen[bytes]) -> float:
    """Seconds from `begun` to the first token of a completion."""
    while time.perf_counter() - begun < DEADLINE_SECONDS:
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode} before its first token")
        try:
            if complete(port, "Hello", 1) == 1:
                return time.perf_counter() - begun
        except (OSError, ValueError, KeyError, http.client.HTTPException):
            time.sleep(0.05)
    sys.exit("no token within the deadline")


def engine_pid(state: Path) -> int:
    """The API server of the one engine that runs."""
    (record,) = state.glob("runs/*/engine.json")
    return int(json.loads(record.read_text())["pid"])


def one_round(port: int, state: Path) -> tuple[float, float, Clients]:
    """A start, a kill and a recovery; returns the seconds of the two, and what the clients met from the kill on."""
    command = [sys.executable, "-m", "slimserve", PROFILE, "--serve", "--port", str(port), "--page-port", "0"]
    environment = {**os.environ, "SLIMSERVE_STATE": str(state)}
    begun = time.perf_counter()
    server = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        start = until_token(port, begun, server)
        with Clients(port) as clients:
            killed = time.perf_counter()
            os.kill(engine_pid(state), signal.SIGKILL)
            recovery = until_token(port, killed, server)
        return start, recovery, clients
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(120)


def main() -> None:
    """Run the benchmark with this process's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=8012)
    parser.add_argument("--state", type=Path, help="folder for logs and records; a temporary one when not given")
    args = parser.parse_args()
    starts: list[float] = []
    recoveries: list[float] = []
    met: Counter[str] = Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory(prefix="slimserve-bench-") as temporary:
        for turn in range(args.rounds):
            start, recovery, clients = one_round(args.port, args.state or Path(temporary))
            starts.append(round(start, 2))
            recoveries.append(round(recovery, 2))
            met += clients.met
            slowest = max(slowest, clients.slowest)
            print(f"round {turn}: start {start:.2f} s, recovery {recovery:.2f} s", file=sys.stderr)
    differences = [after - before for before, after in zip(starts, recoveries, strict=True)]
    result: dict[str, Any] = {
        "profile": PROFILE,
        **host(),
        "start_s": statistics.median(starts),
        "recovery_s": statistics.median(recoveries),
        "recovery_minus_start_s": round(statistics.median(differences), 2),
        "clients_met": dict(sorted(met.items())),
        "slowest_answer_s": round(slowest, 3),
        "start_samples_s": starts,
        "recovery_samples_s": recoveries,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
