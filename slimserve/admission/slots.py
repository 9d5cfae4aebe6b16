"""The slots: at most so many sequences in flight, a bounded line of those who wait, and how soon to come back.

Pure asyncio: no HTTP, no engine. A slot is taken before a request's body is read, grows once the body has said how
many sequences it asks for, and is released once.

Fair share. A holder is hungry while it waits, or was refused so lately that it may be on its way back. While another
holder that has less than its share is hungry, none is given more than ceil(cap / holders with work); otherwise free
slots go to whoever asks, so that shares nobody uses are not wasted.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from slimserve.admission.rejection import Rejected

RETRY_SECONDS = (1, 60)
# Releases are remembered over about so many seconds of work: long enough to see several endings of long answers,
# short enough to follow a change of load within the longest Retry-After.
MEMORY_SECONDS = 60.0


class Slot:
    """Room for `count` sequences of one holder."""

    __slots__ = ("_slots", "count", "holder")

    def __init__(self, slots: Slots, holder: str, count: int) -> None:
        self._slots = slots
        self.holder = holder
        self.count = count

    async def grow(self, count: int) -> None:
        """Have room for `count` sequences in all.

        Where there is none left and one may wait, the room held is given up for a place in the line: whoever waits
        while holding could block others that do the same, for ever.

        Raises:
            Rejected: 400 when `count` can never fit, 429 when it does not fit now; the slot is still to be released.
        """
        if count > self.count:
            await self._slots._grow(self, count)

    def release(self) -> None:
        """Give the room back; the second time does nothing."""
        count, self.count = self.count, 0
        if count:
            self._slots._give_back(self.holder, count)


class _Waiter:
    __slots__ = ("count", "future", "holder")

    def __init__(self, holder: str, count: int) -> None:
        self.holder = holder
        self.count = count
        self.future: asyncio.Future[Slot | None] = asyncio.get_running_loop().create_future()


class Slots:
    """The room of one endpoint.

    Args:
        cap: sequences in flight at most.
        fair_share: whether holders share the room out.
        queue_length: requests that may wait.
        queue_seconds: how long one waits.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        cap: int,
        fair_share: bool = False,
        queue_length: int = 0,
        queue_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cap = cap
        self.in_flight = 0
        self.waiting = 0
        self.taken = 0
        self.released = 0
        self._fair = fair_share
        self._queue_length = queue_length
        self._queue_seconds = queue_seconds
        self._clock = clock
        self._held: dict[str, int] = {}
        # One line of waiters for each holder, whose turn it is first; a single line when shares do not matter.
        self._lines: dict[str, deque[_Waiter]] = {}
        self._refused: dict[str, float] = {}
        self._pace = _Pace(clock)

    async def take(self, holder: str, count: int = 1) -> Slot:
        """Room for `count` sequences, at once or after a wait in the line.

        Raises:
            Rejected: 400 when `count` can never fit; 429, with Retry-After, when there is neither room nor a place in
                the line, or the wait was too long.
        """
        self._check(count)
        if slot := self.take_now(holder, count):
            return slot
        if not self._queue_length:
            raise self._refusal(holder, count, "no slot is free")
        return await self._wait(holder, count)

    def take_now(self, holder: str, count: int = 1) -> Slot | None:
        """Room for `count` sequences if it is there and nobody waits for it, else None."""
        if not self._lines and self._may_have(holder, count):
            return self._grant(holder, count)
        return None

    def retry_seconds(self, count: int = 1) -> int:
        """When to come back for `count` slots: the work ahead over the measured drain rate, in whole seconds."""
        ahead = self.waiting + count + min(self._pace.refused(), self.cap)
        low, high = RETRY_SECONDS
        return max(low, min(high, math.ceil(ahead / self._pace.rate())))

    def _check(self, count: int) -> None:
        if count > self.cap:
            raise Rejected(
                400,
                f"this asks for {count} sequences, and this endpoint runs {self.cap} at a time: "
                "ask for fewer (n, prompts) in one request",
                param="n",
                code="too_many_sequences",
            )

    async def _wait(self, holder: str, count: int) -> Slot:
        waiter = _Waiter(holder, count)
        line = holder if self._fair else ""
        self._lines.setdefault(line, deque()).append(waiter)
        self.waiting += count
        self._serve()
        if waiter.future.done():
            return self._granted(waiter)
        places = sum(map(len, self._lines.values()))
        if places > self._queue_length:
            self._leave(line, waiter)
            raise self._refusal(holder, count, "no slot is free")
        timer = asyncio.get_running_loop().call_later(self._queue_seconds, _give_up, waiter.future)
        try:
            await waiter.future
            return self._granted(waiter)
        except asyncio.CancelledError:
            # The room may have been granted in the same turn in which the wait was cancelled.
            if not waiter.future.cancelled() and (slot := waiter.future.result()) is not None:
                slot.release()
            raise
        finally:
            timer.cancel()
            self._leave(line, waiter)

    def _granted(self, waiter: _Waiter) -> Slot:
        slot = waiter.future.result()
        if slot is None:
            raise self._refusal(waiter.holder, waiter.count, f"no slot came free within {self._queue_seconds:g} s")
        return slot

    def _leave(self, line: str, waiter: _Waiter) -> None:
        """Take `waiter` out of its line, if it still stands there; who stood behind may be next."""
        waiters = self._lines.get(line)
        if waiters and waiter in waiters:
            waiters.remove(waiter)
            self.waiting -= waiter.count
            if not waiters:
                del self._lines[line]
            self._serve()

    def _refusal(self, holder: str, count: int, what: str) -> Rejected:
        seconds = self.retry_seconds(count)
        self._pace.refuse()
        if self._fair:
            # Its part is kept until it may come back; a new look is due then, since nothing else may happen by then.
            self._refused[holder] = self._clock() + seconds + 1
            if self._lines:
                asyncio.get_running_loop().call_later(seconds + 1, self._serve)
        return Rejected(
            429,
            f"{what}: {self.in_flight} of {self.cap} are in use and {self.waiting} wait; come back in {seconds} s",
            code="slots_exhausted",
            headers={"Retry-After": str(seconds)},
        )

    def _serve(self) -> None:
        """Give free room to those who wait: a turn for each line, and in it the first comer first."""
        served = True
        while served and self.in_flight < self.cap:
            served = False
            for line, waiters in list(self._lines.items()):
                waiter = waiters[0]
                if self._above_share(waiter.holder, waiter.count):
                    continue
                if self.in_flight + waiter.count > self.cap:
                    # Room is left to run free for it: small ones that slip past would starve a large one.
                    return
                waiters.popleft()
                self.waiting -= waiter.count
                del self._lines[line]
                if waiters:
                    self._lines[line] = waiters
                if not waiter.future.done():
                    waiter.future.set_result(self._grant(waiter.holder, waiter.count))
                served = True
                break

    def _may_have(self, holder: str, count: int, kept: int = 0) -> bool:
        """Whether a request may have `count` in all, where `kept` of them are its own already."""
        return self.in_flight - kept + count <= self.cap and not self._above_share(holder, count, kept)

    def _above_share(self, holder: str, count: int, kept: int = 0) -> bool:
        """Whether the request would take its holder above its share while another is hungry below its own.

        A holder's only request never does: two that each ask for more than a share would keep each other out.
        """
        held = self._held.get(holder, 0) - kept
        if not self._fair or not held:
            return False
        if self._refused:
            now = self._clock()
            self._refused = {name: until for name, until in self._refused.items() if until > now}
        hungry = self._lines.keys() | self._refused.keys()
        share = math.ceil(self.cap / len(self._held.keys() | hungry | {holder}))
        if held + count <= share:
            return False
        return any(name != holder and self._held.get(name, 0) < share for name in hungry)

    def _grant(self, holder: str, count: int) -> Slot:
        self._add(holder, count)
        self.taken += 1
        self._refused.pop(holder, None)
        return Slot(self, holder, count)

    def _add(self, holder: str, count: int) -> None:
        if not self.in_flight:
            self._pace.start()
        self.in_flight += count
        self._held[holder] = self._held.get(holder, 0) + count

    def _remove(self, holder: str, count: int) -> None:
        self.in_flight -= count
        left = self._held[holder] - count
        if left:
            self._held[holder] = left
        else:
            del self._held[holder]

    async def _grow(self, slot: Slot, count: int) -> None:
        self._check(count)
        more = count - slot.count
        if not self._lines and self._may_have(slot.holder, count, slot.count):
            self._add(slot.holder, more)
            slot.count = count
            return
        if not self._queue_length:
            raise self._refusal(slot.holder, more, f"{more} more slots are asked for than are free")
        slot.release()
        new = await self._wait(slot.holder, count)
        # The two are one from here on.
        slot.count, new.count = new.count, 0
        self.taken -= 1
        self.released -= 1

    def _give_back(self, holder: str, count: int) -> None:
        self._remove(holder, count)
        self.released += 1
        self._pace.release(count, idle=not self.in_flight)
        if self._lines:
            self._serve()


