"""Workloads: the files that come with the program, what is refused, and the requests that come of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bench_support import WORKLOAD as GOOD
from bench_support import save_tokenizer, written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from harness import workload
from harness.prompts import OPENING, PromptSource
from harness.sample import Job
from harness.steps import Step, Steps
from harness.workload import Loaded
from slimserve.errors import RegistryError, UsageError

NAMES = workload.names()
AGENT = """\
agent:
  shared_tokens: 40
  turns: 3
  adds: [10, 20]
  answers: [4, 8]
  gaps_s: [0.5, 2]
loads:
  - {concurrency: 2, conversations: 3}
"""
RESUME = """\
resume:
  contexts: [30, 50]
  add_tokens: 5
  output_tokens: 2
  churn: {prompts: 3, input_tokens: 25}
loads:
  - {concurrency: 1, conversations: 2}
"""
HEAD = GOOD[: GOOD.index("single:")]


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def steps(loaded: Loaded, tokenizer_path: Path, seed: int = 1) -> list[Step]:
    source = PromptSource(tokenizer_path, seed, works=loaded.workload.works)
    return list(Steps(loaded, source, seed))


def jobs(step: Step) -> Iterator[Job]:
    for conversation in (*step.warm_up, *step.measured):
        yield from conversation.jobs


def ids(job: Job) -> tuple[int, ...]:
    assert job.prompt_ids is not None
    return job.prompt_ids


@pytest.mark.parametrize("name", NAMES)
def test_those_that_come_with_the_program_are_right(name: str) -> None:
    loaded = workload.load(name)
    setups = loaded.setups(slots=8)
    assert len({setup.name for setup in setups}) == len(setups)
    assert loaded.longest_tokens > 0
    parent = loaded.workload.scaled_from
    if parent is not None:  # never the same name, and truly smaller
        assert parent in NAMES
        full = workload.load(parent)
        assert full.workload.scaled_from is None
        assert loaded.longest_tokens < full.longest_tokens


def test_the_shapes_that_were_promised() -> None:
    chat = workload.load("chat-1k-2k").workload
    assert chat.single == workload.Single(input_tokens=1000, output_tokens=2000)
    assert [load.concurrency for load in chat.loads] == [1, 8, 32]
    assert [load.concurrency for load in workload.load("batch-sweep").workload.loads] == [1, 2, 4, 8, 16, 32]
    assert [load.concurrency for load in workload.load("agent").workload.loads] == [1, 2, 4, 8, 16, 32]
    resume = workload.load("resume").workload.resume
    assert resume is not None
    assert resume.contexts == (8000, 24000, 42000)
    assert 64 in [load.concurrency for load in workload.load("overload").workload.loads]
    assert "long-prefill" in NAMES


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_what_is_measured_by_default_shares_no_text(kind: str) -> None:
    chosen = workload.defaults("cpu" if kind == "cpu" else "gpu")
    assert chosen
    # They go to one server one after the other: what one asked the next must not find in the cache.
    for one, other in itertools.combinations(chosen, 2):
        assert not set(one.workload.works) & set(other.workload.works)


def test_requests_are_those_that_were_asked_for(tmp_path: Path, tokenizer_path: Path) -> None:
    loaded = written(tmp_path)
    found = steps(loaded, tokenizer_path)
    assert [(step.point, step.round, step.concurrency) for step in found] == [
        ("c2", 0, 2),
        ("r2.5", 0, None),
        ("c2", 1, 2),
        ("r2.5", 1, None),
    ]
    assert [setup.name for setup in loaded.setups()] == ["c2", "r2.5"]
    assert [step.jobs for step in found] == [4, 3, 4, 3]
    assert [len(step.warm_up) for step in found] == [2, 4, 2, 4]
    every = [job for step in found for job in jobs(step)]
    assert len({job.id for job in every}) == len({job.seed for job in every}) == len(every)
    for job in every:
        assert (len(ids(job)), job.asked_prompt_tokens, job.ignore_eos, job.sampling) == (20, 20, True, {})
        assert job.max_tokens == (3 if job.phase == "measure" else 1)
        assert job.seed is not None
        assert 0 <= job.seed < 1 << 31
    for one, other in itertools.combinations(every, 2):
        assert ids(one)[:OPENING] != ids(other)[:OPENING]
    arrivals = found[1].arrivals_s
    assert arrivals is not None
    assert len(arrivals) == 3
    assert 0 < arrivals[0] < arrivals[1] < arrivals[2]
    assert arrivals != found[3].arrivals_s


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 40), text=st.sampled_from([GOOD, HEAD + AGENT, HEAD + RESUME]))
def test_the_same_seed_asks_the_same(tmp_path: Path, tokenizer_path: Path, seed: int, text: str) -> None:
    loaded = written(tmp_path, text)
    assert steps(loaded, tokenizer_path, seed) == steps(loaded, tokenizer_path, seed)
    assert steps(loaded, tokenizer_path, seed) != steps(loaded, tokenizer_path, seed + 1)


def test_a_session_grows_on_what_all_share_and_then_on_its_own(tmp_path: Path, tokenizer_path: Path) -> None:
    loaded = written(tmp_path, HEAD + AGENT)
    for step in steps(loaded, tokenizer_path):
        shared = {ids(job)[:40] for job in jobs(step)}
        assert len(shared) == 1
        for conversation in step.measured:
            assert len(conversation.jobs) == 3
            assert conversation.gaps_s[0] == 0
            assert set(conversation.gaps_s[1:]) <= {0.5, 2}
            for before, after in itertools.pairwise(conversation.jobs):
                assert ids(after)[: len(ids(before))] == ids(before)
                # the answer, as long as it was asked for, and what the tool said
                assert len(ids(after)) - len(ids(before)) - before.max_tokens in (10, 20)
            assert {job.max_tokens for job in conversation.jobs} <= {4, 8}
            assert len(ids(conversation.jobs[-1])) + conversation.jobs[-1].max_tokens <= loaded.longest_tokens
        firsts = [conversation.jobs[0] for conversation in (*step.warm_up, *step.measured)]
        assert len({ids(job)[40 : 40 + OPENING] for job in firsts}) == len(firsts)
    assert [setup.cache for setup in loaded.setups()] == ["warm"]
    first, second = steps(loaded, tokenizer_path)
    assert ids(next(jobs(first)))[:OPENING] != ids(next(jobs(second)))[:OPENING]


def test_what_is_resumed_begins_as_it_was_read_before_the_churn(tmp_path: Path, tokenizer_path: Path) -> None:
    loaded = written(tmp_path, HEAD + RESUME)
    setups = {setup.name: setup.cache for setup in loaded.setups()}
    found = steps(loaded, tokenizer_path)
    assert [step.point for step in found] == [*setups, *setups]
    assert setups == {
        "c1-30-cold": "cold",
        "c1-50-cold": "cold",
        "c1-churn": "cold",
        "c1-30-resumed": "warm",
        "c1-50-resumed": "warm",
    }
    for start in (0, 5):
        cold = {step.point: step for step in found[start : start + 5]}
        assert cold["c1-churn"].jobs == 3
        for tokens in (30, 50):
            before, after = cold[f"c1-{tokens}-cold"].measured, cold[f"c1-{tokens}-resumed"].measured
            assert len(before) == len(after) == 2
            for one, other in zip(before, after, strict=True):
                assert ids(other.jobs[0])[:tokens] == ids(one.jobs[0])
                assert len(ids(other.jobs[0])) == tokens + 5


def test_texts_are_asked_for_by_what_they_are_encoded_to(tmp_path: Path, tokenizer_path: Path) -> None:
    loaded = written(tmp_path, HEAD + AGENT)
    source = PromptSource(tokenizer_path, 1, "text", works=("devil",))
    fresh = Tokenizer.from_file(str(tokenizer_path))
    for step in Steps(loaded, source, 1):
        for job in jobs(step):
            assert job.prompt_ids is None
            assert job.text is not None
            assert job.asked_prompt_tokens == len(fresh.encode(job.text).ids)


def test_a_trace_says_when_and_how_much(tmp_path: Path, tokenizer_path: Path) -> None:
    (tmp_path / "busy.txt").write_text("# seconds, in, out\n0.5 12 3\n\n0.5 9 1\n7 30 2\n")
    loaded = written(tmp_path, GOOD.replace("{rate_per_s: 2.5, conversations: 3}", "{trace: busy.txt}"))
    step = steps(loaded, tokenizer_path)[1]
    assert step.point == "t-busy"
    assert step.arrivals_s == (0.5, 0.5, 7)
    asked = [(job.asked_prompt_tokens, job.max_tokens) for one in step.measured for job in one.jobs]
    assert asked == [(12, 3), (9, 1), (30, 2)]
    assert loaded.longest_tokens == 32
    (tmp_path / "busy.txt").write_text("0.5 12 3\n0.5 9 1\n8 30 2\n")
    assert written(tmp_path, (tmp_path / "tiny.yaml").read_text()).sha256 != loaded.sha256


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("0 10 1\nabc\n", 2, "'abc' is no conversation"),
        ("3 10 1\n2 10 1\n", 2, "'2 10 1' is no conversation"),
        ("nan 10 1\n", 1, "is no conversation"),
        ("-1 10 1\n", 1, "is no conversation"),
        ("1e9 10 1\n", 1, "is no conversation"),
        ("1 0 1\n", 1, "is no conversation"),
        ("1 10 0\n", 1, "is no conversation"),
        ("1 10 1 4\n", 1, "is no conversation"),
        ("1 10 \xff\n", 1, "is no conversation"),
        ("", None, "0 lines"),
        ("1 10 1\n" * 100_001, None, "100001 lines"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, text: str, line: int | None, says: str) -> None:
    (tmp_path / "busy.txt").write_bytes(text.encode("latin-1"))
    with pytest.raises(RegistryError) as caught:
        written(tmp_path, GOOD.replace("{rate_per_s: 2.5, conversations: 3}", "{trace: busy.txt}"))
    (finding,) = caught.value.findings
    assert says in finding.what
    assert finding.where == f"{tmp_path / 'busy.txt'}" + (f":{line}" if line else "")


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("rounds: 2", "round: 2", 5, "unknown key round"),
        ("rounds: 2", "rounds: 0", 5, "rounds = 0 is not valid"),
        ("rounds: 2", "rounds: two", 5, 'rounds = "two" is not valid'),
        ("works: [devil]", "works: [bible]", 4, 'works[0] = "bible" is not valid'),
        ("works: [devil]", "works: []", 4, "works = [] is not valid"),
        ("input_tokens: 20", "input_tokens: 7", 7, "single.input_tokens = 7 is not valid"),
        ("output_tokens: 3", "output_tokens: 0", 7, "single.output_tokens = 0 is not valid"),
        ("rate_per_s: 2.5", "rate_per_s: 0", 10, "loads[1].rate_per_s = 0 is not valid"),
        ("rate_per_s: 2.5", "rate_per_s: 1.0e-9", 10, "loads[1].rate_per_s = 1e-09 is not valid"),
        ("{rate_per_s: 2.5, conversations: 3}", "{rate_per_s: 0.001, conversations: 87}", 10, "more than a day"),
        ("rate_per_s: 2.5", "concurrency: 2", 1, "the file: two loads are called c2"),
        ("rate_per_s: 2.5,", "rate_per_s: 2.5, concurrency: 3,", 10, "loads[1]: exactly one of concurrency"),
        ("{rate_per_s: 2.5, conversations: 3}", "{rate_per_s: 2.5}", 10, "loads[1]: conversations is needed"),
        ("{rate_per_s: 2.5, conversations: 3}", "{trace: ../t}", 10, 'loads[1].trace = "../t" is not valid'),
        ("{rate_per_s: 2.5, conversations: 3}", "{trace: \u00e9.txt}", 10, r"be called 't-\xe9', after the trace"),
        ("{rate_per_s: 2.5, conversations: 3}", "{trace: " + "a" * 100 + "}", 10, "at most 64 letters"),
        ("{rate_per_s: 2.5, conversations: 3}", "{trace: no.txt}", 10, "no.txt cannot be read"),
        ("id: tiny", "id: huge", 1, "id = huge"),
        (
            "single: {input_tokens: 20, output_tokens: 3}",
            AGENT[: AGENT.index("loads")].strip() + "\n" + RESUME[: RESUME.index("loads")].strip(),
            1,
            "exactly one of single, agent, resume is needed, 2 given",
        ),
        ("title: A tiny one", "title: A tiny one\ntitle: Another", 3, "title is given twice"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, old: str, new: str, line: int, says: str) -> None:
    assert old in GOOD
    with pytest.raises(RegistryError) as caught:
        written(tmp_path, GOOD.replace(old, new))
    assert [finding.where for finding in caught.value.findings if says in finding.what] == [
        f"{tmp_path / 'tiny.yaml'}:{line}"
    ]


def test_the_least_rate_is_said_and_taken(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"it must be from 0\.001 to 10000"):
        written(tmp_path, GOOD.replace("rate_per_s: 2.5", "rate_per_s: 0.0009"))
    loaded = written(
        tmp_path, GOOD.replace("{rate_per_s: 2.5, conversations: 3}", "{rate_per_s: 0.001, conversations: 86}")
    )
    assert loaded.workload.loads[1].rate_per_s == 0.001


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + AGENT.replace("conversations: 3}", "conversations: 3, input_tokens: 9}"), "go with single"),
        (HEAD + RESUME.replace("concurrency: 1", "rate_per_s: 1"), "resume needs closed loops"),
    ],
)
def test_a_load_that_its_kind_does_not_know_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(RegistryError, match=says):
        written(tmp_path, text)


@pytest.mark.parametrize("name", ["chat-smal", "../workloads/chat-small", "", "."])
def test_an_unknown_name_is_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        workload.load(name)
    assert "chat-small" in caught.value.findings[0].do


@pytest.mark.parametrize("text", [GOOD, HEAD + AGENT, HEAD + RESUME])
def test_the_number_of_requests_is_known_before(tmp_path: Path, tokenizer_path: Path, text: str) -> None:
    loaded = written(tmp_path, text)
    assert loaded.requests == sum(step.jobs for step in steps(loaded, tokenizer_path))


def test_the_hash_is_of_every_byte(tmp_path: Path) -> None:
    assert written(tmp_path).sha256 != written(tmp_path, GOOD + "# a word\n").sha256


def test_a_setup_says_what_is_known_of_the_server(tmp_path: Path) -> None:
    loaded = written(tmp_path)
    assert [setup.slots for setup in loaded.setups(slots=4)] == [4, 4]
    assert loaded.setups()[1] == replace(loaded.setups()[0], name="r2.5", concurrency=None, rate_per_s=2.5)
