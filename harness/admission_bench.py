"""What the door costs, and whether it holds: latency, streams, and a flood.

    python -m harness.admission_bench [--requests 20000] [--pairs 12] [--flood 5000]

A fake engine (tests/fakes/upstream.py) runs in a process of its own and serves the same application twice: behind the
door, as in production, and bare. This process is the load client. Everything is compared within one run, turn by turn.

latency   small requests on one kept connection to each side, by turns: what the door adds at p50 and p99
streams   64 streams at once, 5,000 pieces a second in all, to one side and the other in turn: ratio of throughput, with
          the 95% bootstrap interval of the median of paired ratios; `unpaced` is the same with an engine that emits as
          fast as it can, where every microsecond of the door shows
flood     5,000 requests at 500 connections against a cap of 96, answers of 0.3 s; then with about a third of the
          clients vanishing at random moments (`vanished_share`)

Nothing is claimed by this program; it prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import uvloop

from harness.flood import Flood
from harness.host import host
from harness.stats import rate_ratio
from slimserve.engine.control import Control

UPSTREAM = Path(__file__).resolve().parent.parent / "tests" / "fakes" / "upstream.py"
CAP = 96
CONNECTIONS = 500
# Longer than it takes to let `CAP` of them in: the engine is to see all of them at once.
ANSWER_SECONDS = 0.3
# Of the clients; nearly all of them leave before they are answered.
LEAVING = 0.35
STREAMS = 64
PIECES_PER_SECOND = 5000
DEADLINE_SECONDS = 60.0


class Upstream:
    """The fake engine's process.

    Args:
        folder: of its control socket.
        cap: of the door.
    """

    def __init__(self, folder: Path, cap: int) -> None:
        self.control = Control(folder / "control")
        config = {"max_in_flight": cap, "max_model_len": 4096, "thinking": "keep"}
        argv = [sys.executable, str(UPSTREAM), "--control", str(self.control.path), "--config", json.dumps(config)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.door, self.bare = (int(word) for word in self.process.stdout.readline().split()[-2:])
        end = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                self.control.accept()
                return
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)


@contextlib.contextmanager
def running(cap: int) -> Iterator[Upstream]:
    """A fake engine behind a door with that cap."""
    with tempfile.TemporaryDirectory() as folder:
        upstream = Upstream(Path(folder), cap)
        try:
            yield upstream
        finally:
            upstream.process.kill()
            upstream.process.wait()


def request(stream: bool = False, **fake: Any) -> bytes:
    """The bytes of a chat request that tells the fake engine what to do."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "stream": stream, "fake": fake}
    text = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(text) + text


