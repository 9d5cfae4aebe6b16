"""What `make serve` costs over the bare engine: time to the first token, and tokens a second.

    python -m harness.serve_bench [--rounds 4] [--requests 24] [--tokens 64] [--port 8010]

Each round starts both sides, the order swapped from round to round: `make serve`, and the same command line and
environment (as `slimserve --plan --json` prints them) started by hand without supervisor. A side is timed from its
start to the first token of a real completion, then streams batches of requests, and is stopped. The ratio of the
rates has a bootstrap interval over batches, drawn round by round. Nothing is claimed by this program; it prints JSON.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROFILE = "smollm2-135m-bf16-cpu"
DEADLINE_SECONDS = 300.0
WORDS = "river stone window market letter garden bridge candle winter harbour copper meadow silver orchard".split()


def complete(port: int, prompt: str, tokens: int) -> int:
    """One completion of exactly `tokens` tokens; returns the tokens that `usage` counts.

    Raises:
        OSError, ValueError: the endpoint is not (yet) able to answer.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"model": PROFILE, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return int(answer["usage"]["completion_tokens"])


def start_quietly(argv: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a server in a process group of its own, its output dropped."""
    null = subprocess.DEVNULL
    return subprocess.Popen(argv, env=env, cwd=ROOT, start_new_session=True, stdout=null, stderr=null)


def first_token_seconds(port: int, start: float, process: subprocess.Popen[bytes]) -> float:
    """Seconds from `start` to the first token, asking until there is one."""
    while time.perf_counter() - start < DEADLINE_SECONDS:
        if process.poll() is not None:
            sys.exit(f"the server ended with {process.returncode} before its first token")
        try:
            if complete(port, "Hello", 1) == 1:
                return time.perf_counter() - start
        except (OSError, ValueError, KeyError, http.client.HTTPException):
            time.sleep(0.05)
    sys.exit("no token within the deadline")


def batch_rate(port: int, rng: random.Random, streams: int, tokens: int) -> float:
    """Tokens a second of `streams` concurrent completions with prompts of their own."""
    prompts = [" ".join(rng.choices(WORDS, k=24)) for _ in range(streams)]
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        start = time.perf_counter()
        counted = sum(pool.map(lambda prompt: complete(port, prompt, tokens), prompts))
        elapsed = time.perf_counter() - start
    if counted != streams * tokens:
        sys.exit(f"{counted} tokens came where {streams * tokens} were asked for: the run is void")
    return counted / elapsed


def measure(
    start: Callable[[], subprocess.Popen[bytes]], args: argparse.Namespace, rng: random.Random
) -> dict[str, Any]:
    """One side, once."""
    begin = time.perf_counter()
    process = start()
    try:
        first = first_token_seconds(args.port, begin, process)
        batch_rate(args.port, rng, args.streams, args.tokens)  # warms what the first token did not
        rates = [batch_rate(args.port, rng, args.streams, args.tokens) for _ in range(args.batches)]
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
    return {"first_token_s": first, "rates": rates}


def interval(served: list[list[float]], bare: list[list[float]], draws: int = 4000) -> tuple[float, float]:
    """95% bootstrap interval of the ratio of mean rates, rounds and batches drawn with replacement."""
    rng = random.Random(0)
    ratios = []
    for _ in range(draws):
        rounds = rng.choices(range(len(served)), k=len(served))
        mine = [value for index in rounds for value in rng.choices(served[index], k=len(served[index]))]
        other = [value for index in rounds for value in rng.choices(bare[index], k=len(bare[index]))]
        ratios.append(statistics.fmean(mine) / statistics.fmean(other))
    ratios.sort()
    return ratios[int(0.025 * draws)], ratios[int(0.975 * draws)]


def main() -> None:
    """Run the benchmark with this process's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--port", type=int, default=8010)
    args = parser.parse_args()
    program = str(Path(sys.executable).with_name("slimserve"))
    plan = json.loads(
        subprocess.run(
            [program, PROFILE, "--plan", "--json", "--port", str(args.port)], check=True, capture_output=True
        ).stdout
    )

    def by_make() -> subprocess.Popen[bytes]:
        return start_quietly(["make", "-s", "serve", f"PORT={args.port}"], dict(os.environ))

    def by_hand() -> subprocess.Popen[bytes]:
        passed = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
        return start_quietly(plan["argv"], {**passed, **plan["environment"]})

    sides: dict[str, Callable[[], subprocess.Popen[bytes]]] = {"served": by_make, "bare": by_hand}
    results: dict[str, list[dict[str, Any]]] = {"served": [], "bare": []}
    rng = random.Random(1)
    for turn in range(args.rounds):
        for side in sorted(sides, reverse=turn % 2 == 0):
            results[side].append(measure(sides[side], args, rng))
            print(f"round {turn} {side}: first token {results[side][-1]['first_token_s']:.2f} s, "
                  f"{statistics.fmean(results[side][-1]['rates']):.1f} tok/s", file=sys.stderr)  # fmt: skip
    first = {side: statistics.median(row["first_token_s"] for row in rows) for side, rows in results.items()}
    rates = {side: [row["rates"] for row in rows] for side, rows in results.items()}
    low, high = interval(rates["served"], rates["bare"])
    mean = {side: statistics.fmean(rate for row in rows for rate in row) for side, rows in rates.items()}
    ratio = mean["served"] / mean["bare"]
    print(
        json.dumps(
            {
                "profile": PROFILE,
                "rounds": args.rounds,
                "first_token_s": {side: round(value, 2) for side, value in first.items()},
                "first_token_difference_s": round(first["served"] - first["bare"], 2),
                "rate_ratio_served_to_bare": round(ratio, 4),
                "rate_ratio_95": [round(low, 4), round(high, 4)],
                "samples": results,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
