"""A fake OpenAI server for the harness: a real process that answers, lies and breaks as it is told.

    python tests/fakes/model_server.py [--port N] [--set '{"interval": 0.0256}']

prints `listening on PORT`. It speaks `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health` and `/metrics`,
and sends 10,000 chunks a second over 256 streams on less than one core. `--set` switches for all requests, the key
`fake` in a body for that one; SWITCHES names them all, and any other is an error. An answer has as many tokens as
`max_tokens` says, unless `stop` says fewer.

`GET /fake/state` tells what it saw: requests, in_flight, most (in flight at once), connections, last (the last body);
`GET /fake/times` when it sent what, on the monotonic clock of this machine, by the requests' `x-request-id`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reader import Reader

SWITCHES: dict[str, Any] = {
    "interval": 0.0,  # seconds between chunks
    "delay": 0.0,  # seconds before the first chunk, after the head
    "head_delay": 0.0,  # seconds before the head
    "jitter": 0.0,  # each delay and interval is drawn anew, up to this share shorter or longer
    "slower": 1.0,  # factor of all of these
    "grid": False,  # chunks leave on multiples of the interval, those of all streams together, as an engine's steps do
    "pieces": 1,  # tokens a chunk
    "pattern": None,  # tokens of each chunk in turn, such as [1, 4, 2]; instead of `pieces`
    "stop": None,  # the answer ends by itself with this many tokens, the last one without text
    "answer": "words",  # whose tokens: a key of ANSWERS
    "reads": "",  # chats are answered by the reader beside this file: its mode, and its quirks
    "text": " word",  # of each token of the answer `words`
    "usage": {},  # what is added to the true counts, such as {"completion_tokens": -1}; null: no usage at all
    "accepts": None,  # draft tokens kept in each step, of which an answer has one a token; null: drafts nothing
    "cached": 0,  # prompt tokens that are said to have been cached
    "continuous": True,  # usage in each chunk, for who asks for it
    "empty": False,  # 200, and a stream with nothing in it
    "break": None,  # {"how": one of BREAKS, "after": chunks}
    "split": 0,  # bytes a packet, where frames are to come in parts
    "raw": None,  # just these bytes (as Latin-1) and the end of the connection, instead of an answer
    "status": None,  # an error instead of an answer
    "words": "as told",  # of that error, and of one in the stream
    "retry_after": None,  # a header of that error
    "times": None,  # how often a request of the same x-request-id meets it; null: always
}
# half: the connection ends in the middle of a frame. cut: between two, without an end of the body. reset: the same,
# abruptly. done: a proper end of the body without [DONE]. error: an error in the stream. garbage: a frame that is no
# JSON. silence: nothing more, ever.
BREAKS = ("half", "cut", "reset", "done", "error", "garbage", "silence")


@dataclass
class Asked:
    """A request: its body, its switches, its id, and whether it is a chat."""

    body: dict[str, Any]
    fake: dict[str, Any]
    id: str
    chat: bool

    @property
    def prompt_tokens(self) -> int:
        """Ids are counted; of text, words."""
        prompt = self.body.get("prompt")
        if isinstance(prompt, str):
            return len(prompt.split())
        if prompt is not None:
            return len(prompt)
        return sum(len(str(message.get("content")).split()) for message in self.body["messages"])


def words(asked: Asked, count: int) -> list[str]:
    """The same word again and again."""
    return [asked.fake["text"]] * count


# How an answer gets its tokens: (the request, how many at most) -> the text of each.
ANSWERS: dict[str, Callable[[Asked, int], list[str]]] = {"words": words}


@dataclass
class State:
    """What the server saw."""

    requests: int = 0
    connections: int = 0
    in_flight: int = 0
    most: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafts: int = 0


class Broken(Exception):
    """The connection was ended as told."""


class Server:
    """The answers."""

    def __init__(self, switches: dict[str, Any]) -> None:
        self.switches = SWITCHES | switches
        self.state = State()
        self.times: dict[str, list[float]] = {}
        self.met: Counter[str] = Counter()
        mode, *quirks = self.switches["reads"].split() or [""]
        self.reader = Reader(mode, 10**6, 1, quirks) if mode else None

    async def respond(self, out: Connection, method: str, path: str, headers: dict[str, str], raw: bytes) -> None:
        state = self.state
        if path == "/fake/state":
            out.reply(200, vars(state))
        elif path == "/fake/times":
            out.reply(200, self.times)
        elif path == "/v1/models":
            out.reply(200, {"object": "list", "data": [{"id": "fake", "object": "model", "max_model_len": 131072}]})
        elif path == "/metrics":
            counts = {"prefix_cache_queries": state.prompt_tokens, "prefix_cache_hits": state.cached_tokens}
            if (accepts := self.switches["accepts"]) is not None:
                counts["spec_decode_num_drafts"] = state.drafts
                counts["spec_decode_num_accepted_tokens"] = state.drafts * accepts
            lines = [f'vllm:{what}_total{{model_name="fake"}} {count}\n' for what, count in counts.items()]
            out.reply(200, "".join(lines).encode(), "text/plain")
        elif method == "GET":
            out.reply(200 if path == "/health" else 404, {})
        else:
            body = json.loads(raw)
            fake = self.switches | body.get("fake", {})
            if unknown := fake.keys() - SWITCHES.keys():
                out.reply(400, {"error": {"message": f"no such switch: {', '.join(unknown)}"}})
                return
            state.requests += 1
            state.in_flight += 1
            state.most = max(state.most, state.in_flight)
            state.last = body
            try:
                asked = Asked(body, fake, headers.get("x-request-id", str(state.requests)), "chat" in path)
                await self.generate(out, asked)
            finally:
                state.in_flight -= 1

    async def generate(self, out: Connection, asked: Asked) -> None:
        fake, slower = asked.fake, asked.fake["slower"]
        self.met[asked.id] += 1
        if fake["status"] and (fake["times"] is None or self.met[asked.id] <= fake["times"]):
            more = {"Retry-After": str(fake["retry_after"])} if fake["retry_after"] is not None else {}
            out.reply(fake["status"], {"error": {"message": fake["words"], "code": fake["status"]}}, more=more)
            return
        await asyncio.sleep(fake["head_delay"] * slower)
        if fake["raw"] is not None:
            out.transport.write(fake["raw"].encode("latin-1"))
            out.close()
            raise Broken
        state = self.state
        count = fake["stop"] or asked.body.get("max_tokens") or asked.body.get("max_completion_tokens") or 16
        tokens = [] if fake["empty"] else ANSWERS[fake["answer"]](asked, count)
        if asked.chat and self.reader:
            read = self.reader.answer(asked.body)
            tokens, fake["cached"] = [read["text"]], read["cached"]
        state.prompt_tokens += asked.prompt_tokens
        state.cached_tokens += fake["cached"]
        state.drafts += len(tokens)
        if fake["stop"]:
            tokens[-1] = ""
        finish = "length" if len(tokens) == count and not fake["stop"] else "stop"
        if not asked.body.get("stream"):
            await asyncio.sleep((fake["delay"] + fake["interval"] * len(tokens)) * slower)
            out.reply(200, whole(asked, "".join(tokens), finish, self.usage(asked, len(tokens))))
            return
        out.begin()
        await self.stream(out, asked, tokens, finish)

    async def stream(self, out: Connection, asked: Asked, tokens: list[str], finish: str) -> None:
        fake, options = asked.fake, asked.body.get("stream_options") or {}
        continuous = fake["continuous"] and options.get("continuous_usage_stats")
        interval = fake["interval"] * fake["slower"]
        times = self.times[asked.id] = []
        clock = time.perf_counter
        jitter = fake["jitter"]
        due = clock() + fake["delay"] * fake["slower"] * random.uniform(1 - jitter, 1 + jitter)
        if fake["grid"]:
            due += -due % interval
        done = number = 0
        if asked.chat:
            await out.send(frame(asked, "", None, self.usage(asked, 0) if continuous else None, role=True))
        while done < len(tokens):
            if (wait := due - clock()) > 0:
                await asyncio.sleep(wait)
            if fake["break"] and fake["break"]["after"] == number:
                await self.break_off(out, asked, fake["break"]["how"])
            pattern = fake["pattern"] or [fake["pieces"]]
            ahead = min(done + pattern[number % len(pattern)], len(tokens))
            last = finish if ahead == len(tokens) else None
            usage = self.usage(asked, ahead) if continuous else None
            data = frame(asked, "".join(tokens[done:ahead]), last, usage)
            times.append(clock())
            await out.send(data)
            done, number, due = ahead, number + 1, due + interval * random.uniform(1 - jitter, 1 + jitter)
        if fake["break"] and fake["break"]["after"] >= number:
            await self.break_off(out, asked, fake["break"]["how"])
        if options.get("include_usage") and fake["usage"] is not None:
            await out.send(event({**head(asked), "choices": [], "usage": self.usage(asked, len(tokens))}))
        await out.send(b"data: [DONE]\n\n")
        out.end()

    async def break_off(self, out: Connection, asked: Asked, how: str) -> None:
        text = event({"error": {"message": asked.fake["words"], "code": 500}})
        if how == "half":
            await out.send(frame(asked, " half of this", None, None)[:60])
        elif how == "garbage":
            await out.send(b"data: {garbage}\n\n")
        elif how == "error":
            await out.send(text + b"data: [DONE]\n\n")
        elif how == "silence":
            await asyncio.get_running_loop().create_future()
        if how in ("done", "error", "garbage"):
            out.end()
        elif how == "reset":
            out.reset()
        elif how in ("half", "cut"):
            out.close()
        else:
            raise ValueError(how)
        raise Broken

    def usage(self, asked: Asked, completion: int) -> dict[str, Any] | None:
        lies = asked.fake["usage"]
        if lies is None:
            return None
        prompt = asked.prompt_tokens + lies.get("prompt_tokens", 0)
        completion += lies.get("completion_tokens", 0)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return usage | {"prompt_tokens_details": {"cached_tokens": asked.fake["cached"]}}


def head(asked: Asked) -> dict[str, Any]:
    kind = "chat.completion.chunk" if asked.chat else "text_completion"
    return {"id": f"cmpl-{asked.id}", "object": kind, "created": 1, "model": "fake"}


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def frame(asked: Asked, text: str, finish: str | None, usage: dict[str, Any] | None, role: bool = False) -> bytes:
    """One piece of a stream, as the engine words it."""
    said: dict[str, Any] = {"text": text}
    if asked.chat:
        said = {"delta": {"role": "assistant", "content": ""} if role else {"content": text}}
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return event({**head(asked), "choices": [choice], **({"usage": usage} if usage else {})})


def whole(asked: Asked, text: str, finish: str, usage: dict[str, Any] | None) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text}
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
    return {**head(asked), "object": head(asked)["object"].removesuffix(".chunk"), "choices": [choice], "usage": usage}


class Connection(asyncio.Protocol):
    """One connection: reads requests with a content-length, one after the other, and writes what answers them."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.read = bytearray()
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.state.connections += 1

    def connection_lost(self, error: Exception | None) -> None:
        if self.task:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.read += data
        top, found, rest = bytes(self.read).partition(b"\r\n\r\n")
        if not found or self.task:
            return
        first, *lines = top.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        self.read = bytearray(rest[length:])
        method, path, _ = first.split(" ")
        answering = self.server.respond(self, method, path, headers, rest[:length])
        self.task = asyncio.get_running_loop().create_task(answering)
        self.task.add_done_callback(self.answered)

    def answered(self, task: asyncio.Task[None]) -> None:
        self.task = None
        if task.cancelled() or isinstance(task.exception(), Broken):
            return
        if error := task.exception():
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self.transport.abort()
        else:
            self.data_received(b"")

    def reply(self, status: int, data: Any, kind: str = "application/json", more: dict[str, str] | None = None) -> None:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), **(more or {})}
        top = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(f"HTTP/1.1 {status} as told\r\n{top}\r\n".encode() + body)

    def begin(self) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    async def send(self, data: bytes) -> None:
        if self.transport.is_closing():  # whoever read it is gone
            raise Broken
        split = self.server.switches["split"]
        for start in range(0, len(data), split or len(data)):
            part = data[start : start + split] if split else data
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
            if split:
                await asyncio.sleep(0)

    def end(self) -> None:
        self.transport.write(b"0\r\n\r\n")

    def close(self) -> None:
        self.transport.close()

    def reset(self) -> None:
        linger = b"\x01\0\0\0\0\0\0\0"
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()


async def serve(port: int, switches: dict[str, Any]) -> None:
    server = Server(switches)
    listening = socket.create_server(("127.0.0.1", port), backlog=2048)
    serving = await asyncio.get_running_loop().create_server(lambda: Connection(server), sock=listening, backlog=2048)
    print(f"listening on {listening.getsockname()[1]}", flush=True)
    await serving.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="a fake OpenAI server that lies and breaks as told")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--set", type=json.loads, default={}, metavar="JSON")
    args = parser.parse_args()
    if unknown := args.set.keys() - SWITCHES.keys():
        parser.error(f"no such switch: {', '.join(unknown)}")
    # Not uvloop: it sends what is written only when all tasks that are due have run, later than the times noted.
    asyncio.run(serve(args.port, args.set))


if __name__ == "__main__":
    main()
