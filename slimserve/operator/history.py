"""The last hour in points: what the engine's and the door's metrics said, as rates and quantiles. No I/O here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from slimserve.engine.state import State
from slimserve.operator.prometheus import Reading, quantile, rate, ratio, same_process

INTERVAL_SECONDS = 5.0
POINTS = 720
SERVING = frozenset({State.READY, State.DRAINING})

# The door's own metrics, as slimserve/admission/metrics.py registers them.
IN_FLIGHT = "slimserve_in_flight"
WAITING = "slimserve_waiting"
CAP = "slimserve_cap"
REQUESTS = "slimserve_requests_total"
TOO_MANY = {"outcome": "rejected: too_many_in_flight"}

TTFT = "vllm:time_to_first_token_seconds"
INTER_TOKEN = "vllm:inter_token_latency_seconds"


@dataclass(frozen=True, slots=True)
class Point:
    """One sample. None: not known at that moment, or nothing happened that could be measured.

    Args:
        time: seconds since the epoch.
        state: the endpoint's state then.
        generated_per_s, prompt_per_s: tokens a second since the point before.
        ttft_p50_s, ttft_p95_s: time to the first token, of requests that got it since the point before, in seconds.
        itl_p50_s, itl_p95_s: time from token to token, likewise.
        in_flight, waiting, cap: sequences in flight, sequences that wait at the door, most sequences in flight.
        running, queued: requests that the engine works on, and that wait inside it.
        kv_used: share of the KV cache in use, 0 to 1.
        cache_hits: share of the looked-up prompt tokens that the prefix cache had, 0 to 1.
        tier_hits: share of those it lacked that the second tier had, 0 to 1.
        too_many_per_s: answers 429 a second.
    """

    time: float
    state: str
    generated_per_s: float | None = None
    prompt_per_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    itl_p50_s: float | None = None
    itl_p95_s: float | None = None
    in_flight: float | None = None
    waiting: float | None = None
    cap: float | None = None
    running: float | None = None
    queued: float | None = None
    kv_used: float | None = None
    cache_hits: float | None = None
    tier_hits: float | None = None
    too_many_per_s: float | None = None


def make_point(time: float, state: str, before: Reading | None, after: Reading | None) -> Point:
    """The point that `after` makes.

    Args:
        time: when it was taken, in seconds since the epoch.
        state: the endpoint's state.
        before: the reading of the point before, if there was one.
        after: the reading now; None while no engine answers.
    """
    if after is None:
        return Point(time, state)

    def between(measure: Callable[..., float | None], *what: Any) -> float | None:
        return None if before is None else measure(before, after, *what)

    return Point(
        time,
        state,
        generated_per_s=between(rate, "vllm:generation_tokens_total"),
        prompt_per_s=between(rate, "vllm:prompt_tokens_total"),
        ttft_p50_s=between(quantile, TTFT, 0.5),
        ttft_p95_s=between(quantile, TTFT, 0.95),
        itl_p50_s=between(quantile, INTER_TOKEN, 0.5),
        itl_p95_s=between(quantile, INTER_TOKEN, 0.95),
        in_flight=after.total(IN_FLIGHT),
        waiting=after.total(WAITING),
        cap=after.total(CAP),
        running=after.total("vllm:num_requests_running"),
        queued=after.total("vllm:num_requests_waiting"),
        kv_used=max(after.values("vllm:kv_cache_usage_perc"), default=None),
        cache_hits=between(ratio, "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        tier_hits=between(ratio, "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"),
        too_many_per_s=between(_too_many),
    )


def _too_many(before: Reading, after: Reading) -> float | None:
    # The series appears with the first such answer; until then a door that reports at all has given none.
    if after.total(IN_FLIGHT) is None or after.total(REQUESTS, TOO_MANY) is not None:
        return rate(before, after, REQUESTS, TOO_MANY)
    return 0.0 if same_process(before, after) else None


class History:
    """The last hour, oldest point first.

    Args:
        interval_seconds: from one point to the next.
    """

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._interval = interval_seconds
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._reading: Reading | None = None

    @property
    def latest(self) -> Point | None:
        """The newest point."""
        return self._points[-1] if self._points else None

    def add(self, time: float, state: str, reading: Reading | None) -> Point:
        """Take in one reading; None while no engine answers, which ends the comparison with the one before.

        What an engine did before it was ready, the start's own question among it, is nobody's waiting.
        """
        served = self.latest is not None and self.latest.state in SERVING
        point = make_point(time, state, self._reading if served else None, reading)
        self._reading = reading
        self._points.append(point)
        return point

    def to_json(self) -> dict[str, Any]:
        """Column by column, which is a third of the size of a list of points."""
        columns = {field.name: [getattr(point, field.name) for point in self._points] for field in fields(Point)}
        return {"interval_seconds": self._interval, "points": self._points.maxlen, "columns": columns}