def quantile(values: list[float], share: float) -> float:
    """The nearest value with at least `share` of all at or below it."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def once(sock: socket.socket, data: bytes, size: int) -> float:
    """Seconds of one exchange whose answer has `size` bytes."""
    begin = time.perf_counter()
    sock.sendall(data)
    while size > 0:
        piece = sock.recv(65536)
        if not piece:
            raise ConnectionError("closed in the middle of an answer")
        size -= len(piece)
    return time.perf_counter() - begin


def measure_latency(upstream: Upstream, requests: int) -> dict[str, Any]:
    """What the door adds to a small request, in microseconds."""
    data = request()
    sides = {"door": upstream.door, "bare": upstream.bare}
    socks, sizes = {}, {}
    for side, port in sides.items():
        socks[side] = socket.create_connection(("127.0.0.1", port))
        socks[side].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        socks[side].sendall(data)
        head = socks[side].recv(65536)
        while b'"stop"}]}' not in head:
            head += socks[side].recv(65536)
        sizes[side] = len(head)
    seen: dict[str, list[float]] = {side: [] for side in sides}
    gc.disable()
    for number in range(requests):
        # Which side goes first alternates, so that neither always finds the caches as the other left them.
        for side in sorted(sides, reverse=number % 2 == 0):
            seen[side].append(1e6 * once(socks[side], data, sizes[side]))
    gc.enable()
    for sock in socks.values():
        sock.close()
    result: dict[str, Any] = {"requests_each": requests}
    blocks = 20
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        for side, values in seen.items():
            result[f"{side}_{name}_us"] = round(quantile(values, share), 1)
        result[f"added_{name}_us"] = round(quantile(seen["door"], share) - quantile(seen["bare"], share), 1)
        # A machine with other work has bad moments; each falls into one block.
        each = requests // blocks
        parts = [
            quantile(seen["door"][at : at + each], share) - quantile(seen["bare"][at : at + each], share)
            for at in range(0, each * blocks, each)
        ]
        result[f"added_{name}_us_median_of_{blocks}_blocks"] = round(statistics.median(parts), 1)
    return result


class Exchange(asyncio.Protocol):
    """A connection for one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[tuple[int, float]] | None = None
        self.pieces = 0
        self.first = self.last = 0.0
        """when the first pieces of a stream came, and the last"""
        self.at_first = 0
        """so many came first"""
        self._seen = bytearray()
        self._streams = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed: whoever waits gets status 0."""
        if self.done is not None and not self.done.done():
            self.done.set_result((0, time.perf_counter()))

    def data_received(self, data: bytes) -> None:
        """A part of an answer; the first tells whether it is a stream."""
        if not self._seen:
            self._streams = b"transfer-encoding: chunked" in data
        if self._streams:
            if count := data.count(b"data: {"):
                self.last = time.perf_counter()
                if not self.pieces:
                    self.first, self.at_first = self.last, count
                self.pieces += count
            self._seen = bytearray(self._seen[:12] or data[:12]) + data[-16:]
            complete = data.endswith(b"0\r\n\r\n")
        else:
            self._seen += data
            head, mark, body = bytes(self._seen).partition(b"\r\n\r\n")
            complete = bool(mark) and len(body) >= int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        if complete and self.done is not None and not self.done.done():
            self.done.set_result((int(self._seen[9:12]), time.perf_counter()))

    def ask(self, data: bytes) -> asyncio.Future[tuple[int, float]]:
        """Send a request; the future holds its status, 0 when it was cut off, and when the answer was complete."""
        self._seen = bytearray()
        self.pieces = 0
        self.done = asyncio.get_running_loop().create_future()
        assert self.transport is not None
        if self.transport.is_closing():
            self.done.set_result((0, time.perf_counter()))
        self.transport.write(data)
        return self.done


async def connect(port: int) -> Exchange:
    """A new connection."""
    return (await asyncio.get_running_loop().create_connection(Exchange, "127.0.0.1", port))[1]


async def stream_rate(port: int, pieces: int, pace: float) -> tuple[float | None, float]:
    """Pieces a second of `STREAMS` streams at once, `pace` seconds between the pieces of each.

    Returns:
        The sum of what each stream has from its first piece to its last, None where one had all its pieces at once; and
        all pieces over the time of the batch, which holds what it takes to begin 64 answers too.

    Raises:
        SystemExit: pieces were lost.
    """
    connections = [await connect(port) for _ in range(STREAMS)]
    data = request(True, chunks=pieces, interval=pace)
    begin = time.perf_counter()
    answers = await asyncio.gather(*(connection.ask(data) for connection in connections))
    end = max(when for _, when in answers)
    got = sum(connection.pieces for connection in connections)
    for connection in connections:
        assert connection.transport is not None
        connection.transport.close()
    if got != STREAMS * (pieces + 1) or {status for status, _ in answers} != {200}:
        sys.exit(f"{got} pieces came where {STREAMS * (pieces + 1)} were sent: the run is void")
    batch = got / (end - begin)
    if not all(connection.last > connection.first for connection in connections):
        return None, batch
    flowing = ((one.pieces - one.at_first) / (one.last - one.first) for one in connections)
    return sum(flowing), batch


def measure_streams(upstream: Upstream, pairs: int, seconds: float, paced: bool) -> dict[str, Any]:
    """Ratio of throughput with and without the door: of whole batches, and `flowing`, from first pieces to last."""
    pace = STREAMS / PIECES_PER_SECOND if paced else 0.0
    pieces = int(seconds * PIECES_PER_SECOND / STREAMS)
    sides = {"door": upstream.door, "bare": upstream.bare}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    flowing: dict[str, list[float | None]] = {side: [] for side in sides}
    for pair in range(pairs):
        for side in sorted(sides, reverse=pair % 2 == 0):
            flow, batch = uvloop.run(stream_rate(sides[side], pieces, pace))
            rates[side].append(batch)
            flowing[side].append(flow)
    both = [(one, other) for one, other in zip(flowing["door"], flowing["bare"], strict=True) if one and other]
    return {
        "streams": STREAMS,
        "pairs": pairs,
        "pieces_per_second_bare": round(statistics.median(rates["bare"])),
        **rate_ratio(rates["door"], rates["bare"]),
        "flowing": rate_ratio([one for one, _ in both], [other for _, other in both]) if paced else None,
    }


def measure_flood(requests: int, vanishing: float, seed: int) -> dict[str, Any]:
    """The flood, and what the engine and the door saw of it."""
    with running(CAP) as upstream:
        seen = Flood(
            upstream.door,
            request(delay=ANSWER_SECONDS),
            connections=CONNECTIONS,
            requests=requests,
            vanishing=vanishing,
            seed=seed,
        ).run(upstream.process.pid)
        end = time.monotonic() + DEADLINE_SECONDS
        while (left := upstream.control.door().in_flight) and time.monotonic() < end:
            time.sleep(0.05)
        engine = json.loads(upstream.control.ask("GET", "/fake/state")[1])
    return {
        "sent": sum(seen.statuses.values()),
        "statuses": dict(sorted(seen.statuses.items())),
        "vanished_share": round(seen.statuses["vanished"] / sum(seen.statuses.values()), 3),
        "429_p50_ms": round(quantile(seen.refused_ms, 0.5), 2),
        "429_p99_ms": round(quantile(seen.refused_ms, 0.99), 2),
        "429_max_ms": round(max(seen.refused_ms), 2),
        "seconds": round(seen.seconds, 3),
        "client_busy": round(seen.client_busy, 2),
        "server_busy": round(seen.server_busy, 2),
        "cap": CAP,
        "most_in_flight_at_the_engine": engine["most"],
        "admitted": engine["requests"],
        "completed_at_the_engine": engine["finished"],
        "slots_lost": left,
    }


def main() -> None:
    """Run the benchmark with this process's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="to each side, for latency")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of batches of streams")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one batch of streams")
    parser.add_argument("--flood", type=int, default=5000, help="requests of a flood")
    parser.add_argument("--only", choices=("latency", "streams", "flood"))
    args = parser.parse_args()
    result: dict[str, Any] = host()
    if args.only in (None, "latency", "streams"):
        with running(CAP) as upstream:
            if args.only != "streams":
                measure_latency(upstream, 500)  # warm
                result["latency"] = measure_latency(upstream, args.requests)
            if args.only != "latency":
                result["streams"] = measure_streams(upstream, args.pairs, args.seconds, paced=True)
                result["unpaced"] = measure_streams(upstream, args.pairs, args.seconds, paced=False)
    if args.only in (None, "flood"):
        result["flood"] = measure_flood(args.flood, 0.0, 1)
        result["flood_vanishing"] = measure_flood(args.flood, LEAVING, 2)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
