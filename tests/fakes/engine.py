"""A stand-in for the engine: a real process that listens, loads, answers and misbehaves as its switches say.

Standard library only, and run by path, so that a test of the supervisor or of the chat needs no engine:

    python tests/fakes/engine.py --port 8000 --load-seconds 0.2 --answer "Paris."

As the real one does, it binds its address at once, and listens only when loaded. With `--uds PATH` it plays the
engine behind the door: what comes over that socket is the supervisor's, and the public socket, inherited as
SLIMSERVE_ADMISSION says, is served from `accept` to `drain`. With `--port` it is a server of its own. The public side
guards `/v1` with the hashes of SLIMSERVE_ADMISSION, or the key in VLLM_API_KEY. `GET /fake/events` tells a test what
happened: the bodies of the requests, their Authorization headers, and how many clients went away before their answer
was complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

# PR_SET_PDEATHSIG, as the real engine's processes ask for.
TIE = "import ctypes; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)"


def parser() -> argparse.ArgumentParser:
    """The switches."""
    args = argparse.ArgumentParser(description="a fake engine")
    args.add_argument("--host", default="127.0.0.1")
    args.add_argument("--port", type=int, default=0, help="0: any free one, printed as `listening on PORT`")
    args.add_argument("--uds", help="listen for the supervisor at this path instead")
    args.add_argument("--model", default="fake", help="the name under /v1/models")
    life = args.add_argument_group("life")
    life.add_argument("--load-seconds", type=float, default=0.0)
    life.add_argument("--warmup-seconds", type=float, default=0.0, help="delay of /v1/completions")
    life.add_argument("--ignore-sigterm", action="store_true")
    life.add_argument("--crash-after", type=float, metavar="SECONDS", help="exit 7 so long after it listens")
    life.add_argument("--crash-on-load", action="store_true", help="exit 3 in the middle of loading")
    life.add_argument("--only-once", metavar="FILE", help="make FILE, or fail to load when it is there already")
    life.add_argument("--freeze", action="store_true", help="no answer at the public door, and no step")
    life.add_argument("--oom-like", action="store_true", help="SIGKILL itself at the end of loading")
    life.add_argument("--never-healthy", action="store_true", help="/health answers 503")
    life.add_argument("--healthy-but-no-completion", action="store_true", help="/v1/completions never answers")
    life.add_argument("--empty-completion", action="store_true", help="/v1/completions answers without a token")
    life.add_argument("--leak-children", type=int, default=0, metavar="N", help="children that ignore SIGTERM")
    life.add_argument("--double-fork-child", action="store_true", help="a daemon in a session of its own")
    life.add_argument("--core", action="store_true", help="a child, tied to us, that computes; when it dies we exit 0")
    life.add_argument("--print-lines", type=int, default=0, metavar="N", help="log `line 1` to `line N` first")
    life.add_argument("--armed", action="store_true", help="dies with its parent, as the real engine does")
    talk = args.add_argument_group("answers")
    talk.add_argument("--answer", default="Hello from the fake.")
    talk.add_argument("--reasoning", default="", help="sent ahead of the answer")
    talk.add_argument("--reasoning-field", default="reasoning", choices=("reasoning", "reasoning_content"))
    talk.add_argument("--null-content", action="store_true", help="reasoning, if any, and no answer at all")
    talk.add_argument("--finish-reason", default="stop")
    talk.add_argument("--prefill-seconds", type=float, default=0.0, help="delay before the first byte")
    talk.add_argument("--chunk-seconds", type=float, default=0.0, help="delay before each piece of the answer")
    talk.add_argument("--no-usage", action="store_true")
    talk.add_argument("--cached-tokens", type=int, help="usage.prompt_tokens_details.cached_tokens")
    talk.add_argument("--status", type=int, default=200, help="answer chat requests with this HTTP status")
    talk.add_argument("--drop-after", type=int, metavar="N", help="close the stream after N events")
    talk.add_argument("--die-after", type=int, metavar="N", help="exit 9 after N events")
    talk.add_argument("--malformed", action="store_true", help="an event that is not JSON ahead of the answer")
    talk.add_argument("--bytes-per-write", type=int, default=0, help="cut the stream in pieces of so many bytes")
    return args


class Gone(Exception):
    """The client closed its connection."""


class Facts:
    """What the servers of one fake engine share."""

    def __init__(self, switches: argparse.Namespace) -> None:
        self.switches = switches
        door = json.loads(os.environ.get("SLIMSERVE_ADMISSION", "{}"))
        key = os.environ.get("VLLM_API_KEY", "")
        self.hashes = set(door.get("key_hashes", {}).values()) | ({digest(key)} if key else set())
        self.listen_fd: int | None = door.get("listen_fd")
        self.cap: int = door.get("max_in_flight", 0)
        self.lock = threading.Lock()
        self.events: dict[str, Any] = {"requests": [], "authorizations": [], "disconnects": 0}
        self.public: Server | None = None
        self.draining = False
        self.in_flight = 0
        self.stepped = 0.0

    def begin(self) -> None:
        with self.lock:
            if self.in_flight == 0:
                self.stepped = time.monotonic()
            self.in_flight += 1

    def end(self) -> None:
        with self.lock:
            self.in_flight -= 1

    def state(self) -> dict[str, Any]:
        with self.lock:
            stalled = time.monotonic() - self.stepped if self.in_flight else 0.0
            return {
                "accepting": self.public is not None,
                "in_flight": self.in_flight,
                "waiting": 0,
                "cap": self.cap,
                "stalled_seconds": stalled,
            }

    def accept(self) -> None:
        assert self.listen_fd is not None
        self.public = Server(self, socket.socket(fileno=os.dup(self.listen_fd)))
        threading.Thread(target=self.public.serve_forever, args=(0.02,), daemon=True).start()

    def drain(self) -> None:
        self.draining = True
        if self.public is not None:
            self.public.shutdown()
            self.public.socket.close()
            self.public = None


class Server(ThreadingMixIn, HTTPServer):
    """One listening socket of the fake, bound already."""

    daemon_threads = True

    def __init__(self, facts: Facts, bound: socket.socket, trusted: bool = False) -> None:
        self.facts, self.switches = facts, facts.switches
        self.trusted = trusted  # the supervisor's side: no key, no count
        super().__init__(("", 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (Gone, ConnectionError)):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        print(f"fake: {self.command} {self.path} {args[1] if len(args) > 1 else ''}", flush=True)

    def do_GET(self) -> None:
        switches = self.server.switches
        if self.path == "/health":
            self.send_json(503 if switches.never_healthy else 200, {})
        elif self.path == "/fake/events":
            with self.server.facts.lock:
                self.send_json(200, self.server.facts.events)
        elif self.path == "/slimserve/state" and self.server.trusted:
            self.send_json(200, self.server.facts.state())
        elif self.path == "/metrics" and self.server.trusted:
            self.send_json(200, {})
        elif self.path == "/v1/models" and self.allowed():
            self.send_json(200, {"object": "list", "data": [{"id": switches.model, "object": "model"}]})
        elif self.path != "/v1/models":
            self.send_error_json(404, "NotFoundError", f"no route {self.path}")

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        facts = self.server.facts
        if self.server.trusted and self.path in ("/slimserve/accept", "/slimserve/drain"):
            (facts.accept if self.path.endswith("accept") else facts.drain)()
            self.send_json(200, facts.state())
            return
        if not self.allowed():
            return
        body = json.loads(raw)
        with facts.lock:
            facts.events["requests"].append({"path": self.path, "body": body})
            facts.events["authorizations"].append(self.headers.get("Authorization"))
        if self.server.trusted:
            self.answer(body)
            return
        if facts.draining:
            self.send_error_json(503, "server_error", "draining")
            return
        facts.begin()
        try:
            if facts.switches.freeze:
                self.wait(600.0)
            self.answer(body)
        except Gone:
            self.close_connection = True
        finally:
            facts.end()

    def answer(self, body: dict[str, Any]) -> None:
        if body.get("model") != self.server.switches.model:
            self.send_error_json(404, "NotFoundError", f"The model `{body.get('model')}` does not exist.")
            return
        try:
            if self.path == "/v1/completions":
                self.complete(body)
            elif self.path == "/v1/chat/completions":
                self.chat(body)
            else:
                self.send_error_json(404, "NotFoundError", f"no route {self.path}")
        except (Gone, ConnectionError):
            with self.server.facts.lock:
                self.server.facts.events["disconnects"] += 1
            print("fake: the client went away", flush=True)
            self.close_connection = True

    def allowed(self) -> bool:
        key = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if self.server.trusted or not self.server.facts.hashes or digest(key) in self.server.facts.hashes:
            return True
        self.send_error_json(401, "Unauthorized", "Unauthorized")
        return False

    def complete(self, body: dict[str, Any]) -> None:
        switches = self.server.switches
        self.wait(600.0 if switches.healthy_but_no_completion else switches.warmup_seconds)
        empty = switches.empty_completion
        usage = {"prompt_tokens": 1, "completion_tokens": 0 if empty else 1, "total_tokens": 1 if empty else 2}
        choices = [] if empty else [{"index": 0, "text": " world", "finish_reason": "length"}]
        self.send_json(200, {"object": "text_completion", "model": body["model"], "choices": choices, "usage": usage})

    def chat(self, body: dict[str, Any]) -> None:
        switches = self.server.switches
        self.wait(switches.prefill_seconds)
        if switches.status != 200:
            self.send_error_json(switches.status, "FakeError", f"the fake answers {switches.status}")
            return
        answer = None if switches.null_content else switches.answer
        if not body.get("stream"):
            message = {"role": "assistant", "content": answer, switches.reasoning_field: switches.reasoning or None}
            choice = {"index": 0, "message": message, "finish_reason": switches.finish_reason}
            self.send_json(200, self.envelope("chat.completion", [choice], self.usage(answer)))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.stream(body, answer)

    def stream(self, body: dict[str, Any], answer: str | None) -> None:
        switches = self.server.switches
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{switches.reasoning_field: piece} for piece in pieces(switches.reasoning)]
        deltas += [{"content": piece} for piece in pieces(answer or "")]
        events = [self.envelope("chat.completion.chunk", [choice(delta)]) for delta in deltas]
        events.append(self.envelope("chat.completion.chunk", [choice({}, switches.finish_reason)]))
        asked = (body.get("stream_options") or {}).get("include_usage")
        if asked and not switches.no_usage:
            events.append(self.envelope("chat.completion.chunk", [], self.usage(answer)))
        texts = [json.dumps(event, ensure_ascii=False) for event in events] + ["[DONE]"]
        if switches.malformed:
            texts.insert(1, "{this is not JSON")
        for number, text in enumerate(texts):
            if number == switches.die_after:
                os._exit(9)
            if number == switches.drop_after:
                self.close_connection = True
                return
            self.wait(switches.chunk_seconds)
            self.send_piece(f"data: {text}\n\n".encode())
        self.wfile.write(b"0\r\n\r\n")

    def envelope(self, kind: str, choices: list[dict[str, Any]], usage: Any = None) -> dict[str, Any]:
        event = {"id": "fake-1", "object": kind, "created": 1, "model": self.server.switches.model, "choices": choices}
        return event if usage is None else {**event, "usage": usage}

    def usage(self, answer: str | None) -> dict[str, Any]:
        switches = self.server.switches
        completion = len(pieces(switches.reasoning)) + len(pieces(answer or ""))
        usage: dict[str, Any] = {"prompt_tokens": 11, "completion_tokens": completion, "total_tokens": 11 + completion}
        if switches.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": switches.cached_tokens}
        return usage

    def wait(self, seconds: float) -> None:
        """Wait, and notice a client that leaves meanwhile, as a server with an event loop does."""
        until = time.monotonic() + seconds
        while True:
            left = max(0.0, until - time.monotonic())
            readable, _, _ = select.select([self.connection], [], [], left)
            if readable:
                if not self.connection.recv(1, socket.MSG_PEEK):
                    raise Gone
                time.sleep(min(left, 0.01))
            if left == 0.0:
                return

    def send_piece(self, data: bytes) -> None:
        size = self.server.switches.bytes_per_write or len(data)
        for start in range(0, len(data), size):
            part = data[start : start + size]
            self.server.facts.stepped = time.monotonic()
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()

    def send_json(self, status: int, body: Any) -> None:
        data = json.dumps(body, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_error_json(self, status: int, kind: str, message: str) -> None:
        self.send_json(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})


def digest(key: str) -> str:
    """A key as the launch hands it over."""
    return hashlib.sha256(key.encode()).hexdigest()


def bind(switches: argparse.Namespace) -> socket.socket:
    """The address of this fake, taken and not yet listened on."""
    if switches.uds:
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(switches.uds)
        return bound
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((switches.host, switches.port))
    return bound


def pieces(text: str) -> list[str]:
    """The text cut as a tokenizer would: a word with the space ahead of it is one piece."""
    return re.findall(r"\s*\S+|\s+$", text)


def choice(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    """One choice of a streamed event."""
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def leave_children(switches: argparse.Namespace) -> None:
    """Start the processes that a careless engine leaves behind; their pids go to the log."""
    for _ in range(switches.leak_children):
        print(f"child {subprocess.Popen([sys.executable, '-S', '-c', SLEEPER]).pid}", flush=True)
    if switches.double_fork_child:
        # The middle process ends at once, so the daemon is neither in our session nor our child.
        middle = (
            "import subprocess, sys\n"
            f"daemon = subprocess.Popen([sys.executable, '-S', '-c', {SLEEPER!r}], start_new_session=True)\n"
            "print('child', daemon.pid)"
        )
        subprocess.run([sys.executable, "-S", "-c", middle], check=True)


def follow(core: subprocess.Popen[bytes]) -> None:
    """End in order once the core is dead, as an API server does, and let it be looked at for a moment."""
    os.waitid(os.P_PID, core.pid, os.WEXITED | os.WNOWAIT)
    print("(APIServer pid=1) ERROR 11-30 04:00:00 [core_client.py:1] the core is dead", flush=True)
    for number in range(100):
        print(f"what follows from that: {number}", flush=True)
    time.sleep(1.0)
    os._exit(0)


def main() -> None:
    """Load, listen, answer until told to stop."""
    switches = parser().parse_args()
    for number in range(1, switches.print_lines + 1):
        print(f"line {number}")
    sys.stdout.flush()
    if switches.armed:
        from slimserve.engine import entry

        entry.arm()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if switches.ignore_sigterm else lambda *_: os._exit(0))
    bound = bind(switches)
    address = switches.uds or bound.getsockname()[1]
    server = Server(Facts(switches), bound, trusted=bool(switches.uds))
    leave_children(switches)
    if switches.core:
        core = subprocess.Popen([sys.executable, "-S", "-c", f"{TIE}; {SLEEPER}"])
        threading.Thread(target=follow, args=(core,), daemon=True).start()
    print(f"loading on {address}", flush=True)
    time.sleep(switches.load_seconds / 2)
    again = switches.only_once is not None and os.path.exists(switches.only_once)
    if switches.only_once is not None:
        open(switches.only_once, "w").close()
    if switches.crash_on_load or again:
        print("fake: the load failed", file=sys.stderr, flush=True)
        sys.exit(3)
    time.sleep(switches.load_seconds / 2)
    if switches.oom_like:
        os.kill(os.getpid(), signal.SIGKILL)
    bound.listen(128)
    print(f"listening on {address}", flush=True)
    if switches.crash_after is not None:
        threading.Timer(switches.crash_after, os._exit, (7,)).start()
    try:
        server.serve_forever(poll_interval=0.05)
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
