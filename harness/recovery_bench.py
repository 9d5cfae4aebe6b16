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
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from harness.clients import Clients
from harness.host import host
from harness.serve_bench import PROFILE, ROOT, first_token_seconds

CLIENTS = 2
# Often enough to meet every state, too seldom to slow the start down.
PAUSE_SECONDS = 0.2


def ask(port: int) -> str:
    """Ask for the list of models; returns the status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/v1/models")
        response = connection.getresponse()
        response.read()
        known = response.status != 503 or response.getheader("Retry-After", "").isdecimal()
        return str(response.status) if known else "503 without Retry-After"
    finally:
        connection.close()


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
        start = first_token_seconds(port, begun, server)
        with Clients(partial(ask, port), CLIENTS, PAUSE_SECONDS) as clients:
            killed = time.perf_counter()
            os.kill(engine_pid(state), signal.SIGKILL)
            recovery = first_token_seconds(port, killed, server)
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
    met: Counter[object] = Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory(prefix="slimserve-bench-") as temporary:
        for turn in range(args.rounds):
            start, recovery, clients = one_round(args.port, args.state or Path(temporary))
            starts.append(round(start, 2))
            recoveries.append(round(recovery, 2))
            met += clients.met
            slowest = max(slowest, clients.longest_seconds)
            print(f"round {turn}: start {start:.2f} s, recovery {recovery:.2f} s", file=sys.stderr)
    differences = [after - before for before, after in zip(starts, recoveries, strict=True)]
    result: dict[str, Any] = {
        "profile": PROFILE,
        **host(),
        "start_s": statistics.median(starts),
        "recovery_s": statistics.median(recoveries),
        "recovery_minus_start_s": round(statistics.median(differences), 2),
        "clients_met": {str(what): count for what, count in sorted(met.items(), key=str)},
        "slowest_answer_s": round(slowest, 3),
        "start_samples_s": starts,
        "recovery_samples_s": recoveries,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
