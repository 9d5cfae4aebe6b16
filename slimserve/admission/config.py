"""What the door is told: one JSON text in the environment, written by the launch and checked at the door's start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from slimserve.engine.variables import ADMISSION_VARIABLE
from slimserve.profile import Count, Greedy, Id, Line, Queue, Thinking
from slimserve.records import dataclass
from slimserve.shapes import Between, Matching, ShapeError, build, plain

# What the supervisor asks over the control socket, and orders there.
STATE_PATH = "/slimserve/state"
ACCEPT_PATH = "/slimserve/accept"
DRAIN_PATH = "/slimserve/drain"

# What a body has room for: a token of text is four bytes or so, of escaped text twelve; the rest is for all that is no
# prompt. A longer prompt than the context would be refused all the same, after its tokens were counted.
BYTES_PER_TOKEN = 16
BYTES_BESIDE = 64 << 10

Sha256 = Annotated[str, Matching(r"[0-9a-f]{64}", "64 hex digits")]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that the door needs to know.

    Args:
        max_in_flight: the cap on sequences in flight.
        max_model_len: context in tokens; a request for more output is refused.
        fair_share: whether the cap is shared out evenly over the API keys that have work.
        queue: how many requests may wait at the door and for how long; None: it answers 429 at once.
        max_body_bytes: size of a request's body; `body_bytes` may be less.
        greedy: what becomes of a request for greedy sampling.
        thinking: what becomes of a request without thinking; None: the model does not think.
        tools: whether the engine can call tools.
        efforts: `reasoning_effort` as clients say it -> as the template knows it.
        keys_file: file of named key hashes (`keys`).
        keys_file_awaited: whether it need not be there yet, and counts from the moment in which it is.
        key_hashes: name -> sha256 of further keys, from the environment.
        origins: origins that browsers may call from; none: CORS is off.
        control: path of the unix socket on which the supervisor speaks; what comes over it needs no key and no slot.
        listen_fd: the public socket, bound and listening, which is served once the supervisor says so.
    """

    max_in_flight: Count
    max_model_len: Annotated[int, Between(1, 1 << 24)]
    fair_share: bool = False
    queue: Queue | None = None
    max_body_bytes: Annotated[int, Between(1, 1 << 32)] = 16 << 20
    greedy: Greedy = "replace"
    thinking: Thinking | None = None
    tools: bool = True
    efforts: dict[Line, Line] = field(default_factory=dict)
    keys_file: Line | None = None
    keys_file_awaited: bool = False
    key_hashes: dict[Id, Sha256] = field(default_factory=dict)
    origins: tuple[Line, ...] = ()
    control: Line | None = None
    listen_fd: Annotated[int, Between(0, 1 << 20)] | None = None

    def body_bytes(self, prompts: int = 1) -> int:
        """Size of a request's body at most, by what so many prompts have use for."""
        return min(self.max_body_bytes, prompts * self.max_model_len * BYTES_PER_TOKEN + BYTES_BESIDE)

    def to_text(self) -> str:
        """The value of the variable."""
        return json.dumps(plain(self, nulls=False), separators=(",", ":"))


def from_environment(environment: Mapping[str, str]) -> Config:
    """The configuration that the launch wrote.

    Raises:
        ValueError: the variable is missing, no JSON, or not of this shape.
    """
    text = environment.get(ADMISSION_VARIABLE)
    if text is None:
        raise ValueError(f"{ADMISSION_VARIABLE} is not set: the door is configured by whoever launches the engine")
    try:
        return build(Config, json.loads(text))
    except ShapeError as error:
        raise ValueError(f"{ADMISSION_VARIABLE}: {'; '.join(str(problem) for problem in error.problems)}") from None
