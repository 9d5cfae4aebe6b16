"""A source whose numbers move: the text that a real engine gave, with its counters and histograms run on.

python tests/operator/live.py PORT        serves the page on loopback with it, for work on the page
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimserve.engine.state import State, Status
from slimserve.errors import Finding
from slimserve.exposure import Reach
from slimserve.operator.source import Source

HERE = Path(__file__).resolve().parent
RECORDED = (HERE / "metrics.txt").read_text(encoding="utf-8")

# Sample name -> growth a second.
COUNTERS = {
    "vllm:generation_tokens_total": 180.0,
    "vllm:prompt_tokens_total": 420.0,
    "vllm:prefix_cache_queries_total": 420.0,
    "vllm:prefix_cache_hits_total": 290.0,
}
# Histogram -> observations a second, and the median and spread of their logarithms.
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": (3.0, math.log(0.35), 0.5),
    "vllm:inter_token_latency_seconds": (170.0, math.log(0.042), 0.35),
}


def _below(bound: float, median: float, spread: float) -> float:
    """The share of a log-normal distribution below `bound`."""
    if math.isinf(bound):
        return 1.0
    return 0.5 * (1 + math.erf((math.log(bound) - median) / (spread * math.sqrt(2))))


def run_on(seconds: float, born: float, in_flight: int, waiting: int, cap: int, too_many: int) -> str:
    """The recorded text after `seconds` of steady work since `born`, with what the door adds to it."""
    lines = []
    for line in RECORDED.splitlines():
        head, _, value = line.rpartition(" ")
        name = head.partition("{")[0]
        base = name.removesuffix("_bucket")
        if name == "process_start_time_seconds":
            value = repr(born)
        elif name in COUNTERS:
            value = str(float(value) + round(COUNTERS[name] * seconds))
        elif name == "vllm:num_requests_running":
            value = str(float(in_flight))
        elif name == "vllm:kv_cache_usage_perc":
            value = str(in_flight / cap * 0.8)
        elif base in HISTOGRAMS and name != base:
            a_second, median, spread = HISTOGRAMS[base]
            bound = float(head.partition('le="')[2].partition('"')[0])
            value = str(float(value) + round(a_second * seconds * _below(bound, median, spread)))
        lines.append(f"{head} {value}")
    lines += [
        f"slimserve_in_flight {in_flight}",
        f"slimserve_waiting {waiting}",
        f"slimserve_cap {cap}",
        f'slimserve_requests_total{{dialect="chat",outcome="ok"}} {round(3 * seconds)}',
    ]
    if too_many:
        lines.append(f'slimserve_requests_total{{dialect="chat",outcome="rejected: too_many_in_flight"}} {too_many}')
    return "\n".join(lines) + "\n"


PLAN = {
    "profile": "smollm2-135m-bf16-cpu",
    "status": "unmeasured",
    "settings": [
        {
            "key": "engine.max_num_seqs",
            "value": 8,
            "argv": [],
            "why": "eight requests at once",
            "evidence": "derived: 8 x 8,192 tokens",
        },
        {"key": "engine.dtype", "value": "bfloat16", "argv": [], "why": "stored in it", "evidence": "policy: exact-kv"},
    ],
    "not_carried": [{"what": "pictures", "why": "the model takes none"}],
    "notes": ["no receipt of ours covers this profile"],
}


LOOPBACK = Reach(host="127.0.0.1", port=8000, has_keys=False, keys_file=None, origins=())


@dataclass
class Live:
    """An endpoint of the tests: its facts can be set from outside while the page is open."""

    log_path: Path
    receipts_folder: Path
    url: str = "http://127.0.0.1:8000/v1"
    reach: Reach = LOOPBACK
    started: float = field(default_factory=time.time)
    current: Status = field(
        default_factory=lambda: Status(State.READY, time.time(), "the engine answered with a token")
    )
    plan: Mapping[str, Any] = field(default_factory=lambda: PLAN)
    findings: Sequence[Finding] = ()
    in_flight: int = 5
    waiting: int = 0
    cap: int = 24
    too_many: int = 0
    born: float = field(default_factory=time.time)
    engine_answers: bool = True

    @property
    def source(self) -> Source:
        """What a page is given of it."""
        return Source(
            url=self.url,
            reach=self.reach,
            log_path=self.log_path,
            receipts_folder=self.receipts_folder,
            plan=lambda: self.plan,
            status=lambda: self.current,
            metrics=lambda: self.metrics(),
            doctor=lambda: self.doctor(),
            started=self.started,
        )

    def metrics(self) -> str | None:
        if not self.engine_answers:
            return None
        return run_on(time.time() - self.born, self.born, self.in_flight, self.waiting, self.cap, self.too_many)

    def doctor(self) -> Sequence[Finding]:
        return self.findings

    def restart(self) -> None:
        """The engine's process is another one from here on: its counters begin anew."""
        self.born = time.time()


def main(port: int) -> None:
    """Serve the page with a busy day's numbers until interrupted."""
    import uvicorn

    from slimserve.operator.app import build

    print(f"http://127.0.0.1:{port}", file=sys.stderr)
    app = build(Live(HERE / "metrics.txt", HERE).source)
    uvicorn.run(app, port=port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
