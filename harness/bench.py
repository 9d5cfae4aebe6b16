"""One workload on one server, or on several in turn: warm-up, measurement, what the server counted, the receipts.

Every load of every round goes to each server before the next load begins, the order of the servers changing from round
to round: the machine's moods then hit all of them. Whatever ends a run, what had come until then is kept in a receipt
that says so. When all is measured, the recall battery asks each server whether it is also right, and the same receipt
says so: who reads how fast it was is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from harness import client, recall_part
from harness.counters import Metrics, counted, reading, together
from harness.progress import Progress
from harness.prompts import Form, PromptSource
from harness.receipt import Outcome, PromptFacts, ServerCounts, Setup, WorkloadFacts
from harness.recording import Facts, Recording, begin
from harness.sample import Conversation, Job, Sample
from harness.steps import Step, Steps
from harness.workload import Loaded
from slimserve.errors import Failed, Finding, SlimserveError, raise_if_any

# Of the prompts of a load that has none in common with anything, this share may be found in a cache all the same:
# engines that match token by token find the few with which two texts begin alike.
CHANCE_SHARE = 0.01


@dataclass(frozen=True)
class Side:
    """A server that is measured.

    Args:
        name: of the profile or of the server, for the name of the receipt and for whoever waits.
        target: where requests go.
        facts: all that a receipt says, from what is known of the workload and its prompts, and the receipts' bond.
        metrics: the server's `/metrics` now; None when it has none.
        check: raises when the server has died.
        slots: decode slots, where they are known.
    """

    name: str
    target: client.Target
    facts: Callable[[WorkloadFacts, PromptFacts, str | None], Facts]
    metrics: Metrics
    check: Callable[[], None]
    slots: int | None = None


class _Over(Exception):
    """The rest of the run would prove nothing; its reason."""


def bench(
    loaded: Loaded,
    sides: Sequence[Side],
    source: PromptSource,
    tokenizer_sha256: str,
    seed: int,
    folder: Path,
    stream: TextIO,
    recall: recall_part.Recall | None = None,
) -> list[Path]:
    """Measure, and write a receipt for each side.

    Args:
        loaded: the workload.
        sides: the servers; all of them get the same requests.
        source: of the prompts, fresh.
        tokenizer_sha256: of the file that `source` was made with.
        seed: of what the workload draws.
        folder: of the receipts.
        stream: where the progress is shown.
        recall: the battery that ends a run that went well; None: there is none.

    Returns:
        The receipts' files, as many as sides, whatever became of the run.

    Raises:
        Refused: no receipt could be written there; nothing was asked.
        Failed: a receipt could not be written.
    """
    workload = loaded.workload
    runs = [_Run(side, begin(folder, side.name, workload.id), loaded.setups(side.slots)) for side in sides]
    bond = runs[0].recording.id if len(runs) > 1 else None
    progress = Progress(workload.id, loaded.requests * len(sides), stream)
    outcome: Outcome = "whole"
    reasons: list[str] = []
    try:
        for step in Steps(loaded, source, seed):
            for run in runs if step.round % 2 == 0 else runs[::-1]:
                progress.enter(f"{step.point}, round {step.round + 1} of {workload.rounds}, {run.side.name}")
                run.have(step, progress)
    except KeyboardInterrupt:
        outcome, reasons = "aborted", [f"it was interrupted after {progress.done} of {progress.total} requests"]
    except _Over as over:
        reasons = [str(over)]
    except SlimserveError as error:
        outcome, reasons = "failed", [finding.what for finding in error.findings]
    finally:
        progress.close()
    if recall is not None and outcome == "whole" and not reasons:
        for run in runs:
            if not run.ask(recall):
                break
    asked = WorkloadFacts(
        name=workload.id, sha256=loaded.sha256, seed=seed, scaled_down=workload.scaled_from is not None
    )
    sent = PromptFacts(sha256=source.sha256, tokenizer_sha256=tokenizer_sha256, corpus=" ".join(workload.works))
    paths: list[Path] = []
    problems: list[Finding] = []
    for run in runs:  # a receipt that cannot be written costs no other one
        try:
            paths.append(run.close(outcome, reasons, run.side.facts(asked, sent, bond)))
        except Failed as error:
            problems += error.findings
    raise_if_any(Failed, problems)
    return paths


class _Run:
    """One side's part of a run."""

    def __init__(self, side: Side, recording: Recording, setups: Sequence[Setup]) -> None:
        self.side, self.recording = side, recording
        self._grown: dict[str, ServerCounts] = {}
        self._tokens: dict[str, tuple[int, int]] = {}
        for setup in setups:
            recording.add_point(setup)

    def have(self, step: Step, progress: Progress) -> None:
        """Warm up, measure, and keep what came.

        Raises:
            _Over: what came cannot be believed, or nothing came.
            Failed: the server has died.
        """
        if step.warm_up:
            self._drive(step, step.warm_up, len(step.warm_up), None, lambda sample: None)
        before = reading(self.side.metrics)
        kept: list[Sample] = []

        def keep(sample: Sample) -> None:
            kept.append(sample)
            progress.add(sample.outcome)

        try:
            self._drive(step, step.measured, step.concurrency, step.arrivals_s, keep)
        except BaseException:
            # What had not begun is not lost: nobody waits for it.
            self.recording.add_begun(step.point, len(kept))
            raise
        self.recording.add_begun(step.point, step.jobs)
        self._add_counts(step.point, counted(before, reading(self.side.metrics)))
        prompts, cached = self._tokens.get(step.point, (0, 0))
        prompts += sum(sample.prompt_tokens or 0 for sample in kept)
        cached += sum(sample.cached_tokens or 0 for sample in kept)
        self._tokens[step.point] = prompts, cached
        self.recording.save()
        self.side.check()
        outcomes = {sample.outcome for sample in kept}
        if "void" in outcomes or ("failed" in outcomes and "ok" not in outcomes):
            raise _Over(f"it ended early, with {step.point} in round {step.round + 1}: the rest could prove nothing")

    def _drive(
        self,
        step: Step,
        conversations: Sequence[Conversation],
        concurrency: int | None,
        arrivals_s: Sequence[float] | None,
        keep: Callable[[Sample], None],
    ) -> None:
        jobs: dict[str, Job] = {job.id: job for one in conversations for job in one.jobs}

        def record(sample: Sample) -> None:
            self.recording.add(step.point, step.round, jobs[sample.job], sample)
            keep(sample)

        driven = client.drive(
            self.side.target, conversations, concurrency=concurrency, arrivals=arrivals_s, on_sample=record
        )
        client.run(driven)

    def ask(self, recall: recall_part.Recall) -> bool:
        """Have the recall battery, and keep what it said.

        Returns:
            Whether the run goes on; not when it was interrupted.
        """
        told, probes = recall.of(self.side.target, self.side.name, self.side.metrics)
        self.recording.add_battery(told, probes)
        return told.verdict != "aborted"

    def close(self, outcome: Outcome, reasons: Sequence[str], facts: Facts) -> Path:
        """Write the receipt."""
        for place, setup in enumerate(self.recording.setups):
            if setup.cache == "cold" and self._was_warm(setup.name):
                self.recording.setups[place] = replace(setup, cache="warm")
        for point, grown in self._grown.items():
            self.recording.add_counts(point, grown)
        return self.recording.close(outcome, reasons, facts)

    def _was_warm(self, point: str) -> bool:
        """Whether the server had prompts that nobody should have sent it before, from an earlier run such as this."""
        prompts, cached = self._tokens.get(point, (0, 0))
        grown = self._grown.get(point, ServerCounts())
        shares = [(cached, prompts), (grown.cache_hits or 0, grown.cache_queries or 0)]
        return any(hits > CHANCE_SHARE * asked for hits, asked in shares if asked)

    def _add_counts(self, point: str, grown: ServerCounts) -> None:
        """What grew in one round of a load, to that of the rounds before."""
        told = self._grown.get(point)
        self._grown[point] = grown if told is None else together(told, grown)


def takes_ids(target: client.Target, source: PromptSource) -> bool:
    """Whether the server takes prompts as token ids; asked with one of eight tokens.

    Args:
        source: of that prompt, and of no other.
    """
    (prompt,) = source.take(1, 8)
    job = Job("takes-ids", "warm-up", 1, prompt_ids=prompt.ids, asked_prompt_tokens=8, ignore_eos=True)
    (sample,) = client.run(client.drive(target, [Conversation((job,))], concurrency=1))
    return sample.outcome == "ok" or sample.status is None or not 400 <= sample.status < 500


def form_for(target: client.Target, source: PromptSource) -> Form:
    """Ids where the server takes them, else text."""
    return "ids" if takes_ids(target, source) else "text"
