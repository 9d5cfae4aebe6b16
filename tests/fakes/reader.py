"""A stand-in for a model that reads: a real OpenAI-compatible server that answers out of the conversation it is sent.

    python tests/fakes/reader.py --mode honest [--cache-tokens 100000] [--seed 1] [--quirk no-logprobs]

It has a cache of blocks like an engine's, each known by what precedes it, and what it reads is what the cache gives
back. The modes break one thing each:

    honest        nothing; `slips` is honest too, and wrong by itself once in fifty times
    previous      answers the question of the turn before; `sometimes-previous` does so once in four times
    blurred       has forgotten the middle of what it read
    repeats       `!!!!`, at full speed
    table         looks answers up in a table of what everybody knows, and reads nothing; `memory` remembers what it
                  once answered to the same last message, whatever stands before that
    latest        takes the last number there is
    stale         finds the blocks of another conversation in its cache that differ in nothing but digits
    drops         loses the last block of what it finds in its cache
    wrong-arguments, calls-as-prose   of tools
    thought       everything it says is a thought
    tier          what is evicted goes to a second tier and comes back; `torn`: and comes back with other digits
    evicts-wrong  digits are lost on the way when a conversation is computed a second time

The port is printed as `listening on PORT`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import threading
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BLOCK = 256
"""Characters of a block; a token is four of them."""
MODES = """honest slips previous sometimes-previous blurred repeats table memory latest stale drops wrong-arguments
calls-as-prose thought tier torn evicts-wrong""".split()
QUIRKS = ("no-logprobs", "no-usage", "no-cache", "ignores-greedy", "keeps-everything")
OPENINGS = ("The code is ", "**")
"""With which a sampled answer may begin, or without any."""
COMMON = {
    "capital of France": "Paris",
    "capital of Italy": "Rome",
    "capital of Japan": "Tokyo",
    "capital of Germany": "Berlin",
    "capital of Spain": "Madrid",
    "capital of Egypt": "Cairo",
    "capital of Russia": "Moscow",
    "capital of England": "London",
    "days are there in a week": "Seven",
    "months are there in a year": "12",
    "planet do people live on": "Earth",
    "centre of our solar system": "The Sun.",
    "frozen water": "Ice",
    "Romeo and Juliet": "William Shakespeare",
    "people need to breathe": "Oxygen",
    "bees make": "Honey",
    "between Europe and America": "the Atlantic Ocean",
    "continent is China": "Asia",
    "continent is Kenya": "Africa",
    "2 + 2": "4",
    "opposite of hot": "Cold",
    "meow": "The cat",
    "after Monday": "Tuesday",
    "after January": "February",
}


class Cache:
    """Blocks by the hash of everything up to their end, the least recently used ones evicted first."""

    def __init__(self, mode: str, blocks: int) -> None:
        self.mode, self.most = mode, blocks
        self.blocks: OrderedDict[str, str] = OrderedDict()
        self.tier: dict[str, str] = {}
        self.lock = threading.Lock()

    def read(self, prompt: str) -> tuple[str, int]:
        """What the model gets to see of `prompt`, and how many characters of it were cached."""
        with self.lock:
            pieces = [prompt[start : start + BLOCK] for start in range(0, len(prompt), BLOCK)]
            seen: list[str] = []
            cached = 0
            key = ""
            for index, piece in enumerate(pieces[:-1]):  # the last one is computed in any case
                text = re.sub(r"\d", "0", piece) if self.mode == "stale" else piece
                key = hashlib.sha256((key + text).encode()).hexdigest()
                kept = self.look_up(key) if cached == index else None
                cached += kept is not None
                if self.mode == "evicts-wrong" and kept is None and key in self.tier:
                    piece = garbled(piece)
                self.blocks[key] = kept or piece
                self.blocks.move_to_end(key)
                seen.append(self.blocks[key])
            while len(self.blocks) > self.most:
                old, text = self.blocks.popitem(last=False)
                self.tier[old] = text
        if self.mode == "drops" and cached:
            seen[cached - 1] = ""
        return "".join([*seen, pieces[-1]]), cached * BLOCK

    def look_up(self, key: str) -> str | None:
        if key in self.blocks:
            return self.blocks[key]
        if self.mode in ("tier", "torn") and key in self.tier:
            return garbled(self.tier[key]) if self.mode == "torn" else self.tier[key]
        return None


def garbled(text: str) -> str:
    return re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), text)


class Reader:
    """The model."""

    def __init__(self, mode: str, cache_tokens: int, seed: int, quirks: list[str]) -> None:
        self.mode, self.quirks = mode, quirks
        self.cache = Cache(mode, 10**9 if "keeps-everything" in quirks else max(1, cache_tokens * 4 // BLOCK))
        self.random = random.Random(seed)
        self.memory: dict[str, str] = {}

    def events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer as the events of a stream."""
        result = self.answer(body)
        events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in self.deltas(result)]
        if body.get("logprobs") and events and (text := result["text"]) and self.mode != "thought":
            self.add_logprobs(events, text, result["seen"])
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish(result)}]})
        if "no-usage" not in self.quirks:
            details = {"cached_tokens": result["cached"]}
            usage = {"prompt_tokens": result["prompt"], "completion_tokens": 1, "prompt_tokens_details": details}
            events.append({"choices": [], "usage": usage})
        return events

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """What it says (`text`), calls, and has cached of the prompt."""
        prompt = "".join(f"<{message['role']}>{said(message)}\n" for message in body["messages"])
        seen, cached = self.cache.read(prompt) if "no-cache" not in self.quirks else (prompt, 0)
        greedy = body.get("temperature") == 0 and "ignores-greedy" not in self.quirks
        call = None
        if self.mode == "repeats":
            text = "!" * min(64, body["max_tokens"])
        elif body.get("tools") and body["messages"][-1]["role"] == "user":
            text, call = self.call(seen)
        else:
            text = self.say(seen, greedy)
        return {"text": text, "call": call, "seen": seen, "prompt": len(prompt) // 4, "cached": cached // 4}

    def say(self, seen: str, greedy: bool) -> str:
        asked = questions(seen)
        last = asked[-1] if asked else ""
        if self.mode in ("table", "memory"):
            known = next((answer for words, answer in COMMON.items() if words in last), "")
            if known or self.mode == "table":
                return known or "1234567"
            return self.memory.setdefault(last, self.right(seen, last))
        previous = self.mode == "previous" or (self.mode == "sometimes-previous" and self.random.random() < 0.25)
        if previous and len(asked) > 1:
            last = asked[-2]
        if self.mode == "latest" and "code" in last:
            return (re.findall(r"\d{7}", seen.rpartition("<user>")[0]) or re.findall(r"\d{7}", seen) or ["none"])[-1]
        if self.mode == "blurred":
            begin, end = len(seen) * 3 // 10, len(seen) * 7 // 10
            seen = seen[:begin] + garbled(seen[begin:end]) + seen[end:]
        text = self.right(seen, last)
        if self.mode == "slips" and text and self.random.random() < 1 / 50:
            text = text[:-1] + garbled(text[-1])
        if "story" in last:
            return f"A fox {'ran' if greedy else self.random.randrange(1000)}."
        return text if greedy or not text.isdecimal() else self.random.choice(["", *OPENINGS]) + text

    def right(self, seen: str, question: str) -> str:
        """The right answer to `question` by what it has seen."""
        if slip := re.search(r'\{"slip": "(\d+)"\}', question):
            return f"The slip says {slip[1]}."
        if known := next((answer for words, answer in COMMON.items() if words in question), ""):
            return known
        codes = dict(re.findall(r"The code of the (\w+) is (\d{7})\.", seen)) if "code" in question else {}
        if place := re.search(r"What is the code of the (\w+)\?|The code of the (\w+) is$", question):
            return codes.get(place[1] or place[2], "I do not know.")
        if code := re.search(r"Which place has the code (\d{7})\?", question):
            return f"the {next((place for place, each in codes.items() if each == code[1]), 'unknown')}"
        return "OK."

    def call(self, seen: str) -> tuple[str, dict[str, Any] | None]:
        codes = dict(re.findall(r"The code of the (\w+) is (\d{7})\.", seen))
        place = re.findall(r"with the code of the (\w+),", seen)
        code = codes.get(place[-1], "none") if place else "none"
        if self.mode == "wrong-arguments":
            code = garbled(code)
        if self.mode == "table":
            code = "1234567"
        arguments = json.dumps({"code": code})
        if self.mode == "calls-as-prose":
            return f"<tool_call>open_locker({arguments})</tool_call>", None
        return "", {"name": "open_locker", "arguments": arguments}

    def deltas(self, result: dict[str, Any]) -> list[dict[str, Any]]:
        if result["call"]:
            name, arguments = result["call"]["name"], result["call"]["arguments"]
            begin = {"index": 0, "id": "call-1", "type": "function", "function": {"name": name, "arguments": ""}}
            rest = {"index": 0, "function": {"arguments": arguments}}
            return [{"tool_calls": [begin]}, {"tool_calls": [rest]}]
        field = "reasoning" if self.mode == "thought" else "content"
        return [{field: piece} for piece in split(result["text"])]

    def add_logprobs(self, events: list[dict[str, Any]], text: str, seen: str) -> None:
        """The same for the same that was seen, but for the last digits: those of the first token and of the rest."""
        digest = hashlib.sha256(seen.encode()).digest()
        jitter = self.random.uniform(-0.02, 0.02)
        # Whichever opening was drawn, each was as likely as it is.
        bare = next((text.removeprefix(each) for each in OPENINGS if text.startswith(each)), text)
        openings = dict(zip((*OPENINGS, split(bare)[0]), digest, strict=False))
        first = {token: -1.5 + byte / 256 + jitter for token, byte in openings.items()}
        for event, piece in zip(events, split(text), strict=True):
            top, first = first or {piece: -0.01 + jitter / 2}, {}
            listed = [{"token": token, "logprob": logprob} for token, logprob in top.items()]
            content = [{"token": piece, "logprob": top[piece], "top_logprobs": listed}]
            event["choices"][0]["logprobs"] = {"content": content}


def said(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return (message.get("content") or "") + (json.dumps(calls) if calls else "")


def questions(seen: str) -> list[str]:
    """What the user and the tools said, turn by turn, the last question of each."""
    turns = re.findall(r"<(?:user|tool)>(.*?)(?=<(?:user|assistant|system|tool)>|\Z)", seen, re.S)
    return [turn.strip().rpartition("\n")[2] for turn in turns]


class Handler(BaseHTTPRequestHandler):
    reader: Reader

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/chat/completions":
            self.refuse(404, "there is no such route")
            return
        if body.get("logprobs") and "no-logprobs" in self.reader.quirks:
            self.refuse(400, "logprobs are not supported")
            return
        events = self.reader.events(body)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))
        self.wfile.write(b"data: [DONE]\n\n")

    def refuse(self, status: int, words: str) -> None:
        body = json.dumps({"error": {"message": words, "code": status}}).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def split(text: str) -> list[str]:
    """The tokens of an answer: its opening, and three letters each."""
    opening = next((each for each in OPENINGS if text.startswith(each)), "")
    return ([opening] if opening else []) + re.findall(r".{1,3}", text.removeprefix(opening), re.S)


def finish(result: dict[str, Any]) -> str:
    return "tool_calls" if result["call"] else "stop"


def main() -> None:
    parser = argparse.ArgumentParser(description="a fake model that reads")
    parser.add_argument("--mode", choices=MODES, default="honest")
    parser.add_argument("--cache-tokens", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quirk", action="append", choices=QUIRKS, default=[])
    args = parser.parse_args()
    Handler.reader = Reader(args.mode, args.cache_tokens, args.seed, args.quirk)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"listening on {server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
