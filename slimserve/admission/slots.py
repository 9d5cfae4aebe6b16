"""The slots: how many sequences may be in flight, who waits for room, and how soon to come back.

The words, here and wherever the door is spoken of. Sequences that are generated are *in flight*; the *cap*
(`max_in_flight`) is the most that may be. A *slot* is what one request holds: room for its sequences. Sequences that
stand at the door for such room are *waiting*, in lines; the *queue* is the option that lets them, with a bound. What
waits inside the engine, beyond its decode slots, is in flight.

Pure asyncio: no HTTP, no engine. A slot is taken before a request's body is read, grows once the body has said how
many sequences it asks for, and is released once.

Fair share. A holder is hungry while it waits, or was refused so lately that it may be on its way back. While another
holder that has less than its share is hungry, none is given more than ceil(cap / holders with work); otherwise free
room goes to whoever asks, so that shares nobody uses are not wasted.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import deque
from collections.abc import Callable

from slimserve.admission.pace import Pace
from slimserve.admission.rejection import Rejected
from slimserve.admission.replies import retry_seconds
from slimserve.profile import Queue

# Where a request's scope holds the slot that its head was given.
SLOT = "slimserve.slot"

# What the head of a request decides alone, by its method, path and headers: its refusal, its slot, or nothing yet.
JudgeHead = Callable[[str, str, list[tuple[bytes, bytes]]], "Rejected | Slot | None"]


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

        Args:
            count: at most the cap; no more would ever fit.

        Raises:
            Rejected: 429 when it does not fit now; the slot is still to be released.
        """
        if count > self.count:
            await self._slots._grow(self, count)

    def release(self) -> None:
        """Give the room back; the second time does nothing."""
        count, self.count = self.count, 0
        if count:
            self._slots._give_back(self.holder, count)


_NO_ROOM = "there is no room"


class _Waiter:
    __slots__ = ("count", "future", "holder")

    def __init__(self, holder: str, count: int) -> None:
        self.holder = holder
        self.count = count
        self.future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()


class Slots:
    """The room of one endpoint.

    Args:
        cap: sequences in flight at most.
        fair_share: whether holders share the room out.
        queue: how many requests may wait and for how long; None: none may.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        cap: int,
        *,
        fair_share: bool,
        queue: Queue | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cap = cap
        self.in_flight = 0
        self.waiting = 0
        self._fair = fair_share
        self._queue = queue
        self._clock = clock
        self._held: dict[str, int] = {}
        # One line of waiters for each holder, whose turn it is first; a single line when shares do not matter.
        self._lines: dict[str, deque[_Waiter]] = {}
        self._refused: dict[str, float] = {}
        self._pace = Pace(clock)

    async def take(self, holder: str) -> Slot:
        """A slot for one sequence, at once or after a wait in the line.

        Raises:
            Rejected: 429, with Retry-After, when there is neither room nor a place in the line, or the wait was too
                long.
        """
        return self.take_now(holder) or await self._wait(holder, 1)

    def take_now(self, holder: str) -> Slot | None:
        """A slot for one sequence if there is room and nobody waits for it, else None."""
        if not self._lines and self._may_have(holder, 1):
            return self._grant(holder, 1)
        return None

    def turn_away(self, holder: str) -> Rejected | None:
        """The refusal of a request for which there is neither room nor a line; None: `take` it.

        It is one and the same as long as the words are, so that these need not be put together for each. It is not to
        be raised: each time would lengthen its traceback.
        """
        if self._queue is not None or self._may_have(holder, 1):
            return None
        return _no_room(self.in_flight, self.cap, None, self._note_refusal(holder, 1))

    def retry_seconds(self, count: int = 1) -> int:
        """When to come back for room for `count`: the work ahead over the measured drain rate."""
        ahead = self.waiting + count + min(self._pace.refused(), self.cap)
        return retry_seconds(ahead / self._pace.rate())

    async def _wait(self, holder: str, count: int) -> Slot:
        if self._queue is None:
            raise self._refusal(holder, count, _NO_ROOM)
        waiter = _Waiter(holder, count)
        line = holder if self._fair else ""
        self._lines.setdefault(line, deque()).append(waiter)
        self.waiting += count
        self._serve()
        if waiter.future.done():
            return waiter.future.result()
        places = sum(map(len, self._lines.values()))
        if places > self._queue.length:
            self._leave(line, waiter)
            raise self._refusal(holder, count, _NO_ROOM)
        timer = asyncio.get_running_loop().call_later(self._queue.seconds, self._give_up, waiter, self._queue.seconds)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            # The room may have been granted in the same turn in which the wait was cancelled.
            if not waiter.future.cancelled() and waiter.future.exception() is None:
                waiter.future.result().release()
            raise
        finally:
            timer.cancel()
            self._leave(line, waiter)

    def _give_up(self, waiter: _Waiter, seconds: float) -> None:
        if not waiter.future.done():
            waiter.future.set_exception(
                self._refusal(waiter.holder, waiter.count, f"no room came free within {seconds:g} s")
            )

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
        waiting = None if self._queue is None else self.waiting
        return _worded(what, self.in_flight, self.cap, waiting, self._note_refusal(holder, count))

    def _note_refusal(self, holder: str, count: int) -> int:
        """Remember that one is refused, who is told to come back in so many seconds."""
        seconds = self.retry_seconds(count)
        self._pace.refuse()
        if self._fair:
            # Its part is kept until it may come back; a new look is due then, since nothing else may happen by then.
            self._refused[holder] = self._clock() + seconds + 1
            if self._lines:
                asyncio.get_running_loop().call_later(seconds + 1, self._serve)
        return seconds

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
        more = count - slot.count
        if not self._lines and self._may_have(slot.holder, count, slot.count):
            self._add(slot.holder, more)
            slot.count = count
            return
        if self._queue is None:
            raise self._refusal(slot.holder, more, f"there is no room for {count} sequences at once")
        slot.release()
        new = await self._wait(slot.holder, count)
        # The two are one from here on.
        slot.count, new.count = new.count, 0

    def _give_back(self, holder: str, count: int) -> None:
        self._remove(holder, count)
        self._pace.release(count, idle=not self.in_flight)
        if self._lines:
            self._serve()


def _worded(what: str, in_flight: int, cap: int, waiting: int | None, seconds: int) -> Rejected:
    # Without a line nobody can wait at the door, and a figure of 0 would be read as: nobody waits anywhere.
    line = "" if waiting is None else f", {waiting} waiting at the door"
    return Rejected(
        429,
        f"{what}: {in_flight} of {cap} sequences are in flight{line}; come back in {seconds} s",
        code="too_many_in_flight",
        headers={"Retry-After": str(seconds)},
    )


_no_room = functools.lru_cache(64)(functools.partial(_worded, _NO_ROOM))
