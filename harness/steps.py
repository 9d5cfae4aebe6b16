"""From a workload to the requests of each load of each round: same seed, same requests, to the last token."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from harness.prompts import Prompt, PromptSource
from harness.sample import Conversation, Job, Phase
from harness.workload import Agent, Load, Loaded, Resume

T = TypeVar("T")
# So many conversations warm a server up before an open loop.
OPEN_WARM_UP = 4


@dataclass(frozen=True)
class Step:
    """One load of one round.

    Args:
        point: the name of its setup.
        round: from 0.
        warm_up: had before it, as many at once.
        measured: what counts.
        concurrency: of the closed loop; None of an open one.
        arrivals_s: of the open loop, one for each conversation.
    """

    point: str
    round: int
    warm_up: tuple[Conversation, ...]
    measured: tuple[Conversation, ...]
    concurrency: int | None = None
    arrivals_s: tuple[float, ...] | None = None

    @property
    def jobs(self) -> int:
        """Requests that count."""
        return sum(len(conversation.jobs) for conversation in self.measured)


@dataclass
class Steps:
    """The requests of a workload, made as they are needed: prompts of hours of load need not lie in memory.

    Args:
        loaded: the workload.
        source: of its prompts, not used for anything else.
        seed: of everything else that is drawn.
    """

    loaded: Loaded
    source: PromptSource
    seed: int
    _point: str = field(default="", init=False)

    def __iter__(self) -> Iterator[Step]:
        """Round after round, each with all loads in their order: what changes with time changes all of them."""
        for number in range(self.loaded.workload.rounds):
            for load in self.loaded.workload.loads:
                yield from self._load(load, number)

    def _load(self, load: Load, number: int) -> Iterator[Step]:
        workload = self.loaded.workload
        if workload.resume is not None:
            yield from self._resume(workload.resume, load, number)
        elif workload.agent is not None:
            yield self._agent(workload.agent, load, number)
        else:
            yield self._single(load, number)

    def _single(self, load: Load, number: int) -> Step:
        single = self.loaded.workload.single
        if single is None:
            raise ValueError(f"{self.loaded.workload.id} has no conversation")
        trace = self.loaded.traces.get(load.trace or "", ())
        sizes = [(line.input_tokens, line.output_tokens) for line in trace]
        input_tokens = load.input_tokens or single.input_tokens
        sizes = sizes or [(input_tokens, single.output_tokens)] * (load.conversations or 0)
        at = _At(load.name, number)
        measured = [
            Conversation((self._job(at, "measure", f"{place}", self._take(inputs), outputs),))
            for place, (inputs, outputs) in enumerate(sizes)
        ]
        warm_up = self._warm_up(at, load, [self._take(sizes[0][0]) for _ in range(_streams(load))])
        arrivals = tuple(line.seconds for line in trace) or self._arrivals(load, number)
        return Step(load.name, number, warm_up, tuple(measured), load.concurrency, arrivals or None)

    def _agent(self, agent: Agent, load: Load, number: int) -> Step:
        at = _At(load.name, number)
        shared = self._take(agent.shared_tokens)
        measured = tuple(self._session(agent, at, shared, place) for place in range(load.conversations or 0))
        beginnings = [self._join([shared, self._take(agent.adds[0])]) for _ in range(_streams(load))]
        warm_up = self._warm_up(at, load, beginnings)
        return Step(load.name, number, warm_up, measured, load.concurrency, self._arrivals(load, number) or None)

    def _session(self, agent: Agent, at: _At, shared: Prompt, place: int) -> Conversation:
        parts, jobs, gaps = [shared], [], []
        for turn in range(agent.turns):
            key = f"{at}/{place}.{turn}"
            added = self._draw(agent.adds, f"{key}/add")
            # The first makes the session's beginning its own; what follows it needs no beginning.
            parts.append(self.source.go_on(added) if turn else self._take(added))
            answer = self._draw(agent.answers, f"{key}/answer")
            jobs.append(self._job(at, "measure", f"{place}.{turn}", self._join(parts), answer))
            gaps.append(self._draw(agent.gaps_s, f"{key}/gap") if turn else 0.0)
            if turn + 1 < agent.turns:
                parts.append(self.source.go_on(answer))
        return Conversation(tuple(jobs), tuple(gaps))

    def _resume(self, resume: Resume, load: Load, number: int) -> Iterator[Step]:
        beginnings: dict[int, list[Prompt]] = {}
        for tokens in resume.contexts:
            at = _At(f"{load.name}-{tokens}-cold", number)
            beginnings[tokens] = [self._take(tokens) for _ in range(load.conversations or 0)]
            warm_up = self._warm_up(at, load, [self._take(tokens) for _ in range(_streams(load))])
            yield self._prefilled(at, load, beginnings[tokens], resume.output_tokens, warm_up)
        others = [self._take(resume.churn.input_tokens) for _ in range(resume.churn.prompts)]
        yield self._prefilled(_At(f"{load.name}-churn", number), load, others, 1)
        for tokens in resume.contexts:
            at = _At(f"{load.name}-{tokens}-resumed", number)
            longer = [self._join([begun, self.source.go_on(resume.add_tokens)]) for begun in beginnings[tokens]]
            yield self._prefilled(at, load, longer, resume.output_tokens)

    def _prefilled(
        self,
        at: _At,
        load: Load,
        prompts: Sequence[Prompt],
        output_tokens: int,
        warm_up: tuple[Conversation, ...] = (),
    ) -> Step:
        jobs = [self._job(at, "measure", f"{place}", prompt, output_tokens) for place, prompt in enumerate(prompts)]
        return Step(at.point, at.round, warm_up, tuple(Conversation((job,)) for job in jobs), load.concurrency)

    def _warm_up(self, at: _At, load: Load, prompts: Sequence[Prompt]) -> tuple[Conversation, ...]:
        tokens = self.loaded.workload.warm_up_output_tokens
        jobs = [self._job(at, "warm-up", f"w{place}", prompt, tokens) for place, prompt in enumerate(prompts)]
        return tuple(Conversation((job,)) for job in jobs)

    def _take(self, tokens: int) -> Prompt:
        (prompt,) = self.source.take(1, tokens)
        return prompt

    def _join(self, parts: Sequence[Prompt]) -> Prompt:
        return self.source.join(parts)

    def _job(self, at: _At, phase: Phase, name: str, prompt: Prompt, output_tokens: int) -> Job:
        """A request of exactly these tokens, sampled as the server samples by itself, from a seed of its own."""
        key = f"{at}/{name}"
        return Job(
            id=key,
            phase=phase,
            max_tokens=output_tokens,
            prompt_ids=None if prompt.text else prompt.ids,
            text=prompt.text or None,
            asked_prompt_tokens=len(prompt.ids),
            ignore_eos=True,
            seed=self._number(key) >> 33,
        )

    def _arrivals(self, load: Load, number: int) -> tuple[float, ...]:
        """Moments of a Poisson process, one for each conversation; none of a closed loop."""
        if load.rate_per_s is None:
            return ()
        moment, moments = 0.0, []
        for place in range(load.conversations or 0):
            share = (self._number(f"{load.name}/{number}/{place}/arrival") + 1) / (1 << 64)
            moment -= math.log(share) / load.rate_per_s
            moments.append(moment)
        return tuple(moments)

    def _draw(self, values: Sequence[T], key: str) -> T:
        return values[self._number(key) % len(values)]

    def _number(self, key: str) -> int:
        """A number from 0 to 2^64 - 1; not of `random`, whose draws are those of a Python version."""
        return int.from_bytes(
            hashlib.sha256(f"{self.seed}/{self.loaded.workload.id}/{key}".encode()).digest()[:8], "big"
        )


@dataclass(frozen=True)
class _At:
    """A load of a round; as text, the beginning of its requests' ids."""

    point: str
    round: int

    def __str__(self) -> str:
        return f"{self.point}/{self.round}"


def _streams(load: Load) -> int:
    return load.concurrency or OPEN_WARM_UP
