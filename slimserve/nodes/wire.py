"""A link between two nodes over TCP: each proves that it knows the secret, then signed lines go both ways.

    node    {"slimserve": 1, "nonce": N}                  head    {"slimserve": 1, "nonce": H}
    node    {"proof": HMAC(secret, "node" N H)}           head    {"proof": HMAC(secret, "head" N H)}
    both    HMAC(session, direction number text) SP text  with session = HMAC(secret, "session" N H)

The node proves itself first, so that nobody gets a proof of the head's to try secrets against. A line is a JSON object
of at most 64 KiB, and its number counts up: none can be forged, repeated or left out unseen. None is secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from slimserve.engine.descriptors import SLICE_SECONDS, wait_readable

MOST_BYTES = 64 << 10
# Both ends say something so often, and one that says nothing for so long is gone, or cut off.
BEAT_SECONDS = 2.0
SILENT_SECONDS = 10.0
# All of the proof and the claim after it, however the bytes trickle.
HELLO_SECONDS = 10.0
_VERSION = 1
_NONCE_DIGITS = 64

Message = dict[str, Any]


class Broken(Exception):
    """A link came to its end, or never came to be; the text says why."""


def digest(key: bytes, *parts: str) -> str:
    """HMAC-SHA256 of texts that hold no NUL, in hex."""
    return hmac.new(key, "\0".join(parts).encode(), hashlib.sha256).hexdigest()


class Link:
    """One end of a link, whose other end has proved itself.

    Args:
        channel: connected; it becomes ours.
        session: the key that signs.
        ours, theirs: the names of the two directions.
    """

    def __init__(self, channel: _Channel, session: bytes, ours: str, theirs: str) -> None:
        self._channel, self._session = channel, session
        self._ours, self._theirs = ours, theirs
        self._sent = self._received = 0
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self.peer = channel.peer
        """address of the other end"""

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            Broken: it cannot be sent.
        """
        with self._sending:
            text = encode(message)
            sign = digest(self._session, self._ours, str(self._sent), text)
            self._sent += 1
            self._channel.write(f"{sign} {text}\n".encode())

    def receive(self, deadline: float | None = None) -> Message:
        """The next message.

        Args:
            deadline: by the monotonic clock; None: as long as the other end is heard of now and then.

        Raises:
            Broken: none comes, or it is none of the other end's.
        """
        line = self._channel.read_line(deadline).decode(errors="replace")
        sign, _, text = line.partition(" ")
        expected = digest(self._session, self._theirs, str(self._received), text)
        if not hmac.compare_digest(sign.encode(), expected.encode()):
            raise Broken("a line is not signed by the other end: somebody has changed what was sent")
        self._received += 1
        return decode(text)

    def keep(self, words: Callable[[], Message], told: Callable[[Message], None], over: Callable[[str], None]) -> None:
        """From now on send a beat and read in threads beside.

        Args:
            words: what the beat says.
            told: called with each message of the other end, beats among them.
            over: called once with the reason when the link is at its end, unless it was closed here.
        """
        try:
            threading.Thread(target=self._read, args=(told, over), daemon=True, name="slimserve-link").start()
            threading.Thread(target=self._beat, args=(words,), daemon=True, name="slimserve-beat").start()
        except RuntimeError as error:  # the system gives no thread: nobody would hear of the other end
            if not self._closed.is_set():
                self.close()
                over(str(error))

    def close(self) -> None:
        """Hang up."""
        self._closed.set()
        self._channel.close()

    def _read(self, told: Callable[[Message], None], over: Callable[[str], None]) -> None:
        reason = ""
        try:
            while True:
                told(self.receive())
        except Broken as error:
            reason = str(error)
        if not self._closed.is_set():
            self.close()
            over(reason)

    def _beat(self, words: Callable[[], Message]) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            with contextlib.suppress(Broken):  # the reader hears of the end, and why
                self.send({"beat": words()})


