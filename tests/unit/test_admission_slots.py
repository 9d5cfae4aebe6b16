"""The slots by themselves: cap, growth, line, shares, Retry-After, and that each comes back once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from slimserve.admission.rejection import Rejected
from slimserve.admission.slots import Slot, Slots
from slimserve.profile import Queue

T = TypeVar("T")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(case: Callable[[], Awaitable[T]]) -> T:
    async def within() -> T:
        async with asyncio.timeout(60):
            return await case()

    return asyncio.run(within())


def make(
    cap: int, *, fair: bool = False, queue: int = 0, seconds: float = 50, clock: Callable[[], float] = time.monotonic
) -> Slots:
    return Slots(cap, fair_share=fair, queue=Queue(length=queue, seconds=seconds) if queue else None, clock=clock)


async def refused(slots: Slots, holder: str = "a") -> Rejected:
    with pytest.raises(Rejected) as caught:
        await slots.take(holder)
    return caught.value


async def take(slots: Slots, holder: str, count: int = 1) -> Slot:
    slot = await slots.take(holder)
    await slot.grow(count)
    return slot


async def line_up(slots: Slots, holder: str, count: int = 1) -> asyncio.Task[Slot]:
    """Someone who now waits: for a first slot, or with one that is growing and finds less than `count` free."""
    before = slots.waiting
    task = asyncio.create_task(take(slots, holder, count))
    while slots.waiting == before and not task.done():
        await asyncio.sleep(0)
    return task


def test_the_97th_at_a_cap_of_96_is_told_when_to_come_back() -> None:  # C1
    async def case() -> None:
        slots = make(96)
        held = [await slots.take("a") for _ in range(96)]
        no = await refused(slots)
        assert no.status == 429
        assert no.code == "too_many_in_flight"
        assert no.headers["Retry-After"].isdigit()
        assert "96 of 96" in no.message
        held[0].release()
        assert (await slots.take("b")).count == 1
        assert slots.in_flight == 96

    run(case)


def test_release_counts_once() -> None:
    async def case() -> None:
        slots = make(3)
        slot = await take(slots, "a", 2)
        await slots.take("b")
        slot.release()
        slot.release()
        assert slots.in_flight == 1

    run(case)


def test_a_refusal_speaks_of_those_at_the_door_only_where_they_can_stand_there() -> None:
    async def case() -> None:
        for queue, words in (
            (0, "there is no room: 1 of 1 sequences are in flight; come back in "),
            (1, "there is no room: 1 of 1 sequences are in flight, 1 waiting at the door; come back in "),
        ):
            slots = make(1, queue=queue)
            await slots.take("a")
            lined = [await line_up(slots, "a") for _ in range(queue)]
            assert (await refused(slots)).message.startswith(words)
            if not queue:
                turned_away = slots.turn_away("a")
                assert turned_away is not None
                assert turned_away.message.startswith(words)
            for task in lined:
                task.cancel()

    run(case)


def test_n_counts_as_n() -> None:
    async def case() -> None:
        slots = make(4)
        one, other = await slots.take("a"), await slots.take("a")
        await one.grow(3)
        assert slots.in_flight == 4
        with pytest.raises(Rejected) as caught:
            await other.grow(2)
        assert caught.value.status == 429
        assert other.count == 1
        one.release()
        await other.grow(4)
        assert slots.in_flight == 4
        other.release()
        assert slots.in_flight == 0

    run(case)


def test_those_who_wait_are_served_in_order() -> None:
    async def case() -> None:
        slots = make(1, queue=3)
        held = await slots.take("a")
        waiting = [await line_up(slots, name) for name in "abc"]
        assert slots.waiting == 3
        assert (await refused(slots)).status == 429
        for task in waiting:
            held.release()
            held = await task
        held.release()
        assert (slots.in_flight, slots.waiting) == (0, 0)

    run(case)


def test_nobody_overtakes_the_line() -> None:
    async def case() -> None:
        slots = make(4, queue=2)
        held = [await slots.take("a") for _ in range(3)]
        large = await line_up(slots, "b", 3)
        small = await line_up(slots, "c")
        assert not small.done()
        assert slots.in_flight == 3  # one is free, and kept for who came first
        held[0].release()
        held[1].release()
        assert (await large).count == 3
        assert not small.done()
        held[2].release()
        (await large).release()
        (await small).release()
        assert slots.in_flight == 0

    run(case)


def test_growing_gives_up_its_room_for_a_place_in_the_line() -> None:
    async def case() -> None:
        slots = make(4, queue=4)
        held = [await slots.take("a") for _ in range(4)]
        growing = [asyncio.create_task(slot.grow(4)) for slot in held[:2]]
        while slots.waiting < 8:
            await asyncio.sleep(0)
        assert slots.in_flight == 2
        held[2].release()
        held[3].release()
        await growing[0]
        assert (slots.in_flight, held[0].count) == (4, 4)
        held[0].release()
        await growing[1]
        held[1].release()
        assert (slots.in_flight, slots.waiting) == (0, 0)

    run(case)


def test_the_wait_has_a_deadline() -> None:
    async def case() -> None:
        slots = make(1, queue=1, seconds=0.05)
        await slots.take("a")
        no = await refused(slots)
        assert no.status == 429
        assert "within 0.05 s" in no.message
        assert slots.waiting == 0

    run(case)


def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    async def case() -> None:
        slots = make(3, queue=4)
        held = await take(slots, "a", 2)
        large, small = await line_up(slots, "b", 2), await line_up(slots, "c")
        assert (slots.in_flight, slots.waiting) == (2, 3)
        large.cancel()
        await asyncio.wait([large])
        (await small).release()
        await take(slots, "b")
        small, last = await line_up(slots, "c"), await line_up(slots, "d")
        # Granted and cancelled in the same turn: the room comes back, and goes on to whoever is next.
        held.release()
        small.cancel()
        assert (await last).count == 1
        await asyncio.wait([small])
        assert small.cancelled()
        (await last).release()
        assert (slots.in_flight, slots.waiting) == (1, 0)

    run(case)


def test_a_share_is_kept_for_who_was_refused() -> None:
    async def case() -> None:
        clock = Clock()
        slots = make(4, fair=True, clock=clock)
        held = [await slots.take("heavy") for _ in range(4)]  # alone, it may have them all
        again = int((await refused(slots, "light")).headers["Retry-After"])
        held[0].release()
        await refused(slots, "heavy")  # one is free, but light is on its way back
        light = await slots.take("light")
        held[1].release()
        held[2].release()
        other = await slots.take("heavy")  # both have what they ask for
        assert slots.in_flight == 3
        light.release()
        other.release()
        await slots.take("heavy")
        await slots.take("heavy")
        clock.now += again + 2
        assert (await slots.take("heavy")).count == 1  # light never came back for more

    run(case)


def test_under_a_full_load_each_has_its_share_and_none_starves() -> None:
    async def case() -> None:
        slots = make(7, fair=True, queue=60)
        held: dict[str, list[Slot]] = {"heavy": [await slots.take("heavy") for _ in range(7)], "b": [], "c": []}
        served = dict.fromkeys(held, 0)
        names = ["heavy"] * 20 + ["b"] * 5 + ["c"] * 5

        async def work(name: str) -> None:
            slot = await slots.take(name)
            served[name] += 1
            held[name].append(slot)

        tasks = [asyncio.create_task(work(name)) for name in names]
        for _ in range(12):
            await asyncio.sleep(0)
            oldest = max(held.values(), key=len)
            oldest.pop(0).release()
            await asyncio.sleep(0)
            assert slots.in_flight <= 7
        await asyncio.sleep(0)
        assert all(len(each) <= 3 for each in held.values())  # ceil(7 / 3)
        assert served["b"] >= 2
        assert served["c"] >= 2
        while not all(task.done() for task in tasks):
            for each in held.values():
                while each:
                    each.pop().release()
            await asyncio.sleep(0)
        for each in held.values():
            while each:
                each.pop().release()
        assert (slots.in_flight, slots.waiting, served) == (0, 0, {"heavy": 20, "b": 5, "c": 5})

    run(case)


def test_two_that_ask_for_more_than_a_share_do_not_keep_each_other_out() -> None:
    async def case() -> None:
        slots = make(4, fair=True, queue=4)
        held = await slots.take("c")
        tasks = [await line_up(slots, name, 4) for name in "ab"]
        held.release()
        (await tasks[0]).release()
        (await tasks[1]).release()
        assert slots.in_flight == 0

    run(case)


@pytest.mark.parametrize(("seconds_each", "low", "high"), [(0.01, 1, 1), (2.0, 2, 5), (15.0, 12, 40), (500.0, 60, 60)])
def test_retry_after_follows_the_drain_rate(seconds_each: float, low: int, high: int) -> None:
    async def case() -> None:
        clock = Clock()
        slots = make(2, clock=clock)
        held = [await slots.take("a"), await slots.take("a")]
        for _ in range(50):
            clock.now += seconds_each
            held.pop(0).release()
            held.append(await slots.take("a"))
        said = int((await refused(slots)).headers["Retry-After"])
        assert low <= said <= high

    run(case)


def test_before_anything_was_released_it_takes_as_long_again() -> None:
    async def case() -> None:
        clock = Clock()
        slots = make(1, clock=clock)
        await slots.take("a")
        clock.now += 7
        assert (await refused(slots)).headers["Retry-After"] == "7"

    run(case)


def test_retry_after_grows_with_those_who_are_ahead_and_ignores_idle_time() -> None:
    async def case() -> None:
        clock = Clock()
        slots = make(10, clock=clock)
        for _ in range(40):
            slot = await slots.take("a")
            clock.now += 1
            slot.release()
        clock.now += 3600
        for _ in range(10):
            await slots.take("a")
        said = [int((await refused(slots)).headers["Retry-After"]) for _ in range(30)]
        assert said[0] <= 2
        assert said == sorted(said)
        assert 9 <= said[-1] <= 12  # one turn of the house, however many knock

    run(case)
