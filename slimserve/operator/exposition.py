"""Prometheus metrics of engine and appliance in one text: the engine's own, and ours after it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slimserve.engine.state import State, Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Appliance(Collector):
    def __init__(self, status: Status, started: float, engine_answers: bool) -> None:
        self._status = status
        self._started = started
        self._engine_answers = engine_answers

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            "slimserve_state", "1 for the state that the endpoint is in, else 0", labels=["state"]
        )
        for state in State:
            states.add_metric([str(state)], float(state is self._status.state))
        yield states
        yield GaugeMetricFamily(
            "slimserve_state_since_seconds", "When it came there, in seconds since the epoch", self._status.since
        )
        yield CounterMetricFamily(
            "slimserve_engine_restarts", "Starts of the engine after the first", self._status.restarts
        )
        yield GaugeMetricFamily("slimserve_uptime_seconds", "Age of the appliance", time.time() - self._started)
        yield GaugeMetricFamily(
            "slimserve_engine_answers", "1 when the engine's own metrics are in this text", float(self._engine_answers)
        )


def render(engine: str | None, status: Status, started: float) -> str:
    """The text for a scraper.

    Args:
        engine: the engine's own text, the door's metrics in it; None while no engine answers.
        status: where the endpoint stands.
        started: when the appliance began, in seconds since the epoch.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Appliance(status, started, engine is not None))
    own = generate_latest(registry).decode()
    return own if engine is None else f"{engine.rstrip()}\n{own}"
