"""What `make serve` costs over the bare engine: time to the first token, and tokens a second.

    python -m harness.serve_bench [--rounds 4] [--pairs 24] [--streams 4] [--tokens 64] [--port 8010]

The two sides: `make serve`, and the same command line and environment (as `slimserve --plan --json` prints them)
started by hand without a supervisor and without the door. First each is started and stopped in turn, the order
swapped from round to round, and timed from its start to the first token of a real completion. Then both run at once,
on two ports, and batches of streams go to one and the other in turn: the machine's moods then hit both sides of each
pair, and the interval is that of the median of paired ratios. Whoever's turn it is not is halted meanwhile: the threads
of an idle engine spin for a while, on the cores of the other. Nothing is claimed by this program; it prints JSON, of
what it has when it is interrupted.
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
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.host import host
from harness.stats import rate_ratio
from slimserve.engine import procfs

ROOT = Path(__file__).resolve().parent.parent
PROFILE = "smollm2-135m-bf16-cpu"
DEADLINE_SECONDS = 300.0
# Who asks more often slows the start of the side that answers.
POLL_SECONDS = 0.25
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


def plan_of(program: str) -> dict[str, Any]:
    """What `slimserve --plan --json` prints for the profile."""
    show = [program, PROFILE, "--plan", "--json"]
    plan: dict[str, Any] = json.loads(subprocess.run(show, check=True, capture_output=True).stdout)
    return plan


def bare_argv(argv: list[str], port: int) -> list[str]:
    """The command with a port of its own in the place of the supervisor's socket and the door."""
    rest = list(argv)
    for flag in ("--uds", "--middleware"):
        place = rest.index(flag)
        del rest[place : place + 2]
    return [*rest, "--host", "127.0.0.1", "--port", str(port)]


def first_token_seconds(port: int, start: float, process: subprocess.Popen[bytes]) -> float:
    """Seconds from `start` to the first token, asking until there is one."""
    while time.perf_counter() - start < DEADLINE_SECONDS:
        if process.poll() is not None:
            sys.exit(f"the server ended with {process.returncode} before its first token")
        try:
            if complete(port, "Hello", 1) == 1:
                return time.perf_counter() - start
        except (OSError, ValueError, KeyError, http.client.HTTPException):
            time.sleep(POLL_SECONDS)
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


@dataclass(frozen=True)
class Server:
    """A server that answers: its first process, its port, and the seconds from its start to its first token."""

    process: subprocess.Popen[bytes]
    port: int
    seconds: float

    def signal_all(self, number: int) -> None:
        """Signal each of its processes."""
        living, family = list(procfs.living()), [self.process.pid]
        for pid in family:
            family += [child.pid for child in living if child.parent == pid]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@contextlib.contextmanager
def halted(servers: Sequence[Server]) -> Iterator[None]:
    """None of them runs meanwhile."""
    try:
        for server in servers:
            server.signal_all(signal.SIGSTOP)
        yield
    finally:
        for server in servers:
            server.signal_all(signal.SIGCONT)


@contextlib.contextmanager
def running(start: Callable[[int], subprocess.Popen[bytes]], port: int) -> Iterator[Server]:
    """A server on `port`, stopped at the end."""
    begin = time.perf_counter()
    process = start(port)
    try:
        yield Server(process, port, first_token_seconds(port, begin, process))
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def first_tokens(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of the seconds to the first token; nothing while a side has none."""
    if not all(samples.values()):
        return {}
    medians = {side: statistics.median(values) for side, values in samples.items()}
    more = [served - bare for served, bare in zip(samples["served"], samples["bare"], strict=False)]
    return {
        "first_token_s": {side: round(value, 2) for side, value in medians.items()},
        "first_token_difference_s": round(medians["served"] - medians["bare"], 2),
        "first_token_difference_of_a_round_s": round(statistics.median(more), 2),
    }


def in_turns(served: Server, bare: Server, args: argparse.Namespace, rates: dict[str, list[float]]) -> None:
    """Batches on one and on the other; while one answers, the other is halted."""
    rng = random.Random(1)
    turns = {"served": (served, bare), "bare": (bare, served)}
    for pair in range(args.pairs):
        for side in sorted(turns, reverse=pair % 2 == 0):
            server, other = turns[side]
            with halted([other]):
                # An engine that has just waited for the other's turn is slow at first; that is not compared.
                batch_rate(server.port, rng, args.streams, args.tokens // 4)
                rates[side].append(round(batch_rate(server.port, rng, args.streams, args.tokens), 2))


def main() -> None:
    """Run the benchmark with this process's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="starts of each side; 0 measures rates alone")
    parser.add_argument("--pairs", type=int, default=24, help="pairs of batches")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--port", type=int, default=8010)
    args = parser.parse_args()
    program = str(Path(sys.executable).with_name("slimserve"))

    def by_make(port: int) -> subprocess.Popen[bytes]:
        return start_quietly(["make", "-s", "serve", f"PORT={port}"], dict(os.environ))

    plan = plan_of(program)

    def by_hand(port: int) -> subprocess.Popen[bytes]:
        passed = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
        return start_quietly(bare_argv(plan["argv"], port), {**passed, **plan["environment"]})

    sides: dict[str, Callable[[int], subprocess.Popen[bytes]]] = {"served": by_make, "bare": by_hand}
    first: dict[str, list[float]] = {"served": [], "bare": []}
    rates: dict[str, list[float]] = {"served": [], "bare": []}
    # A shell has what it starts in the background ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        for turn in range(args.rounds):
            for side in sorted(sides, reverse=turn % 2 == 0):
                with running(sides[side], args.port) as server:
                    first[side].append(round(server.seconds, 2))
                print(f"round {turn} {side}: first token after {server.seconds:.2f} s", file=sys.stderr)
        if args.pairs:
            with running(by_make, args.port) as served, running(by_hand, args.port + 1) as bare:
                in_turns(served, bare, args, rates)
    complete_pairs = min(map(len, rates.values()))  # of one that was interrupted, half may be there
    result = {
        "profile": PROFILE,
        **host(),
        **first_tokens(first),
        **rate_ratio(rates["served"][:complete_pairs], rates["bare"][:complete_pairs]),
        "streams": args.streams,
        "tokens": args.tokens,
        "first_token_samples_s": first,
        "rate_samples": rates,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