class _Channel:
    """Lines of bounded size over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SILENT_SECONDS)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._buffer = b""
        try:
            self.peer = str(connection.getpeername()[0])
        except OSError:  # it has gone already
            self.peer = "an address that is gone"

    def write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise Broken(f"nothing can be sent: {error.strerror or error}") from None

    def read_line(self, deadline: float | None) -> bytes:
        while b"\n" not in self._buffer:
            if len(self._buffer) > MOST_BYTES:
                raise Broken(f"a line of more than {MOST_BYTES >> 10} KiB")
            self._wait(deadline)
            try:
                data = self._socket.recv(MOST_BYTES)
            except (OSError, ValueError) as error:
                raise Broken(f"nothing can be read: {getattr(error, 'strerror', None) or error}") from None
            if not data:
                raise Broken("the other end hung up")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _wait(self, deadline: float | None) -> None:
        """Until something is to be read. Without a deadline only time in which we could run ourselves counts."""
        left = SILENT_SECONDS
        while True:
            part = min(left, SLICE_SECONDS) if deadline is None else deadline - time.monotonic()
            try:
                if part > 0 and wait_readable([self._socket], part):
                    return
            except (OSError, ValueError):
                raise Broken("the link was closed") from None
            left -= part
            if deadline is not None or left <= 0:
                seconds = HELLO_SECONDS if deadline is not None else SILENT_SECONDS
                raise Broken(f"nothing complete was heard for {seconds:g} s")

    def say(self, message: Message) -> None:
        self.write(encode(message).encode() + b"\n")

    def hear(self, deadline: float) -> Message:
        return decode(self.read_line(deadline).decode(errors="replace"))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever reads
        self._socket.close()


def encode(message: Message) -> str:
    """A message as one line, without its end."""
    return json.dumps(message, separators=(",", ":"))


def decode(text: str) -> Message:
    """The message of a line.

    Raises:
        Broken: it is no JSON object.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        raise Broken("what came is no line of ours") from None
    if not isinstance(message, dict):
        raise Broken("what came is no line of ours")
    return message


def offer(connection: socket.socket, secret: bytes) -> Link:
    """Prove ourselves to the head at the other end of `connection`, and see it prove itself.

    Raises:
        Broken: it is no head of ours; the connection is closed.
    """
    channel, deadline = _Channel(connection), time.monotonic() + HELLO_SECONDS
    try:
        own = secrets.token_hex(_NONCE_DIGITS // 2)
        channel.say({"slimserve": _VERSION, "nonce": own})
        theirs = _nonce(channel.hear(deadline))
        channel.say({"proof": digest(secret, "node", own, theirs)})
        answer = channel.hear(deadline)
        if "refused" in answer:
            raise Broken("it says that our secret is not its own")
        _prove(answer, digest(secret, "head", own, theirs))
        return Link(channel, _session(secret, own, theirs), "to head", "to node")
    except BaseException:
        channel.close()
        raise


def accept(connection: socket.socket, secret: bytes, deadline: float) -> Link:
    """See the node at the other end of `connection` prove itself, and prove ourselves.

    Raises:
        Broken: it is no node of ours; the connection is closed.
    """
    channel = _Channel(connection)
    try:
        own = secrets.token_hex(_NONCE_DIGITS // 2)
        theirs = _nonce(channel.hear(deadline))
        channel.say({"slimserve": _VERSION, "nonce": own})
        proof = channel.hear(deadline)
        try:
            _prove(proof, digest(secret, "node", theirs, own))
        except Broken:
            with contextlib.suppress(Broken):
                channel.say({"refused": "the secret"})
            raise
        channel.say({"proof": digest(secret, "head", theirs, own)})
        return Link(channel, _session(secret, theirs, own), "to node", "to head")
    except BaseException:
        channel.close()
        raise


def _session(secret: bytes, node: str, head: str) -> bytes:
    return digest(secret, "session", node, head).encode()


def _nonce(message: Message) -> str:
    nonce = message.get("nonce")
    if message.get("slimserve") != _VERSION or not isinstance(nonce, str):
        raise Broken("what came is no greeting of ours")
    if len(nonce) != _NONCE_DIGITS or not all(digit in "0123456789abcdef" for digit in nonce):
        raise Broken("what came is no greeting of ours")
    return nonce


def _prove(message: Message, expected: str) -> None:
    proof = message.get("proof")
    if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(errors="replace"), expected.encode()):
        raise Broken("it does not know the secret")
