"""The load client: conversations go to an OpenAI-compatible server, samples come back.

Closed loop: so many conversations at a time, each sending its next request when it has its answer. Open loop: each
conversation begins at its moment, whatever the server does. Nothing waits in a pool: a request that is due is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeVar

from harness.address import Address
from harness.answer import Answer
from harness.sample import Conversation, Job, Outcome, Sample
from harness.wire import Reply, Wire

REFUSALS = (429, 503)
# Who says "at once", or names a moment that is over, is asked again after so long: less would be a load of its own.
LEAST_RETRY_S = 0.25
PATHS = {"completions": "/completions", "chat": "/chat/completions"}

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """A server, and how long to bear with it.

    Args:
        url: with the version, such as http://127.0.0.1:8000/v1.
        model: its name there.
        key: sent as a bearer token; None for none.
        api: which of the two.
        usage_in_chunks: asks for the count of tokens with each chunk, which proves how many tokens each chunk had; an
            extension of vLLM and SGLang that others ignore or, seldom, refuse.
        connect_s, silence_s: a request fails that has no connection, or nothing new from the server, for so long.
        refused_s: a job is rejected that would have to be asked again later than this.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    api: Literal["completions", "chat"] = "completions"
    usage_in_chunks: bool = True
    connect_s: float = 10.0
    silence_s: float = 300.0
    refused_s: float = 300.0

    @property
    def headers(self) -> dict[str, str]:
        """What each request carries beside its body."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run it on uvloop's event loop where there is one: half of what a chunk costs is the loop's work."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def drive(
    target: Target,
    conversations: Iterable[Conversation],
    *,
    concurrency: int | None = None,
    arrivals: Sequence[float] | None = None,
    on_sample: Callable[[Sample], None] | None = None,
    begun: float | None = None,
) -> list[Sample]:
    """Ask all of it, in closed or in open loop.

    Args:
        target: who is asked.
        conversations: in the closed loop each is drawn when a worker is free for it.
        concurrency: closed loop; conversations at a time.
        arrivals: open loop; seconds from the beginning to each conversation's.
        on_sample: gets each sample as soon as there is one, also of the jobs that a cancellation cuts; an error that it
            raises ends the whole.
        begun: which moment of `time.perf_counter` is the samples' 0; now, if not said.

    Returns:
        A sample for each job, as they ended.

    Raises:
        ValueError: neither or both of the loops, or an address, an arrival or a job that cannot be meant.
    """
    if (concurrency is None) == (arrivals is None):
        raise ValueError("a load is of a closed loop (concurrency) or of an open one (arrivals)")
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}, and nobody would ask")
    driver = _Driver(target, on_sample, time.perf_counter() if begun is None else begun)
    try:
        async with asyncio.TaskGroup() as group:
            if arrivals is not None:
                for at_s, conversation in zip(arrivals, conversations, strict=True):
                    group.create_task(driver.converse(conversation, at_s))
            elif concurrency:
                waiting = iter(conversations)
                for _ in range(concurrency):
                    group.create_task(driver.work(waiting))
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    return driver.samples


class _Driver:
    """What the workers share."""

    def __init__(self, target: Target, on_sample: Callable[[Sample], None] | None, begun: float) -> None:
        self.samples: list[Sample] = []
        self._target, self._on_sample, self._begun = target, on_sample, begun
        address = Address.of(target.url)
        self._wire = Wire(address, connect_s=target.connect_s, silence_s=target.silence_s)

    async def work(self, waiting: Iterator[Conversation]) -> None:
        """Have one conversation after the other, as long as there are any."""
        for conversation in waiting:
            await self.converse(conversation)

    async def converse(self, conversation: Conversation, at_s: float | None = None) -> None:
        """Ask its jobs one after the other, the first at its moment if it has one."""
        due = time.perf_counter() if at_s is None else self._begun + at_s
        for job, gap_s in zip(conversation.jobs, conversation.gaps_s or [0.0] * len(conversation.jobs), strict=True):
            due += gap_s
            if (wait_s := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            await self._ask(job, due)
            due = time.perf_counter()

    async def _ask(self, job: Job, due: float) -> None:
        """Ask until there is an answer or no hope of one, and keep the sample; a cancelled job has one too."""
        body = json.dumps(body_of(job, self._target), separators=(",", ":")).encode()
        headers = {**self._target.headers, "X-Request-Id": job.id}
        retries, sent = 0, due
        answer = Answer(job.max_tokens)
        try:
            while True:
                answer, sent = Answer(job.max_tokens), time.perf_counter()
                reply = await self._wire.post(PATHS[self._target.api], headers, body, answer.read)
                wait_s = retry_after_s(reply)
                if wait_s is None or time.perf_counter() + wait_s > due + self._target.refused_s:
                    break
                retries += 1
                await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            reply = Reply(sent, time.perf_counter(), broken="interrupted")
            self._keep(job, answer, reply, due, retries)
            raise
        self._keep(job, answer, reply, due, retries)

    def _keep(self, job: Job, answer: Answer, reply: Reply, due: float, retries: int) -> None:
        outcome, reason = judge(job, answer, reply, retries)
        sample = Sample(
            job=job.id,
            phase=job.phase,
            outcome=outcome,
            reason=reason,
            status=reply.status,
            asked_s=due - self._begun,
            sent_s=reply.sent - self._begun,
            ended_s=reply.ended - self._begun,
            arrivals_s=tuple(moment - self._begun for moment in answer.arrivals),
            counts=tuple(answer.counts) if answer.counted else None,
            pieces=answer.pieces,
            prompt_tokens=answer.counted_as("prompt_tokens"),
            completion_tokens=answer.counted_as("completion_tokens"),
            cached_tokens=answer.cached_tokens,
            retries=retries,
            text_sha256=hashlib.sha256("".join(answer.text).encode()).hexdigest() if answer.pieces else "",
            finish_reason=answer.finish_reason,
        )
        self.samples.append(sample)
        if self._on_sample:
            self._on_sample(sample)


def body_of(job: Job, target: Target) -> dict[str, Any]:
    """The request's body.

    Raises:
        ValueError: the job has another kind of prompt than the API takes.
    """
    prompts = {"prompt": job.prompt_ids if job.prompt_ids is not None else job.text, "messages": job.messages}
    key = "messages" if target.api == "chat" else "prompt"
    if [name for name, prompt in prompts.items() if prompt is not None] != [key]:
        raise ValueError(f"job {job.id} has no {key} or more than that, and goes to the API of {target.api}")
    options = {"include_usage": True} | ({"continuous_usage_stats": True} if target.usage_in_chunks else {})
    body: dict[str, Any] = {"model": target.model, key: prompts[key], "max_tokens": job.max_tokens}
    body |= {"stream": True, "stream_options": options, **job.sampling}
    if job.ignore_eos:
        body["ignore_eos"] = True
    if job.seed is not None:
        body["seed"] = job.seed
    return body


def retry_after_s(reply: Reply) -> float | None:
    """Seconds after which a server that refuses wants to be asked again; None if it refuses nothing or does not say."""
    said = reply.headers.get("retry-after", "") if reply.status in REFUSALS else ""
    try:
        seconds = float(said)
        if not 0 <= seconds < math.inf:
            return None
    except ValueError:
        try:
            moment = parsedate_to_datetime(said)
            seconds = (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
        except (ValueError, OverflowError):
            return None
    return max(LEAST_RETRY_S, seconds)


def judge(job: Job, answer: Answer, reply: Reply, retries: int) -> tuple[Outcome, str]:
    """What became of a job, and why it is not `ok`."""
    if reply.status in REFUSALS and not reply.broken:
        again = f", {retries} times asked again" if retries else ""
        when = "" if retry_after_s(reply) is not None else " without a Retry-After"
        return "rejected", f"status {reply.status}{when}{again}: {answer.complaint(reply.headers)}"
    if reply.status is not None and reply.status != 200:
        return "failed", f"status {reply.status}: {answer.complaint(reply.headers)}"
    came = f"after {answer.pieces} chunks of text"
    if reply.broken:
        return "failed", f"{reply.broken}, {came}"
    if answer.fault:
        return "failed", f"{answer.fault}, {came}"
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        return "failed", f"status 200 and no stream: {answer.complaint(reply.headers)}"
    if answer.unread.strip():
        return "failed", f"the stream ended in the middle of a frame, {came}"
    if not answer.frames:
        return "void", "status 200 and no answer in it"
    if not answer.done:
        return "failed", f"the stream ended without [DONE], {came}"
    if lie := disbelieve(job, answer):
        return "void", lie
    return "ok", ""


def disbelieve(job: Job, answer: Answer) -> str:
    """Why a whole answer proves nothing; empty if it does."""
    prompt, completion = answer.counted_as("prompt_tokens"), answer.counted_as("completion_tokens")
    if not answer.pieces:
        return f"status 200 and no text; tokens counted: {completion}"
    if prompt is None or completion is None:
        what = "no counts in its usage" if answer.usage else "no usage"
        return f"the answer has {what}, so that its tokens are not known"
    if job.asked_prompt_tokens is not None and prompt != job.asked_prompt_tokens:
        return f"usage counts {prompt} prompt tokens of {job.asked_prompt_tokens} sent"
    if completion > job.max_tokens:
        return f"usage counts {completion} tokens of at most {job.max_tokens}"
    if job.ignore_eos and completion != job.max_tokens:
        return f"usage counts {completion} tokens of exactly {job.max_tokens}"
    if completion < answer.pieces:
        return f"usage counts {completion} tokens, and {answer.pieces} chunks carried text"
    if answer.counted and (answer.counts != sorted(answer.counts) or answer.counts[-1] > completion):
        return f"usage counts {answer.counts[-1]} tokens on the way and {completion} at the end"
    if answer.finish_reason in (None, "abort", "error"):
        return f"the answer ended for no good reason: {answer.finish_reason}"
    return ""
