"""What the door counts, in the engine's own /metrics: numbers and fixed words, never a key or a part of a request."""

from __future__ import annotations

import functools

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from slimserve.admission.progress import Progress
from slimserve.admission.slots import Slots

_WAIT_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60)
_OWN_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.02, 0.1)


class Metrics:
    """The door's metrics.

    Args:
        registry: where they are found; the default is the one that the engine shows.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._in_flight = Gauge(
            "slimserve_in_flight",
            "Sequences in flight, those that wait inside the engine among them",
            registry=registry,
        )
        self._waiting = Gauge("slimserve_waiting", "Sequences that wait at the door", registry=registry)
        self._cap = Gauge("slimserve_cap", "Most sequences in flight", registry=registry)
        self._stalled = Gauge(
            "slimserve_stalled_seconds", "Seconds since the engine's last step while it has work", registry=registry
        )
        self._requests = Counter(
            "slimserve_requests", "Requests that generate, by how they ended", ["dialect", "outcome"], registry=registry
        )
        self._denied = Counter("slimserve_denied", "Other requests that were refused", ["reason"], registry=registry)
        self._notes = Counter("slimserve_notes", "Remarks on requests that were served", ["note"], registry=registry)
        self.waited = Histogram(
            "slimserve_wait_seconds", "Time that a request waited for a slot", buckets=_WAIT_SECONDS, registry=registry
        )
        self.own = Histogram(
            "slimserve_door_seconds", "The door's own time for a request", buckets=_OWN_SECONDS, registry=registry
        )
        # Looking a child up by its labels costs a lock; the few that there are, are kept.
        self.request = functools.lru_cache(256)(self._requests.labels)
        self.denied = functools.lru_cache(64)(self._denied.labels)
        self.note = functools.lru_cache(64)(self._notes.labels)

    def show(self, slots: Slots, progress: Progress) -> None:
        """Let the gauges read from here at each scrape."""
        self._cap.set(slots.cap)
        self._in_flight.set_function(lambda: slots.in_flight)
        self._waiting.set_function(lambda: slots.waiting)
        self._stalled.set_function(lambda: progress.stalled_seconds)


@functools.cache
def shared() -> Metrics:
    """The process's own; a registry takes each name once."""
    return Metrics()
