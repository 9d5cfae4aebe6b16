"""Random lives of requests through the whole door: however they end, each slot comes back, and once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from slimserve.admission import exchange, slots
from slimserve.admission.config import Config
from slimserve.admission.middleware import Admission
from slimserve.admission.progress import ENGINE
from slimserve.profile import Queue

CAP = 16
LIFECYCLES = 20_000
KEYS = [f"sk-slim-{name}" for name in "abc"]
HASHES = {key[-1]: hashlib.sha256(key.encode()).hexdigest() for key in KEYS}
SEEDS = st.integers(0, 2**32)


class Client:
    """One request from its client's side, and what the engine is told to do with it."""

    def __init__(self, rng: random.Random) -> None:
        self.key = rng.choice(KEYS)
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.orders: asyncio.Queue[str] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        self.gone = False
        self.let_go = asyncio.Event()
        n = rng.choice([1, 1, 1, 1, 2, 3, CAP, CAP + 1])
        whole = json.dumps({"n": n, "stream": rng.random() < 0.5, "messages": []}).encode()
        self.body = whole if rng.random() < 0.9 else whole[:-1]
        self.length = len(self.body) if rng.random() < 0.95 else 1 << 40
        self.kind = b"application/json" if rng.random() < 0.95 else b"text/plain"
        self.task: asyncio.Task[None] | None = None

    def scope(self) -> dict[str, Any]:
        headers = [
            (b"x-api-key", self.key.encode()),
            (b"content-type", self.kind),
            (b"content-length", b"%d" % self.length),
        ]
        path = "/v1/chat/completions"
        return {"type": "http", "method": "POST", "path": path, "headers": headers, "client": self}

    async def receive(self) -> dict[str, Any]:
        if self.gone and self.incoming.empty():
            return {"type": "http.disconnect"}
        return await self.incoming.get()

    async def send(self, message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)

    def leave(self) -> None:
        self.gone = True
        self.incoming.put_nowait({"type": "http.disconnect"})

    def offer(self, rng: random.Random) -> None:
        """The body, or half of it."""
        cut = rng.randrange(len(self.body) + 1) if rng.random() < 0.3 else len(self.body)
        piece, self.body = self.body[:cut], self.body[cut:]
        self.incoming.put_nowait({"type": "http.request", "body": piece, "more_body": bool(self.body)})


class Engine:
    """Does with each request what its orders say, and counts the sequences that it has."""

    def __init__(self) -> None:
        self.in_flight = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        client: Client = scope["client"]
        body = json.loads((await receive())["body"])
        self.in_flight += body["n"]
        counted = True
        try:
            while (order := await client.orders.get()) != "finish":
                if order == "raise":
                    raise RuntimeError("as ordered")
                if order == "listen":
                    listening = asyncio.ensure_future(receive())
                    await asyncio.wait([listening], timeout=0)
                    listening.cancel()
                if order == "stay":
                    self.in_flight -= body["n"]  # it is beyond counting, and its slot comes back without it
                    counted = False
                    while not client.let_go.is_set():
                        try:
                            await client.let_go.wait()
                        except asyncio.CancelledError:
                            continue
                    return
                if order == "chunk":
                    if not client.sent:
                        await send({"type": "http.response.start", "status": 200, "headers": []})
                    await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
            if not client.sent:
                await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if counted:
                self.in_flight -= body["n"]


