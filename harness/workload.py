"""Workloads: files that say what is asked of a server, and how many ask at once.

A workload is one kind of conversation (`single`, `agent` or `resume`) and the loads under which it is had. Prompts are
of exact length and of natural text; all that is drawn is drawn from the seed alone. `harness.steps` makes the requests.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from harness.receipt import Setup
from slimserve.errors import Finding, RegistryError, UsageError
from slimserve.profile import ID_PATTERN, FileName, Id, Text, not_empty
from slimserve.shapes import Between, Satisfying, nearest
from slimserve.validate import validate
from slimserve.yaml_source import read_document

FOLDER = Path(__file__).resolve().parent / "workloads"
MAX_TRACE_LINES = 100_000
MAX_LOAD_SECONDS = 86_400

Tokens = Annotated[int, Between(1, 1 << 20)]
InputTokens = Annotated[int, Between(8, 1 << 20)]
Several = Annotated[int, Between(1, 4096)]
Gap = Annotated[float, Between(0, 600)]
Work = Literal["austen", "jargon", "devil"]


@dataclass(frozen=True, kw_only=True)
class Single:
    """One prompt, one answer."""

    input_tokens: InputTokens
    output_tokens: Tokens


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A session whose prompt grows: a prefix that all sessions share, then each turn what a tool said and an answer.

    The answers that a later turn's prompt repeats are texts of the corpus, as long as the answers that were asked for:
    so every server reads the same prompts, whatever it answered.
    """

    shared_tokens: InputTokens
    turns: Annotated[int, Between(1, 200)]
    adds: Annotated[tuple[InputTokens, ...], Satisfying(not_empty)]
    """lengths of what a turn adds, of which the seed draws one"""
    answers: Annotated[tuple[Tokens, ...], Satisfying(not_empty)]
    """lengths of answers, likewise"""
    gaps_s: Annotated[tuple[Gap, ...], Satisfying(not_empty)]
    """seconds that a tool takes before the next turn, likewise"""

    @property
    def longest_tokens(self) -> int:
        """The longest context that a session may come to."""
        return self.shared_tokens + self.turns * (max(self.adds) + max(self.answers))


