"""Asks the source at a steady pace, and wakes every open page when there is something new."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from slimserve.engine.state import Status
from slimserve.operator.history import INTERVAL_SECONDS, History
from slimserve.operator.prometheus import Reading, parse
from slimserve.operator.source import Source
from slimserve.shapes import plain

# A change of state is seen within this time; asking for it costs nothing, unlike the engine's metrics.
STATUS_SECONDS = 0.5

log = logging.getLogger(__name__)


class Feed:
    """The sampler. One for each app, in its event loop.

    Args:
        source: whom to ask.
        interval_seconds: from one reading of the metrics to the next.
    """

    def __init__(self, source: Source, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._source = source
        self._interval = interval_seconds
        self._news = asyncio.Event()
        self._version = 0
        self._complaint = ""
        self._told: Status | None = None
        self.history = History(interval_seconds)

    def snapshot(self) -> dict[str, Any]:
        """What the top of the page shows, as JSON data: the moment, where the endpoint stands, the newest point.

        A point of another state says nothing of this one, and is left out; the next comes within a second.
        """
        status, latest = self._source.status(), self.history.latest
        if latest is not None and latest.state != status.state:
            latest = None
        return {
            "now": time.time(),
            "started": self._source.started,
            "url": self._source.url,
            "reach": self._source.reach.to_json(),
            "status": plain(status),
            "point": None if latest is None else plain(latest),
        }

    async def wait(self, seen: int, seconds: float) -> int:
        """Until there is something newer than `seen`, at most `seconds`; the version that is current then."""
        if self._version <= seen:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._news.wait()
        return self._version

    async def run(self) -> None:
        """Sample until cancelled."""
        due = time.monotonic()
        while True:
            try:
                status = await asyncio.to_thread(self._source.status)
                moved = self._told is None or status.state is not self._told.state
                if status != self._told:
                    await self._tell()
                if moved or time.monotonic() >= due:
                    due = time.monotonic() + self._interval
                    await self._add_point()
            except Exception:
                # A source that breaks its word costs one point; a sampler that ends would cost all to come.
                log.exception("the operator page could not read its source")
            await asyncio.sleep(min(STATUS_SECONDS, self._interval))

    async def _add_point(self) -> None:
        reading = await self._read()
        status = await asyncio.to_thread(self._source.status)
        self.history.add(time.time(), str(status.state), reading)
        await self._tell()

    async def _tell(self) -> None:
        """Let those who wait go on."""
        self._told = await asyncio.to_thread(self._source.status)
        self._version += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _read(self) -> Reading | None:
        text = await asyncio.to_thread(self._source.metrics)
        if text is None:
            return None
        try:
            return await asyncio.to_thread(parse, text, time.time())
        except ValueError as error:
            # The page goes on without numbers, and says so once: a text that cannot be read comes every few seconds.
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("the engine's metrics: %s", error)
            return None
