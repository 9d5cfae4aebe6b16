"""The clients of a flood: hundreds of connections, each of which sends its next request when it has its answer.

All of them are one thread over epoll with as little work for each answer as can be, since what the clients lose counts
as the server's latency. A request's time runs from before its bytes are given to the kernel until the last byte of its
answer has been read; an answer that lies in the socket while others are read ages all the while.
"""

from __future__ import annotations

import collections
import gc
import heapq
import random
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

# Answers that are read between two looks at who is to vanish.
AT_ONCE = 64
# A client that vanishes does so within so long, if it has no answer by then: about as long as a refusal takes.
VANISH_SECONDS = 0.02
SILENCE_SECONDS = 60.0

_GREETING = b"GET /health HTTP/1.1\r\nhost: bench\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)


@dataclass
class Outcome:
    """What became of a flood.

    Args:
        statuses: status of the answer, or `vanished`, or `cut` for a connection that was closed -> requests.
        refused_ms: time to each 429.
        seconds: from the first request to the last answer.
        client_busy, server_busy: share of them in which either had a core.
    """

    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    refused_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    client_busy: float = 0.0
    server_busy: float = 0.0


class Flood:
    """One flood.

    Args:
        port: on loopback.
        data: the bytes of every request; its answers must have a `content-length`.
        connections: at once.
        requests: in all.
        vanishing: share of the requests whose client goes away at a random moment.
        seed: of those moments.
    """

    def __init__(
        self, port: int, data: bytes, *, connections: int, requests: int, vanishing: float = 0.0, seed: int = 0
    ) -> None:
        self._port = port
        self._data = data
        self._connections = connections
        self._left = requests
        self._vanishing = vanishing
        self._rng = random.Random(seed)
        self._epoll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        # Of each connection with a request under way: when that was sent, and what there is of its answer.
        self._sent: dict[int, float] = {}
        self._partial: dict[int, bytes] = {}
        # Moment, connection and when its request was sent, of those that are to vanish.
        self._leaving: list[tuple[float, int, float]] = []
        self._outcome = Outcome()

    def run(self, server: int) -> Outcome:
        """Send it and wait for its end; `server` is the process that is watched.

        Raises:
            ConnectionError: a connection was closed before it began.
            TimeoutError: nothing came for a minute.
        """
        # Each has had an answer before the flood begins; those of clients that come later are made within it.
        for _ in range(self._connections):
            _greet(self._sockets[self._connect()])
        gc.disable()
        begin, own, theirs = time.perf_counter(), time.process_time(), _seconds_on_a_core(server)
        # Who was first may have its answer before the last has sent: nobody waits for all to be under way.
        for number in list(self._sockets):
            self._send(number)
            self._read(0)
        while self._sent:
            self._vanish()
            self._read(max(0.0, self._leaving[0][0] - time.perf_counter()) if self._leaving else SILENCE_SECONDS)
        outcome = self._outcome
        outcome.seconds = time.perf_counter() - begin
        outcome.client_busy = (time.process_time() - own) / outcome.seconds
        outcome.server_busy = (_seconds_on_a_core(server) - theirs) / outcome.seconds
        gc.enable()
        for sock in self._sockets.values():
            sock.close()
        self._epoll.close()
        return outcome

    def _connect(self) -> int:
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._sockets[sock.fileno()] = sock
        self._epoll.register(sock, select.EPOLLIN)
        return sock.fileno()

    def _send(self, number: int) -> None:
        if not self._left:
            return
        self._left -= 1
        leaves = self._rng.random() < self._vanishing
        now = self._sent[number] = time.perf_counter()
        try:
            if self._sockets[number].send(self._data) < len(self._data):
                raise RuntimeError("the kernel took half a request: make it smaller")
        except ConnectionError:
            self._end(number, "cut")
            return
        if leaves:
            heapq.heappush(self._leaving, (now + self._rng.random() * VANISH_SECONDS, number, now))

    def _read(self, seconds: float) -> None:
        events = self._epoll.poll(seconds, AT_ONCE)
        if not events and seconds >= SILENCE_SECONDS:
            raise TimeoutError(f"nothing came for {seconds:g} s; {len(self._sent)} requests are under way")
        for number, _ in events:
            try:
                answer = self._sockets[number].recv(65536)
            except ConnectionError:
                answer = b""
            now = time.perf_counter()
            if not answer:
                self._end(number, "cut" if number in self._sent else None)
                continue
            if self._partial:
                answer = self._partial.pop(number, b"") + answer
            if not _is_whole(answer):
                self._partial[number] = answer
                continue
            sent = self._sent.pop(number)
            status = answer[9:12].decode()
            self._outcome.statuses[status] += 1
            if status == "429":
                self._outcome.refused_ms.append(1e3 * (now - sent))
            self._send(number)

    def _vanish(self) -> None:
        now = time.perf_counter()
        while self._leaving and self._leaving[0][0] <= now:
            _, number, sent = heapq.heappop(self._leaving)
            if self._sent.get(number) == sent:
                self._end(number, "vanished")

    def _end(self, number: int, how: str | None) -> None:
        """Reset a connection, and go on with a new one."""
        if how is not None:
            self._outcome.statuses[how] += 1
        self._sent.pop(number, None)
        self._partial.pop(number, None)
        sock = self._sockets.pop(number)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.close()
        if self._left:
            self._send(self._connect())


def _greet(sock: socket.socket) -> None:
    sock.setblocking(True)
    sock.sendall(_GREETING)
    answer = b""
    while not _is_whole(answer):
        piece = sock.recv(65536)
        if not piece:
            raise ConnectionError("closed before the flood")
        answer += piece
    sock.setblocking(False)


def _is_whole(answer: bytes) -> bool:
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return False
    at = answer.index(b"content-length: ", 0, end + 2) + 16
    return len(answer) >= end + 4 + int(answer[at : answer.index(b"\r", at)])


def _seconds_on_a_core(process: int) -> float:
    """Of its main thread, which runs its event loop."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9
