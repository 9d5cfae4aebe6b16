"""Questions to a starting engine over HTTP, with the standard library: importing a client costs more than asking."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass

POLL_SECONDS = 0.05
# An engine that accepts and does not answer is asked again; the deadline over all is the caller's.
HEALTH_SECONDS = 5.0


class Unanswerable(Exception):
    """The engine refused the question in a way that asking again will not change."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine listens.

    Args:
        host: the address that it was told to bind.
        port: its TCP port.
    """

    host: str
    port: int

    @property
    def reachable_host(self) -> str:
        """The host to connect to: an engine bound to every address is reached over loopback."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host or "127.0.0.1"
        if address.is_unspecified:
            return "::1" if address.version == 6 else "127.0.0.1"
        return self.host

    @property
    def base_url(self) -> str:
        """The OpenAI-compatible root, as a client wants it."""
        host = self.reachable_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"

    def connection(self, seconds: float) -> http.client.HTTPConnection:
        """A connection, not yet open, whose every step may take `seconds`."""
        return http.client.HTTPConnection(self.reachable_host, self.port, timeout=seconds)


def is_healthy(address: Address) -> bool:
    """Whether `/health` answers 200."""
    connection = address.connection(HEALTH_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def until_healthy(address: Address, cancelled: threading.Event) -> None:
    """Ask `/health` until it answers 200, or until cancelled."""
    while not is_healthy(address) and not cancelled.wait(POLL_SECONDS):
        pass


def until_token(address: Address, model: str, api_key: str | None, seconds: float, cancelled: threading.Event) -> None:
    """Ask for one token, with the model's own sampling, until it comes, or until cancelled.

    An answer without a token, and an error of the server (5xx), are asked again.

    Args:
        address: the engine.
        model: the name that it serves the model under.
        api_key: sent as a bearer token.
        seconds: how long one answer may take.
        cancelled: gives up when set.

    Raises:
        Unanswerable: the engine said 4xx: the request itself is wrong, or the key.
    """
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    while not cancelled.is_set():
        connection = address.connection(seconds)
        try:
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            answer = response.read()
            if response.status == 200 and has_token(answer):
                return
            if 400 <= response.status < 500 and response.status not in (408, 425, 429):
                raise Unanswerable(f"HTTP {response.status}: {message_of(answer)}")
        except (OSError, http.client.HTTPException):
            pass  # a closed connection: whether the engine has died is for its supervisor to see
        finally:
            connection.close()
        cancelled.wait(POLL_SECONDS)


def has_token(answer: bytes) -> bool:
    """Whether a completion holds at least one token. The text may be empty: a token can be a part of a character."""
    try:
        body = json.loads(answer)
        return bool(body["choices"]) and body["usage"]["completion_tokens"] >= 1
    except (ValueError, KeyError, TypeError):
        return False


def message_of(answer: bytes) -> str:
    """The message in an error body of the OpenAI kind, or its first bytes."""
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")


class Question:
    """A call in a thread of its own; its end can be waited for beside other things. Use it inside `with`.

    Args:
        call: is given an event, and returns soon after that is set.
    """

    def __init__(self, call: Callable[[threading.Event], None]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC)

    def __enter__(self) -> Question:
        # A daemon: one that waits for an answer ends with the engine's socket, and must not keep us until then.
        threading.Thread(target=self._run, daemon=True, name="slimserve-probe").start()
        return self

    def __exit__(self, *error: object) -> None:
        self._cancelled.set()
        os.close(self._reader)

    def _run(self) -> None:
        try:
            self._call(self._cancelled)
        except BaseException as error:  # handed to whoever waits
            self._error = error
        finally:
            os.close(self._writer)

    def fileno(self) -> int:
        """A descriptor that becomes readable when the call is over, for `select`."""
        return self._reader

    def is_over(self) -> bool:
        """Whether the call has returned; raises what it raised."""
        if not select.select([self._reader], [], [], 0)[0]:
            return False
        if self._error is not None:
            raise self._error
        return True
