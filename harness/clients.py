"""Clients that go on asking whatever happens to the server, and what they met."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable


class Clients:
    """Threads that ask again and again, as long as `with` lasts.

    Args:
        ask: one request; returns what was met. An error of the connection is met under the name of its class.
        count: how many ask at once.
        pause_seconds: between an answer and the next question of the same client.
    """

    def __init__(self, ask: Callable[[], object], count: int, pause_seconds: float = 0.0) -> None:
        self.met: Counter[object] = Counter()
        self.longest_seconds = 0.0
        self._ask, self._pause = ask, pause_seconds
        self._over, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._pause):
            begun = time.perf_counter()
            try:
                met = self._ask()
            except (OSError, http.client.HTTPException) as error:
                met = type(error).__name__
            with self._lock:
                self.met[met] += 1
                self.longest_seconds = max(self.longest_seconds, time.perf_counter() - begun)
