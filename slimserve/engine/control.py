"""What the supervisor says to its engine over the engine's private unix socket, with the standard library."""

from __future__ import annotations

import errno
import http.client
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from slimserve.admission.config import ACCEPT_PATH, DRAIN_PATH, STATE_PATH
from slimserve.engine.descriptors import wait_awake
from slimserve.shapes import Between, ShapeError, build

# A busy event loop answers late; one that does not answer for this long is asked again, or given up by its caller.
ANSWER_SECONDS = 5.0

_Number = Annotated[int, Between(0, 1 << 40)]


class Unanswerable(Exception):
    """The engine refused the question in a way that asking again will not change."""


@dataclass(frozen=True, kw_only=True)
class Door:
    """What the door says of itself.

    Args:
        accepting: whether it takes connections on the public socket.
        in_flight: sequences that are generated.
        waiting: sequences that wait at the door.
        cap: most sequences in flight.
        stalled_seconds: since the engine's last step or chunk while work is under way; 0 while there is none.
    """

    accepting: bool
    in_flight: _Number
    waiting: _Number
    cap: _Number
    stalled_seconds: Annotated[float, Between(0, 1e12)]


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Control:
    """The engine behind one unix socket; each call opens a connection of its own, so any thread may ask.

    Args:
        path: where the engine listens.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def is_healthy(self) -> bool:
        """Whether `/health` answers 200."""
        try:
            return self.ask("GET", "/health")[0] == 200
        except OSError:
            return False

    def gives_token(self, model: str, seconds: float) -> bool:
        """Whether a completion of one token, with the model's own sampling, comes back.

        Args:
            model: the name that the engine serves the model under.
            seconds: how long the answer may take.

        Raises:
            Unanswerable: the engine said 4xx: the request itself is wrong.
        """
        body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 1}).encode()
        try:
            status, answer = self.ask("POST", "/v1/completions", body, seconds)
        except OSError:  # whether the engine has died is for its supervisor to see
            return False
        if 400 <= status < 500 and status not in (408, 425, 429):
            raise Unanswerable(f"HTTP {status}: {message_of(answer)}")
        return status == 200 and has_token(answer)

    def door(self, seconds: float = ANSWER_SECONDS) -> Door:
        """The door's state.

        Raises:
            OSError: nobody answers within `seconds`, or something else does.
        """
        return read_door(*self.ask("GET", STATE_PATH, seconds=seconds))

    def accept(self) -> None:
        """Have the engine take connections on the public socket.

        Raises:
            OSError: it does not answer, or cannot.
        """
        self._order(ACCEPT_PATH)

    def drain(self) -> None:
        """Have the engine stop taking connections and new work; what runs goes on.

        Raises:
            OSError: it does not answer.
        """
        self._order(DRAIN_PATH)

    def metrics(self, seconds: float = 2.0) -> str | None:
        """`/metrics` as text; None while nobody answers."""
        try:
            status, answer = self.ask("GET", "/metrics", seconds=seconds)
        except OSError:
            return None
        return answer.decode(errors="replace") if status == 200 else None

    def ask(
        self, method: str, path: str, body: bytes | None = None, seconds: float = ANSWER_SECONDS
    ) -> tuple[int, bytes]:
        """Status and body of any request.

        Raises:
            OSError: nobody answers within `seconds`, or not in HTTP.
        """
        connection = _Connection(self.path, seconds)
        try:
            headers = {"Content-Type": "application/json"} if body else {}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError(f"no answer of HTTP: {error!r}") from error
        finally:
            connection.close()

    def _order(self, path: str) -> None:
        status, answer = self.ask("POST", path, b"")
        if status >= 300:
            raise OSError(f"{path} is answered with HTTP {status}: {message_of(answer)}")


class Line:
    """One connection to the door that is kept, so that asking again takes no descriptor and no path.

    Args:
        control: whose door.
    """

    def __init__(self, control: Control) -> None:
        self._connection = _Connection(control.path, ANSWER_SECONDS)

    def door(self, seconds: float) -> Door:
        """The door's state.

        Args:
            seconds: how long it may take, as `wait_awake` counts.

        Raises:
            TimeoutError: nobody answers within that time.
            OSError: nobody listens, or something else answers.
        """
        kept = self._connection.sock is not None
        try:
            return self._ask(seconds)
        except (ConnectionError, http.client.HTTPException) as error:
            if not kept:
                raise OSError(f"no answer of HTTP: {error!r}") from error
        return self.door(seconds)  # the engine had closed it, as it does with those that say nothing for a while

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _ask(self, seconds: float) -> Door:
        try:
            self._connection.request("GET", STATE_PATH)
            if not wait_awake(self._connection.sock, seconds):
                raise TimeoutError(f"no answer within {seconds:g} s")
            self._connection.sock.settimeout(seconds)
            response = self._connection.getresponse()
            return read_door(response.status, response.read())
        except BaseException:
            self._connection.close()  # the answer to this question must not be taken for that to the next
            raise


# What is in our way, and says nothing of the engine: no descriptor left, the socket's path gone, no memory.
_OUR_OWN = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOMEM, errno.ENOBUFS}
)


def is_our_own(error: OSError) -> bool:
    """Whether a question was not asked for a reason on our side."""
    return error.errno in _OUR_OWN


def read_door(status: int, answer: bytes) -> Door:
    """The door's state in an answer of HTTP.

    Raises:
        OSError: it is not in there.
    """
    try:
        if status == 200:
            return build(Door, json.loads(answer))
    except (ValueError, ShapeError) as error:
        raise OSError(f"the door's state is not readable: {error}") from None
    raise OSError(f"the door's state is answered with HTTP {status}")


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