def _give_up(future: asyncio.Future[Slot | None]) -> None:
    if not future.done():
        future.set_result(None)


class _Pace:
    """Releases a second, exponentially weighted over the recent seconds of work; idle time does not count.

    Before anything was released the rate is unknown: then it is taken that the first release takes as long again as
    the work has lasted so far.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self._worked = 0.0
        self._weight = 0.0
        self._refusals = 0.0
        self._refused_at = clock()

    def start(self) -> None:
        """The first slot of an empty house is taken."""
        self._since = self._clock()

    def _pass(self) -> None:
        """Let the time since the last look fade what was seen before it."""
        if self._since is not None:
            now = self._clock()
            passed, self._since = now - self._since, now
            self._worked += passed
            self._weight *= math.exp(-passed / MEMORY_SECONDS)

    def release(self, count: int, idle: bool) -> None:
        """So many sequences ended; `idle`: they were the last."""
        self._pass()
        self._weight += count
        if idle:
            self._since = None

    def rate(self) -> float:
        """Releases a second; more than 0."""
        self._pass()
        if not self._weight:
            return 1 / max(self._worked, 1.0)
        # What a steady rate of 1 would have left behind by now, so that a short past is not taken for a slow one.
        return self._weight / max(MEMORY_SECONDS * -math.expm1(-self._worked / MEMORY_SECONDS), 1e-3)

    def refuse(self) -> None:
        """A request was told to come back."""
        self._refusals = self.refused() + 1
        self._refused_at = self._clock()

    def refused(self) -> float:
        """Those who were told to come back in the recent past, and so are ahead of the next one."""
        return self._refusals * math.exp((self._refused_at - self._clock()) / MEMORY_SECONDS)
