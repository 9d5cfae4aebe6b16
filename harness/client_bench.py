"""Whether the load client is what is measured: what it adds to a server whose moments of sending are known.

    python -m harness.client_bench [--streams 256] [--rate 10000] [--chunks 200] [--rounds 3]

The fake server sends `--rate` chunks a second over `--streams` streams and notes when it sent each; the client, on a
core of its own, notes when each arrived. Reported are the client's share of that core, how late its notes are, and by
how much its time to the first token and its inter-token latencies differ from the server's. Chunks leave either spread
over time or all streams' together, as an engine's steps send them. `aiohttp` is the same work by that library, with a
pool without limit. The server shares the machine: it has the other cores. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.client import Target, body_of, drive, run
from harness.host import host
from harness.sample import Conversation, Job

SERVER = Path(__file__).resolve().parent.parent / "tests" / "fakes" / "model_server.py"
# Per request: when its chunks arrived, on the monotonic clock.
Seen = dict[str, list[float]]


@contextlib.contextmanager
def serving(cores: set[int], **switches: Any) -> Iterator[tuple[int, int]]:
    """The fake server on these cores; yields its port and its process id."""
    argv = [sys.executable, str(SERVER), "--set", json.dumps(switches)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        os.sched_setaffinity(process.pid, cores)
        line = process.stdout.readline() if process.stdout else ""
        yield int(line.split()[-1]), process.pid
    finally:
        process.terminate()
        process.wait(30)


def times(port: int) -> dict[str, list[float]]:
    """When the server sent what."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/fake/times", timeout=60) as answer:
        found: dict[str, list[float]] = json.load(answer)
    return found


def jobs_of(streams: int, chunks: int) -> list[Job]:
    """A request for each stream."""
    ids = tuple(range(100))
    return [
        Job(f"{number}", "measure", chunks, prompt_ids=ids, asked_prompt_tokens=len(ids), ignore_eos=True)
        for number in range(streams)
    ]


async def by_drive(target: Target, jobs: Sequence[Job]) -> Seen:
    """The client that receipts rest on."""
    begun = time.perf_counter()
    samples = await drive(target, [Conversation((job,)) for job in jobs], concurrency=len(jobs), begun=begun)
    if broken := [sample.reason for sample in samples if sample.outcome != "ok"]:
        sys.exit(f"{len(broken)} of {len(samples)} samples are not ok: {broken[0]}")
    return {one.job: [begun + arrival_s for arrival_s in one.arrivals_s] for one in samples}


async def by_aiohttp(target: Target, jobs: Sequence[Job]) -> Seen:
    """The same with a client library, as most load clients are written."""
    import aiohttp

    seen: Seen = {}

    async def ask(session: aiohttp.ClientSession, job: Job) -> None:
        body, arrivals, unread = json.dumps(body_of(job, target)).encode(), list[float](), b""
        headers = {"X-Request-Id": job.id, "Content-Type": "application/json"}
        async with session.post(f"{target.url}/completions", data=body, headers=headers) as response:
            while data := await response.content.readany():
                moment = time.perf_counter()
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and line != b"data: [DONE]" and json.loads(line[5:])["choices"]:
                        arrivals.append(moment)
        seen[job.id] = arrivals

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(ask(session, job) for job in jobs))
    return seen


CLIENTS: dict[str, Callable[[Target, Sequence[Job]], Awaitable[Seen]]] = {"drive": by_drive, "aiohttp": by_aiohttp}


def quantiles(values: list[float], digits: int = 3) -> dict[str, float]:
    """p50, p99 and the largest, of seconds, in milliseconds."""
    ordered = sorted(values)
    places = {"p50": len(ordered) // 2, "p99": int(0.99 * len(ordered)), "max": len(ordered) - 1}
    return {name: round(1000 * ordered[place], digits) for name, place in places.items()}


def processor_s(pid: int) -> float:
    """Seconds that the process has had a core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def measure(name: str, together: bool, streams: int, rate: float, chunks: int, cores: set[int]) -> dict[str, Any]:
    """One run of one client against a server of its own."""
    with serving(cores, interval=streams / rate, delay=streams / rate, grid=together) as (port, pid):
        target = Target(f"http://127.0.0.1:{port}/v1", "fake")
        jobs = jobs_of(streams, chunks)
        begun, busy, server_busy = time.perf_counter(), time.process_time(), processor_s(pid)

        async def main() -> Seen:
            return await CLIENTS[name](target, jobs)

        seen = run(main())
        took, busy = time.perf_counter() - begun, time.process_time() - busy
        server_busy = processor_s(pid) - server_busy
        sent = times(port)
    late: list[float] = []
    first: list[float] = []
    itl: list[float] = []
    for one, arrivals in seen.items():
        if len(arrivals) != len(sent[one]):
            sys.exit(f"request {one}: {len(sent[one])} chunks were sent and {len(arrivals)} noted")
        late += [arrived - left for arrived, left in zip(arrivals, sent[one], strict=True)]
        first.append(arrivals[0] - sent[one][0])
        itl.append(abs((arrivals[-1] - arrivals[0]) - (sent[one][-1] - sent[one][0])) / (len(arrivals) - 1))
    return {
        "client": name,
        "chunks_leave": "together" if together else "spread",
        "chunks_a_second": round(sum(map(len, sent.values())) / took),
        "client_core_share": round(busy / took, 3),
        "server_core_share": round(server_busy / took, 3),
        "note_late_ms": quantiles(late),
        "first_token_late_ms": quantiles(first),
        "mean_itl_error_ms": quantiles(itl, 4),
    }


def main() -> None:
    """Run the benchmark with this process's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=10_000, help="chunks a second, of all streams together")
    parser.add_argument("--chunks", type=int, default=200, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("one core: the client would be measured together with the server; give this process two")
    where = host()
    os.sched_setaffinity(0, cores[-1:])
    runs = [
        measure(name, together, args.streams, args.rate, args.chunks, set(cores[:-1]))
        for _ in range(args.rounds)
        for together in (False, True)
        for name in CLIENTS
    ]
    runs.sort(key=lambda one: (one["client"], one["chunks_leave"]))
    asked = {"streams": args.streams, "asked_chunks_a_second": args.rate, "chunks_of_each_stream": args.chunks}
    print(json.dumps({**where, **asked, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