@dataclass(frozen=True, kw_only=True)
class Churn:
    """Other prompts between a conversation and its resumption: together more than the cache holds."""

    prompts: Several
    input_tokens: InputTokens


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Conversations that are read once, evicted by others, and gone on with."""

    contexts: Annotated[tuple[InputTokens, ...], Satisfying(not_empty)]
    """lengths, of which each load has all"""
    add_tokens: Tokens
    """that follow when it is resumed"""
    output_tokens: Tokens
    churn: Churn


@dataclass(frozen=True, kw_only=True)
class Load:
    """How many ask at once, or when."""

    concurrency: Several | None = None
    """closed loop: conversations at a time"""
    rate_per_s: Annotated[float, Between(0.001, 10_000)] | None = None
    """open loop: conversations a second on average, at random moments (a Poisson process)"""
    trace: FileName | None = None
    """open loop: a file beside this one; each line has seconds, input tokens and output tokens of a conversation"""
    conversations: Several | None = None
    """in each round; a trace has as many as lines"""
    input_tokens: InputTokens | None = None
    """instead of those of `single`"""

    def __post_init__(self) -> None:
        given = [name for name in ("concurrency", "rate_per_s", "trace") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of concurrency, rate_per_s, trace is needed, {len(given)} given")
        if (self.trace is None) == (self.conversations is None):
            raise ValueError("conversations is needed, except for a trace, which has as many as lines")
        if self.trace is not None and self.input_tokens is not None:
            raise ValueError("a trace has the input tokens of each conversation itself")
        if self.rate_per_s is not None and (self.conversations or 0) / self.rate_per_s > MAX_LOAD_SECONDS:
            raise ValueError(f"{self.conversations} conversations at {self.rate_per_s:g} a second take more than a day")
        if not re.fullmatch(ID_PATTERN, self.name):
            what = f"its numbers would be called {self.name!a}, after the trace"
            raise ValueError(
                f"{what}; a name has at most 64 letters a to z, digits, dots and hyphens: rename the trace"
            )

    @property
    def name(self) -> str:
        """What its numbers are called: c8, r2.5, or after the trace."""
        if self.concurrency is not None:
            name = f"c{self.concurrency}"
        elif self.rate_per_s is not None:
            name = f"r{self.rate_per_s:g}"
        else:
            name = "t-" + "".join(letter if letter.isalnum() else "-" for letter in Path(self.trace or "").stem.lower())
        return f"{name}-{self.input_tokens}" if self.input_tokens else name


@dataclass(frozen=True, kw_only=True)
class Workload:
    """harness/workloads/*.yaml"""

    id: Id
    title: Text
    why: Text
    """what its numbers tell"""
    works: Annotated[tuple[Work, ...], Satisfying(not_empty)]
    """of the corpus"""
    rounds: Annotated[int, Between(1, 100)]
    """repetitions of all loads, with prompts of their own: how far they lie apart is the noise"""
    warm_up_output_tokens: Tokens
    """before each load of each round as many short conversations as are had at once, which nothing counts"""
    loads: Annotated[tuple[Load, ...], Satisfying(not_empty)]
    single: Single | None = None
    agent: Agent | None = None
    resume: Resume | None = None
    scaled_from: Id | None = None
    """the workload of which this is a smaller form, for small machines"""
    default_on: Literal["cpu", "gpu"] | None = None
    """asked of profiles for such platforms when no workload is named"""

    def __post_init__(self) -> None:
        given = [name for name in ("single", "agent", "resume") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of single, agent, resume is needed, {len(given)} given")
        names = [load.name for load in self.loads]
        if len(set(names)) != len(names):
            raise ValueError(f"two loads are called {next(name for name in names if names.count(name) > 1)}")
        if self.single is None and any(load.input_tokens or load.trace for load in self.loads):
            raise ValueError("input_tokens and trace of a load go with single, which has nothing but one prompt")
        if self.resume is not None and any(load.concurrency is None for load in self.loads):
            raise ValueError("resume needs closed loops: what is resumed has to have been evicted by then")


@dataclass(frozen=True)
class Arrival:
    """One line of a trace."""

    seconds: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Loaded:
    """A workload with its traces, and the hash of all its files.

    Args:
        workload: the file's content.
        traces: by the name that a load calls them by.
        sha256: of the file and of its traces.
    """

    workload: Workload
    traces: dict[str, tuple[Arrival, ...]]
    sha256: str

    @property
    def longest_tokens(self) -> int:
        """The longest context, answer included, that a server must take."""
        workload = self.workload
        if workload.agent is not None:
            return workload.agent.longest_tokens
        if workload.resume is not None:
            resumed = max(workload.resume.contexts) + workload.resume.add_tokens
            return max(resumed, workload.resume.churn.input_tokens) + workload.resume.output_tokens
        if workload.single is None:
            raise ValueError(f"{workload.id} has no conversation")
        inputs = [load.input_tokens or workload.single.input_tokens for load in workload.loads if load.trace is None]
        lines = [line.input_tokens + line.output_tokens for trace in self.traces.values() for line in trace]
        return max([*(tokens + workload.single.output_tokens for tokens in inputs), *lines])

    @property
    def requests(self) -> int:
        """Requests of all rounds that count."""
        workload = self.workload
        each = 1
        if workload.agent is not None:
            each = workload.agent.turns
        elif workload.resume is not None:
            each = 2 * len(workload.resume.contexts)
        churned = 0 if workload.resume is None else workload.resume.churn.prompts
        in_a_round = 0
        for load in workload.loads:
            conversations = load.conversations or len(self.traces[load.trace or ""])
            in_a_round += conversations * each + churned
        return workload.rounds * in_a_round

    def setups(self, slots: int | None = None) -> tuple[Setup, ...]:
        """The loads as a receipt names them, in the order in which a round has them.

        Args:
            slots: decode slots of the server, where they are known.
        """
        found = []
        for load in self.workload.loads:
            for suffix, cache in self._parts():
                found.append(
                    Setup(
                        name=load.name + suffix,
                        concurrency=load.concurrency,
                        rate_per_s=load.rate_per_s,
                        slots=slots,
                        cache=cache,
                    )
                )
        return tuple(found)

    def _parts(self) -> list[tuple[str, Literal["cold", "warm"]]]:
        if self.workload.resume is not None:
            contexts = self.workload.resume.contexts
            cold: list[tuple[str, Literal["cold", "warm"]]] = [(f"-{tokens}-cold", "cold") for tokens in contexts]
            return [*cold, ("-churn", "cold"), *((f"-{tokens}-resumed", "warm") for tokens in contexts)]
        return [("", "warm" if self.workload.agent is not None else "cold")]


def load(name: str, folder: Path = FOLDER) -> Loaded:
    """The workload of that name, or in that file.

    Args:
        name: of a file of `folder` without its ending, or the path of another one, with its ending `.yaml`.
        folder: the workloads that came with the program.

    Raises:
        UsageError: there is none of that name.
        RegistryError: a file is wrong; every problem with file and line.
    """
    path = Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml"
    if not name.endswith(".yaml") and name not in names(folder):
        valid = nearest(name, names(folder)) + "; or the path of a file of your own that ends in .yaml"
        raise UsageError(Finding(f"there is no workload {name!r}", "workloads are files of the harness", valid))
    document = read_document(path)
    workload = validate(Workload, document)
    if workload.id != path.stem:
        why = f"the file is called {path.stem}; the name of a file is its id"
        raise RegistryError(Finding(f"id = {workload.id}", why, "rename one", document.where(("id",))))
    hashed = hashlib.sha256(path.read_bytes())
    traces = {}
    for number, one in enumerate(workload.loads):
        if one.trace is not None:
            beside = path.parent / one.trace
            try:
                text = beside.read_bytes()
            except OSError as error:
                why, where = error.strerror or str(error), document.where(("loads", number, "trace"))
                raise RegistryError(Finding(f"{beside} cannot be read", why, "put it there", where)) from None
            hashed.update(text)
            traces[one.trace] = read_trace(beside, text)
    return Loaded(workload, traces, hashed.hexdigest())


def names(folder: Path = FOLDER) -> list[str]:
    """The workloads that came with the program."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def defaults(kind: Literal["cpu", "gpu"], folder: Path = FOLDER) -> list[Loaded]:
    """What is asked of a profile for such a platform when no workload is named."""
    every = [load(name, folder) for name in names(folder)]
    return [one for one in every if one.workload.default_on == kind]


def read_trace(path: Path, text: bytes) -> tuple[Arrival, ...]:
    """The conversations of a trace, in their order.

    Raises:
        RegistryError: lines that are no three numbers, go back in time, or ask for nothing; each with file and line.
    """
    found: list[Arrival] = []
    problems: list[Finding] = []
    lines = text.decode(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            seconds, input_tokens, output_tokens = line.split()
            arrival = Arrival(float(seconds), int(input_tokens), int(output_tokens))
        except ValueError:
            arrival = Arrival(math.nan, 0, 0)
        before = found[-1].seconds if found else 0.0
        # Written so that what is no number is no arrival either.
        in_time = before <= arrival.seconds <= MAX_LOAD_SECONDS
        if not (in_time and 8 <= arrival.input_tokens <= 1 << 20 and 1 <= arrival.output_tokens <= 1 << 20):
            what = f"{line[:60]!r} is no conversation"
            do = "give seconds (from 0 to 86400, none before the line above), input tokens (8 or more), output tokens"
            problems.append(Finding(what, "a trace has three numbers a line", do, f"{path}:{number}"))
        else:
            found.append(arrival)
    if len(lines) > MAX_TRACE_LINES or not (found or problems):
        why = f"a trace has from 1 to {MAX_TRACE_LINES:,} lines"
        problems.append(Finding(f"{len(lines)} lines", why, "give a part of it, or none", str(path)))
    if problems:
        raise RegistryError(*problems[:100])
    return tuple(found)
