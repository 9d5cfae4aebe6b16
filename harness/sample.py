"""What is asked of a server, and what came: the words that workloads, client, statistics and receipts share.

All times are seconds on the monotonic clock, from the moment at which the client began (`client.drive`). All counts of
tokens are the server's `usage`; nothing is guessed from text or from the number of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Phase = Literal["warm-up", "measure"]
Outcome = Literal["ok", "failed", "rejected", "void"]

# Of a run, and of an answer.
LONGEST_S = 1e9
MOST_COUNTED = 1 << 20


@dataclass(frozen=True)
class Job:
    """One request. Exactly one of `prompt_ids`, `text` and `messages` is set.

    Args:
        id: distinct within a run.
        phase: samples of the warm-up are kept, and no statistic counts them.
        max_tokens: of the answer; the exact number with `ignore_eos`.
        prompt_ids: the prompt as token ids, for an API that takes them.
        text: the prompt as text, whose encoding has `asked_prompt_tokens`.
        messages: a chat; how many tokens the server's template adds is its own affair.
        sampling: parameters of the request such as `temperature`; empty leaves the model's own in force.
        asked_prompt_tokens: tokens that `usage` must count; None where the number is not exact.
        ignore_eos: the answer goes on to `max_tokens`.
        seed: of the sampling.
    """

    id: str
    phase: Phase
    max_tokens: int
    prompt_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    asked_prompt_tokens: int | None = None
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class Conversation:
    """Jobs that follow each other, each after the answer to the one before.

    Args:
        jobs: in their order.
        gaps_s: seconds before each job, as many as jobs; empty for none.
    """

    jobs: tuple[Job, ...]
    gaps_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.gaps_s and len(self.gaps_s) != len(self.jobs):
            raise ValueError(f"{len(self.gaps_s)} gaps for {len(self.jobs)} jobs")


@dataclass(frozen=True)
class Sample:
    """What came of one job.

    `failed` is an answer that broke off or never came, `rejected` a server that would not take the request, `void` an
    answer that came and cannot be believed. Every job that was begun has one sample of one of the four outcomes.

    Args:
        job, phase: of the job.
        outcome, reason: the reason is empty for `ok`.
        status: of the last answer; None if there was none.
        asked_s: when the job was first sent, or would have been, were the client on time.
        sent_s: when the request was sent that was not refused.
        arrivals_s: when each chunk came that carried text (answer, thought or tool call) or raised the count of tokens.
        counts: tokens of the answer that the server had counted at each arrival; None if it does not say.
        pieces: chunks that carried text.
        ended_s: when the answer was over, for good or ill.
        prompt_tokens, completion_tokens, cached_tokens: from the last `usage`; None where that does not say.
        retries: how often the server refused, said when to come again, and was asked again.
        text_sha256: hexadecimal, of the text of the answer, thought and tool calls included; empty if there was none.
        finish_reason: as the server words it.
    """

    job: str
    phase: Phase
    outcome: Outcome
    asked_s: float
    sent_s: float
    ended_s: float
    reason: str = ""
    status: int | None = None
    arrivals_s: tuple[float, ...] = ()
    counts: tuple[int, ...] | None = None
    pieces: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    retries: int = 0
    text_sha256: str = ""
    finish_reason: str | None = None

    @property
    def first_s(self) -> float | None:
        """When the first token came."""
        return self.arrivals_s[0] if self.arrivals_s else None

    @property
    def last_s(self) -> float | None:
        """When the last token came."""
        return self.arrivals_s[-1] if self.arrivals_s else None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, from the request that was not refused."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    @property
    def refused_s(self) -> float:
        """Time before the request that was not refused, in which the server refused others or the client was late."""
        return self.sent_s - self.asked_s

    @property
    def e2e_s(self) -> float | None:
        """Time to the last token, from the request that was not refused."""
        return self.arrivals_s[-1] - self.sent_s if self.arrivals_s else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Inter-token latencies: one for each token but the first; their sum is the time from the first to the last.

        The tokens of one chunk share the time since the chunk before equally; those that came with the first token
        took none. Empty where the server does not prove how many tokens each chunk had: then `tpot_s` is all that is
        known.
        """
        counts = self.counts or self._one_each()
        if not counts:
            return ()
        latencies = [0.0] * (counts[0] - 1)
        before, since_s = counts[0], self.arrivals_s[0]
        for count, arrival_s in zip(counts, self.arrivals_s, strict=True):
            if count > before:
                latencies += [(arrival_s - since_s) / (count - before)] * (count - before)
                before, since_s = count, arrival_s
        return tuple(latencies)

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None for fewer than two tokens."""
        if not self.arrivals_s or (self.completion_tokens or 0) < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / ((self.completion_tokens or 0) - 1)

    def _one_each(self) -> tuple[int, ...] | None:
        """The counts, where as many tokens as chunks leave no other. The token that ends an answer has no text."""
        silent = 1 if self.finish_reason == "stop" else 0
        if self.completion_tokens is None or not 0 <= self.completion_tokens - self.pieces <= silent:
            return None
        return tuple(range(1, self.pieces + 1)) if self.pieces == len(self.arrivals_s) else None

    def as_record(self) -> dict[str, Any]:
        """What JSON can hold of it, without what can be derived."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Sample:
        """The sample that `as_record` told of, lists for tuples.

        Raises:
            ValueError: it is none: keys that are missing or unknown, or values that no sample has.
        """
        if record.keys() != _ALLOWED.keys():
            raise ValueError(f"it lacks or has more than it should: {sorted(record.keys() ^ _ALLOWED.keys())}")
        for key, allowed in _ALLOWED.items():
            if not allowed(record[key]):
                raise ValueError(f"{key} is none")
        arrivals, counts = tuple(record["arrivals_s"]), record["counts"]
        if counts is not None and len(counts) != len(arrivals):
            raise ValueError("counts are not as many as arrivals")
        # One latency for each token is held of an answer that counts.
        if counts and record["outcome"] == "ok" and (counts != sorted(counts) or counts[-1] > MOST_COUNTED):
            raise ValueError("counts are not those of an answer")
        return cls(**{**record, "arrivals_s": arrivals, "counts": None if counts is None else tuple(counts)})