class Slot(slots.Slot):
    """A slot that is remembered, so that what all of them hold can be compared with what is counted."""

    __slots__ = ()
    all: ClassVar[list[slots.Slot]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Slot.all.append(self)


class Lives(RuleBasedStateMachine):
    begun = 0
    admitted = 0
    longest_line = 0

    def __init__(self) -> None:
        super().__init__()
        Slot.all.clear()
        self.loop = asyncio.new_event_loop()
        self.clients: list[Client] = []
        self.engine = Engine()
        self.door: Admission | None = None

    @initialize(fair=st.booleans(), queue=st.sampled_from([0, 4, 100]))
    def open(self, fair: bool, queue: int) -> None:
        config = Config(
            max_in_flight=CAP,
            max_model_len=100,
            fair_share=fair,
            queue=Queue(length=queue, seconds=3600) if queue else None,
            key_hashes=HASHES,
            thinking="keep",
        )
        self.door = Admission(self.engine, config)

    def settle(self, turns: int = 15) -> None:
        async def turn() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turn())
        self.clients = [client for client in self.clients if client.task is not None and not client.task.done()]

    def some(self, seed: int) -> tuple[random.Random, list[Client]]:
        rng = random.Random(seed)
        return rng, [client for client in self.clients if rng.random() < 0.4]

    @rule(seed=SEEDS, count=st.integers(10, 40))
    def take(self, seed: int, count: int) -> None:
        rng = random.Random(seed)
        door = self.door
        assert door is not None

        async def arrive() -> None:
            for _ in range(count):
                client = Client(rng)
                if rng.random() < 0.7:
                    client.offer(rng)
                client.task = asyncio.create_task(door(client.scope(), client.receive, client.send))
                # An exception in a stream is the server's to see, which closes the connection.
                client.task.add_done_callback(lambda task: task.cancelled() or task.exception())
                self.clients.append(client)

        self.loop.run_until_complete(arrive())
        Lives.begun += count
        self.settle(turns=seed % 15)

    @rule(seed=SEEDS)
    def body(self, seed: int) -> None:
        rng, some = self.some(seed)
        for client in some:
            if client.body:
                client.offer(rng)
        self.settle()

    @rule(seed=SEEDS)
    def order(self, seed: int) -> None:
        rng, some = self.some(seed)
        for client in some:
            client.orders.put_nowait(rng.choice(["chunk", "chunk", "listen", "finish", "finish", "raise", "stay"]))
        self.settle(turns=seed % 15)

    @rule(seed=SEEDS)
    def disconnect(self, seed: int) -> None:
        for client in self.some(seed)[1]:
            client.leave()
        self.settle()

    @rule(seed=SEEDS)
    def cancel(self, seed: int) -> None:
        for client in self.some(seed)[1]:
            assert client.task is not None
            client.task.cancel()
        self.settle(turns=seed % 15)

    @invariant()
    def never_more_than_the_cap(self) -> None:
        if self.door is not None:
            room = self.door.slots
            assert 0 <= room.in_flight <= CAP
            assert room.in_flight == sum(slot.count for slot in Slot.all)
            assert room.waiting >= 0
            Lives.longest_line = max(Lives.longest_line, room.waiting)

    def teardown(self) -> None:
        for client in self.clients:
            client.leave()
            client.orders.put_nowait("finish")
            client.let_go.set()
        for _ in range(100):
            if not self.clients:
                break
            self.settle()
        assert not self.clients
        assert self.door is not None
        room = self.door.slots
        assert (room.in_flight, room.waiting, self.engine.in_flight) == (0, 0, 0)
        assert not any(slot.count for slot in Slot.all)
        assert not ENGINE.waiting
        Lives.admitted += len(Slot.all)
        self.settle()
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()


def test_after_20_000_lives_nothing_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "Slot", Slot)
    monkeypatch.setattr(exchange, "LISTEN_SECONDS", 0)
    monkeypatch.setattr(exchange, "GRACE_SECONDS", 0)
    logging.getLogger("slimserve.admission").setLevel(logging.CRITICAL)
    Lives.begun = Lives.admitted = Lives.longest_line = 0
    often = settings(
        max_examples=200,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    try:
        run_state_machine_as_test(Lives, settings=often)
    finally:
        logging.getLogger("slimserve.admission").setLevel(logging.NOTSET)
    assert Lives.begun >= LIFECYCLES
    assert Lives.admitted >= LIFECYCLES // 8
    assert Lives.longest_line > CAP
