"""The battery: conversations asked cold, on a prefix hit and after an eviction, and what else a right server can do.

What is asked, in this order:

1. the two conversations of each pair, turn by turn, one turn of each after the other: the first turn of the first is
   cold, everything else finds its beginning in the cache, and a cache that is taken for another's shows at once;
2. the last turn of each once more under another beginning (cold, with its whole history), and the very same again (a
   hit): alone, so that the two can be compared;
3. round trips through a tool, and known answers;
4. unrelated prompts, until everything is evicted; then the last turn again (resumed, compared with the hit), and one
   more turn of the conversation.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from harness.recall.asking import Answer, ask
from harness.recall.conversation import Conversation, Message, Shape, build_pair, system
from harness.recall.identity import Comparison, compare_first, compare_text
from harness.recall.known import KNOWN, SUFFIX, is_right
from harness.recall.markers import Draw
from harness.recall.report import Report
from harness.recall.scoring import Outcome, Path, Probe, outcome_of, outcome_of_slip
from harness.recall.settings import Settings
from harness.recall.text import passage
from harness.recall.tools import TOOLS, request, round_trip, wrong_call
from slimserve.client_faults import Endpoint
from slimserve.errors import Failed, Finding

EXCERPT = 120
OPEN_QUESTION = "Tell me a short story about a fox."
OPEN_TIMES = 3
OPEN_TOKENS = 64
CALIBRATION_WORDS = 200
CHURN_WORDS = 4000

Sampling = Literal["own", "greedy"]
Kind = Literal["code", "place", "known", "call", "slip"]


@dataclass
class _Run:
    """A conversation while it is asked about."""

    conversation: Conversation
    shape: Shape
    sampling: Sampling
    salt: str
    """under which its last turn is asked again"""
    hit: Answer = field(default_factory=Answer)
    """the answer that the resumed one is compared with"""


def run_battery(
    endpoint: Endpoint,
    settings: Settings,
    *,
    seed: int | None = None,
    on_probe: Callable[[Probe], None] = lambda probe: None,
) -> Report:
    """Ask everything, one battery from beginning to end.

    Args:
        endpoint: an OpenAI-compatible server's.
        settings: what to ask.
        seed: of the markers; drawn, so that no server can know them, when it is not given.
        on_probe: is told each result as it comes, from whichever thread asked.

    Raises:
        Unreachable: nobody listens there.
        UsageError: the endpoint's address or key cannot be sent.
        Failed: it answers not even the first, plain request.
    """
    return _Battery(endpoint, settings, secrets.randbits(48) if seed is None else seed, on_probe).run()


class _Battery:
    def __init__(self, endpoint: Endpoint, settings: Settings, seed: int, on_probe: Callable[[Probe], None]) -> None:
        self.endpoint, self.settings, self.seed, self.on_probe = endpoint, settings, seed, on_probe
        self.draw = Draw(seed)
        self.probes: list[Probe] = []
        self.comparisons: list[Comparison] = []
        self.notes: list[str] = []
        self.codes: set[str] = set()
        """every marker of this battery"""
        self.over = False
        self.logprobs = True
        self.tokens_per_word = 1.0

    def run(self) -> Report:
        began = time.monotonic()
        self._calibrate()
        runs = self._build()
        with ThreadPoolExecutor(self.settings.concurrency) as pool:
            try:
                for _ in pool.map(self._live, runs):
                    pass
            except BaseException:  # a Ctrl-C too: nobody waits for the questions that have not been asked
                self.over = True
                raise
        for run in (run for pair in runs for run in pair):
            self._again(run)
        greedy_holds = self._open_questions() if self.settings.greedy else None
        for index in range(self.settings.tool_conversations):
            self._use_tool(f"tools-{index}")
        self._ask_known()
        if self.settings.churn_tokens:
            self._churn()
            for run in (run for pair in runs for run in pair):
                self._resume(run)
        else:
            self.notes.append("nothing was asked after an eviction: the size of the churn was not given")
        if not self.settings.tool_conversations:
            self.notes.append("no tool was used")
        model, settings = self.endpoint.model, self.settings.to_json()
        seconds = time.monotonic() - began
        return Report(model, settings, self.seed, self.probes, self.comparisons, greedy_holds, self.notes, seconds)

    # What is asked

    def _calibrate(self) -> None:
        """How many tokens a word has, from the server's own count."""
        sentences = " ".join(passage(self.draw.random, CALIBRATION_WORDS))
        answer = ask(self.endpoint, [system(self.draw.salt()), user(sentences)], max_tokens=1)
        if answer.error:
            raise Failed(
                Finding(
                    answer.error, "it was the first and plainest request", "see that the endpoint serves this model"
                )
            )
        if answer.prompt_tokens:
            self.tokens_per_word = answer.prompt_tokens / len(sentences.split())
        else:
            self.notes.append("usage tells no prompt tokens: contexts are of so many words instead")

    def _build(self) -> list[tuple[_Run, _Run]]:
        samplings: tuple[Sampling, ...] = ("own", "greedy") if self.settings.greedy else ("own",)
        runs: list[tuple[_Run, _Run]] = []
        for shape in self.settings.shapes:
            words = max(1, round(shape.context_tokens / self.tokens_per_word))
            for sampling in samplings:
                for _ in range(self.settings.pairs):
                    name = f"{sampling}-{len(runs)}"
                    pair = build_pair(name, shape, words, self.draw, shift=len(runs))
                    self.codes |= pair[0].codes | pair[1].codes
                    runs.append((self._start(pair[0], shape, sampling), self._start(pair[1], shape, sampling)))
        return runs

    def _start(self, conversation: Conversation, shape: Shape, sampling: Sampling) -> _Run:
        return _Run(conversation, shape, sampling, self.draw.salt())

    def _live(self, pair: tuple[_Run, _Run]) -> None:
        for turn in range(pair[0].shape.turns):
            for run in pair:
                if self.over:
                    return
                path: Path = "cold" if turn == 0 and run is pair[0] else "hit"
                answer = self._ask(run, run.conversation.messages(turn))
                self._record(run, turn, path, answer)
                run.conversation.answers.append(answer.text)

    def _again(self, run: _Run) -> None:
        turn = run.shape.turns - 1
        messages = run.conversation.messages(turn, run.salt)
        cold = self._ask(run, messages, logprobs=self.logprobs)
        self._record(run, turn, "cold", cold)
        run.hit = self._ask(run, messages, logprobs=self.logprobs)
        self._record(run, turn, "hit", run.hit)
        self._compare(run, ("cold", "hit"), cold, run.hit)

    def _resume(self, run: _Run) -> None:
        turn = run.shape.turns - 1
        resumed = self._ask(run, run.conversation.messages(turn, run.salt), logprobs=self.logprobs)
        self._record(run, turn, "resumed", resumed)
        self._compare(run, ("hit", "resumed"), run.hit, resumed)
        self._record(run, turn + 1, "resumed", self._ask(run, run.conversation.messages(turn + 1)))

    def _use_tool(self, name: str) -> None:
        """Two round trips in one conversation: the second must be about the second."""
        words = max(1, round(self.settings.tool_context_tokens / self.tokens_per_word))
        shape = Shape(self.settings.tool_context_tokens, (0.2, 0.8), 1, notes=False, distractors=0, places=False)
        conversation, _ = build_pair(name, shape, words, self.draw, 0)
        self.codes |= conversation.codes
        own = set(conversation.codes)
        messages = [system(conversation.salt)]
        for turn, fact in enumerate(conversation.facts):
            document = [conversation.document] if turn == 0 else []
            messages.append(user("\n\n".join([*document, request(fact.label)])))
            path: Path = "hit" if turn else "cold"
            answer = ask(self.endpoint, messages, max_tokens=self.settings.max_tokens, tools=TOOLS)
            wrong = answer.error or wrong_call(answer, fact.code)
            outcome: Outcome = "failed" if answer.error else "wrong call" if wrong else "right"
            self._add(name, "call", path, turn, fact.code, outcome, answer, wrong)
            if wrong:
                return
            slip = self.draw.code()
            own.add(slip)
            self.codes.add(slip)
            messages += round_trip(answer, slip)
            answer = ask(self.endpoint, messages, max_tokens=self.settings.max_tokens, tools=TOOLS)
            outcome = (
                "failed" if answer.error else outcome_of_slip(answer.text, slip, frozenset(own), self._others(own))
            )
            self._add(name, "slip", "hit", turn, slip, outcome, answer, answer.error)
            messages.append({"role": "assistant", "content": answer.text})

    def _ask_known(self) -> None:
        for question, pattern in self.draw.random.sample(KNOWN, min(self.settings.known, len(KNOWN))):
            answer = ask(self.endpoint, [user(question + SUFFIX)], max_tokens=self.settings.max_tokens)
            outcome: Outcome = "failed" if answer.error else "right" if is_right(question, answer.text) else "none"
            if not answer.error and not answer.text.strip():
                outcome = "empty"
            self._add("known", "known", "cold", 0, pattern, outcome, answer, answer.error or question)

    def _open_questions(self) -> bool:
        texts = set()
        for _ in range(OPEN_TIMES):
            answer = ask(self.endpoint, [user(OPEN_QUESTION)], max_tokens=OPEN_TOKENS, greedy=True)
            texts.add(answer.error or answer.text)
        return len(texts) == 1

    def _churn(self) -> None:
        """Prompts of unrelated text until `churn_tokens` are sent, as `usage` counts them."""
        sent = 0
        longest = max(shape.context_tokens for shape in self.settings.shapes)
        words = round(min(self.settings.churn_tokens, max(longest, CHURN_WORDS)) / self.tokens_per_word)
        while sent < self.settings.churn_tokens:
            prose = " ".join(passage(self.draw.random, words))
            answer = ask(self.endpoint, [system(self.draw.salt()), user(prose)], max_tokens=1)
            if answer.error:
                self.notes.append(f"the churn ended after {sent:,} tokens: {answer.error}")
                return
            sent += answer.prompt_tokens or len(prose.split())

    # What becomes of the answers

    def _ask(self, run: _Run, messages: list[Message], logprobs: bool = False) -> Answer:
        """Ask with logprobs only where they are compared: an engine may be several times as slow with them."""
        greedy, most = run.sampling == "greedy", self.settings.max_tokens
        answer = ask(self.endpoint, messages, max_tokens=most, greedy=greedy, logprobs=logprobs)
        if answer.status == 400 and logprobs:
            without = ask(self.endpoint, messages, max_tokens=most, greedy=greedy)
            if not without.error:
                self.logprobs = False
                self.notes.append(f"no logprobs were compared: {answer.error}")
                return without
        return answer

    def _record(self, run: _Run, turn: int, path: Path, answer: Answer) -> None:
        conversation = run.conversation
        question = conversation.questions[turn]
        previous = conversation.questions[turn - 1] if turn else None
        if answer.error:
            outcome: Outcome = "failed"
        else:
            own = conversation.codes
            outcome = outcome_of(answer.text, question, previous, own, self._others(own))
        self._add(
            conversation.id,
            question.kind,
            path,
            turn,
            question.expected,
            outcome,
            answer,
            answer.error,
            sampling=run.sampling,
            context_tokens=run.shape.context_tokens,
            depth=question.fact.depth,
            note=question.fact.depth is None,
        )

    def _compare(self, run: _Run, paths: tuple[str, str], one: Answer, two: Answer) -> None:
        name, tolerance = run.conversation.id, self.settings.tolerance
        self.comparisons.append(compare_first(name, paths, one, two, tolerance))
        if run.sampling == "greedy":
            self.comparisons.append(compare_text(name, paths, one, two, tolerance))

    def _others(self, own: frozenset[str] | set[str]) -> frozenset[str]:
        return frozenset(self.codes - own)

    def _add(
        self,
        conversation: str,
        kind: Kind,
        path: Path,
        turn: int,
        expected: str,
        outcome: Outcome,
        answer: Answer,
        reason: str,
        *,
        sampling: Sampling = "own",
        context_tokens: int = 0,
        depth: float | None = None,
        note: bool = False,
    ) -> None:
        probe = Probe(
            conversation,
            kind,
            path,
            sampling,
            context_tokens,
            depth,
            note,
            turn,
            expected,
            outcome,
            answer.text[:EXCERPT],
            answer.prompt_tokens,
            answer.cached_tokens,
            reason,
        )
        self.probes.append(probe)
        self.on_probe(probe)


def user(text: str) -> Message:
    """A message of the user's."""
    return {"role": "user", "content": text}
