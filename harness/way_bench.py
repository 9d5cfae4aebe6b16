"""What the way through `--serve` costs in tokens a second: one engine, asked through its endpoint and without it.

    python -m harness.way_bench [--pairs 200] [--streams 1] [--tokens 16] [--port 8014]

Two engines beside each other disturb each other more than what is looked for here, and one that waits is slow when its
turn comes. So one engine answers both sides: requests go by turns to the public address, past the door, and to the
engine's private socket, where the door lets everything pass unseen, as if it were not there. What is left of `--serve`
is its supervisor, whose processor time is counted beside. The intervals are those of the median and of the geometric
mean of paired ratios. Prints JSON, when it is interrupted of what there is; claims nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.host import host
from harness.serve_bench import PROFILE, ROOT, WORDS, first_token_seconds
from harness.stats import rate_ratio


class Unix(http.client.HTTPConnection):
    """A connection over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=120)
        self._path = path

    def connect(self) -> None:
        """Connect."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Side:
    """One way to the engine: as many kept connections as there are streams."""

    def __init__(self, connections: list[http.client.HTTPConnection]) -> None:
        self._connections = connections
        self.rates: list[float] = []

    def batch(self, prompts: list[str], tokens: int) -> None:
        """Ask for `tokens` tokens on each connection at once, and note the tokens a second."""
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            begun = time.perf_counter()
            counted = sum(pool.map(complete, self._connections, prompts, [tokens] * len(prompts)))
            seconds = time.perf_counter() - begun
        if counted != tokens * len(prompts):
            sys.exit(f"{counted} tokens came where {tokens * len(prompts)} were asked for: the run is void")
        self.rates.append(round(counted / seconds, 3))


def complete(connection: http.client.HTTPConnection, prompt: str, tokens: int) -> int:
    """One completion of `tokens` tokens; returns those that `usage` counts."""
    body = {"model": PROFILE, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return int(json.loads(connection.getresponse().read())["usage"]["completion_tokens"])


def processor_seconds(pid: int) -> float:
    """What a process has had of the processor, its threads included and its children not."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run the benchmark with this process's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--port", type=int, default=8014)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="slimserve-way-") as state:
        command = [sys.executable, "-m", "slimserve", PROFILE, "--serve", "--port", str(args.port), "--page-port", "0"]
        null, environment = subprocess.DEVNULL, {**os.environ, "SLIMSERVE_STATE": state}
        server = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=null, stderr=null)
        sides: dict[str, Side] = {}
        seconds = used = 0.0
        try:
            first_token_seconds(args.port, time.perf_counter(), server)
            (control,) = Path(state).glob("runs/*/engine.sock")
            streams = range(args.streams)
            sides = {
                "served": Side([http.client.HTTPConnection("127.0.0.1", args.port, timeout=120) for _ in streams]),
                "bare": Side([Unix(control) for _ in streams]),
            }
            begun, used_before = time.perf_counter(), processor_seconds(server.pid)
            with contextlib.suppress(KeyboardInterrupt):
                for pair in range(args.pairs):
                    for name in sorted(sides, reverse=pair % 2 == 0):
                        prompts = [" ".join(rng.choices(WORDS, k=24)) for _ in range(args.streams)]
                        sides[name].batch(prompts, args.tokens)
            seconds, used = time.perf_counter() - begun, processor_seconds(server.pid) - used_before
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(120)
    rates = {name: side.rates for name, side in sides.items()}
    pairs = min(map(len, rates.values()), default=0)
    print(
        json.dumps(
            {
                "profile": PROFILE,
                **host(),
                **rate_ratio(rates["served"][:pairs], rates["bare"][:pairs]),
                "pairs": pairs,
                "streams": args.streams,
                "tokens": args.tokens,
                "seconds": round(seconds, 1),
                "supervisor_processor_seconds": round(used, 2),
                "rate_samples": rates,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
