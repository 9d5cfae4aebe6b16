"""A stand-in for the engine behind the door: a real process that answers, dawdles and breaks as each request says.

    python tests/fakes/upstream.py --control /tmp/x/control --config '{"max_in_flight": 4, "max_model_len": 100}'

It has the shape of the real thing: uvicorn serves the application on a private unix socket, the door stands before it
and serves a public TCP socket that was bound before. A second TCP port serves the same application bare, for
comparisons. Both ports are printed as `listening on DOOR BARE`. `--set MODULE.NAME=VALUE` shortens a deadline of the
door for a test.

What becomes of a request is in its body, under `fake`:

    chunks: pieces of a stream (3)        interval: seconds between them (0)     delay: seconds before the answer (0)
    text: of each piece                   thought: nothing but a thought, cut by its length
    raise: an exception before the answer, or after so many pieces               exit: the process ends after as many
    status: an error of the engine's own  fail: one in the stream, after so many pieces      words: of either
    freeze: no answer, ever
    stay: going on after the client is gone, whatever is done to end it          deaf: never asking whether it is there

`GET /fake/state`, past the door, tells what it saw; `/fake/metrics` is what the door counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


def event(text: str, thought: bool = False, finish: str | None = None) -> bytes:
    """One piece of a stream, as the engine words it."""
    delta = {"reasoning": text} if thought else {"content": text}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": None}
    data = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "fake"}
    return b"data: " + json.dumps({**data, "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


class Upstream:
    """The application, and what it saw."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.most = 0
        self.finished = 0
        self.requests = 0
        self.last: dict[str, Any] = {}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        scope["app"] = self
        if scope["type"] == "lifespan":
            await live(receive, send)
        elif scope["path"] == "/fake/state":
            await reply(send, 200, vars(self))
        elif scope["path"] == "/fake/metrics":
            import prometheus_client

            await reply(send, 200, prometheus_client.generate_latest())
        elif scope["method"] == "GET":
            await reply(send, 200, {"object": "list", "data": [], "path": scope["path"]})
        else:
            await self.generate(scope, receive, send)

    async def generate(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body", False):
                break
        body = json.loads(raw)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.last = {"path": scope["path"], "headers": headers, "body": body}
        self.requests += 1
        count = body.get("n") or 1
        self.in_flight += count
        self.most = max(self.most, self.in_flight)

        async def last(message: Message) -> None:
            # As in the engine, whose work is over before the last of its answer is sent.
            nonlocal count
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self.in_flight -= count
                count = 0
            await send(message)

        try:
            await self.attend(body, receive, last)
            self.finished += 1
        finally:
            self.in_flight -= count

    async def attend(self, body: dict[str, Any], receive: Receive, send: Send) -> None:
        """As the engine does it: the answer and the client's going away race."""
        fake = body.get("fake", {})
        if fake.get("stay"):
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)
        if fake.get("deaf"):
            await answer(body, fake, send)
            return
        answering = asyncio.ensure_future(answer(body, fake, send))
        leaving = asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
        if answering.done():
            answering.result()


async def live(receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def reply(send: Send, status: int, data: Any) -> None:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def refusal(fake: dict[str, Any], status: int) -> dict[str, Any]:
    """An error in the engine's own words."""
    return {"error": {"message": fake.get("words", "as told"), "type": "BadRequestError", "code": status}}


async def answer(body: dict[str, Any], fake: dict[str, Any], send: Send) -> None:
    loop = asyncio.get_running_loop()
    if fake.get("freeze"):
        await loop.create_future()
    if fake.get("delay"):
        await asyncio.sleep(fake["delay"])
    if fake.get("raise") == 0:
        raise RuntimeError("a secret of the engine's")
    thought = bool(fake.get("thought"))
    text = fake.get("text", " word")
    if "status" in fake:
        await reply(send, fake["status"], refusal(fake, fake["status"]))
        return
    if not body.get("stream"):
        message = {"role": "assistant", "content": None if thought else text, "reasoning": text if thought else None}
        choice = {"index": 0, "message": message, "finish_reason": "length" if thought else "stop"}
        await reply(send, 200, {"object": "chat.completion", "choices": [choice]})
        return
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
    chunks, interval = fake.get("chunks", 3), fake.get("interval", 0)
    piece = event(text, thought)
    due = loop.time()
    for number in range(chunks):
        if interval:
            due += interval
            await asyncio.sleep(due - loop.time())
        if fake.get("exit") == number:
            os._exit(9)
        if fake.get("raise") == number:
            raise RuntimeError("a secret of the engine's")
        if fake.get("fail") == number:
            failed = b"data: " + json.dumps(refusal(fake, 500)).encode() + b"\n\ndata: [DONE]\n\n"
            await send({"type": "http.response.body", "body": failed, "more_body": False})
            return
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    last = event("", thought, "length" if thought else "stop") + b"data: [DONE]\n\n"
    await send({"type": "http.response.body", "body": last, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def serve(args: argparse.Namespace) -> None:
    import uvicorn

    from slimserve.admission.config import Config
    from slimserve.admission.middleware import Admission
    from slimserve.shapes import build

    public = socket.create_server(("127.0.0.1", args.port), backlog=2048)
    bare = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = build(Config, json.loads(args.config) | {"listen_fd": public.fileno(), "control": args.control})
    upstream = Upstream()
    door = Admission(upstream, config)

    async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        scope["app"] = application  # as FastAPI does
        await door(scope, receive, send)

    def quiet(app: Any, **where: Any) -> uvicorn.Server:
        return uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, **where))

    # As the engine does once it is up: what is there by then need not be looked through again while it serves.
    gc.collect()
    gc.freeze()
    print(f"listening on {public.getsockname()[1]} {bare.getsockname()[1]}", flush=True)
    await asyncio.gather(
        quiet(application, uds=args.control).serve(), quiet(upstream, lifespan="off").serve(sockets=[bare])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="a fake engine behind the door")
    parser.add_argument("--control", required=True, metavar="PATH")
    parser.add_argument("--config", required=True, metavar="JSON")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="MODULE.NAME=VALUE")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
    import logging

    logging.basicConfig(level=logging.INFO)
    for setting in args.set:
        name, value = setting.split("=")
        module, name = name.rsplit(".", 1)
        found = importlib.import_module(f"slimserve.admission.{module}")
        if not hasattr(found, name):
            sys.exit(f"there is no {name} in {module}")
        setattr(found, name, type(getattr(found, name))(float(value)))
    if args.loop == "uvloop":
        import uvloop

        uvloop.run(serve(args))
    else:
        asyncio.run(serve(args))


if __name__ == "__main__":
    main()