def is_number(value: object, most: int = 1 << 40) -> bool:
    """Whether it is a whole number from 0 to `most`."""
    return type(value) is int and 0 <= value <= most


def is_time(value: object) -> bool:
    """Whether it is a time in seconds of any run."""
    return type(value) in (int, float) and -LONGEST_S <= value <= LONGEST_S  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return value is None or is_number(value)


# What a sample may have, by its keys: files of samples come from anywhere.
_ALLOWED: dict[str, Callable[[Any], bool]] = {
    "job": _is_text,
    "phase": lambda value: value in get_args(Phase),
    "outcome": lambda value: value in get_args(Outcome),
    "asked_s": is_time,
    "sent_s": is_time,
    "ended_s": is_time,
    "reason": _is_text,
    "status": _is_count,
    "arrivals_s": lambda value: isinstance(value, list) and all(map(is_time, value)),
    "counts": lambda value: value is None or (isinstance(value, list) and all(map(is_number, value))),
    "pieces": is_number,
    "prompt_tokens": _is_count,
    "completion_tokens": _is_count,
    "cached_tokens": _is_count,
    "retries": is_number,
    "text_sha256": _is_text,
    "finish_reason": lambda value: value is None or _is_text(value),
}


def in_flight(samples: Iterable[Sample]) -> tuple[int, float]:
    """Requests in flight together: the most, and the mean over the time in which there was any."""
    moments = sorted(moment for one in samples for moment in ((one.sent_s, 1), (one.ended_s, -1)))
    now = most = 0
    busy_s = weighted_s = before_s = 0.0
    for moment_s, change in moments:
        if now:
            busy_s += moment_s - before_s
            weighted_s += now * (moment_s - before_s)
        now, before_s = now + change, moment_s
        most = max(most, now)
    return most, weighted_s / busy_s if busy_s else 0.0
