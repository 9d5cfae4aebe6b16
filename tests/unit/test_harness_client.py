"""The load client against a server that answers, lies, breaks and refuses as told."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from harness_support import ModelServer, alone, job

from harness.client import Target, body_of, drive, retry_after_s, run
from harness.sample import Conversation, Job, Sample, in_flight
from harness.wire import Reply


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running
    assert running.said == ""


def ask(server: ModelServer, *jobs: Job, api: Any = "completions", **more: Any) -> list[Sample]:
    """The samples in the order of the jobs, all asked at once."""
    target = Target(server.url, "fake", api=api, **more)
    samples = {sample.job: sample for sample in run(drive(target, alone(*jobs), concurrency=len(jobs)))}
    return [samples[one.id] for one in jobs]


def test_an_answer_in_full(server: ModelServer) -> None:
    begun = time.perf_counter()
    target = Target(server.url, "fake")
    sample = run(drive(target, alone(job("whole", fake={"cached": 3})), concurrency=1, begun=begun))[0]
    assert (sample.outcome, sample.reason, sample.status, sample.finish_reason) == ("ok", "", 200, "length")
    assert (sample.prompt_tokens, sample.completion_tokens, sample.cached_tokens) == (5, 8, 3)
    assert (sample.pieces, sample.counts, sample.retries) == (8, tuple(range(1, 9)), 0)
    assert sample.text_sha256 == hashlib.sha256(b" word" * 8).hexdigest()
    sent = server.get("/fake/times")["whole"]
    assert 0 <= sample.asked_s <= sample.sent_s <= sent[0] - begun
    for arrived_s, sent_at in zip(sample.arrivals_s, sent, strict=True):
        assert arrived_s >= sent_at - begun
    assert sample.ended_s >= sample.arrivals_s[-1]
    assert list(sample.arrivals_s) == sorted(sample.arrivals_s)
    assert sum(sample.itl_s) == pytest.approx(sample.last_s - sample.first_s)


def test_what_is_sent() -> None:
    target = Target("http://127.0.0.1:1/v1", "m", key="secret")
    assert body_of(job("a", sampling={"temperature": 0.6}, seed=7), target) == {
        "model": "m",
        "prompt": (1, 2, 3, 4, 5),
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.6,
        "ignore_eos": True,
        "seed": 7,
    }
    assert target.headers == {"Authorization": "Bearer secret"}
    assert "secret" not in repr(target)
    plain = Target("http://127.0.0.1:1/v1", "m", usage_in_chunks=False)
    text = job("a", prompt_ids=None, text="some words", ignore_eos=False, sampling={})
    assert body_of(text, plain) == {
        "model": "m",
        "prompt": "some words",
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with pytest.raises(ValueError, match="job a has no messages"):
        body_of(text, Target("http://127.0.0.1:1/v1", "m", api="chat"))


def test_a_chat(server: ModelServer) -> None:
    messages = ({"role": "user", "content": "three short words"},)
    (sample,) = ask(server, job("chat", prompt_ids=None, messages=messages, asked_prompt_tokens=3), api="chat")
    assert (sample.outcome, sample.pieces, sample.counts) == ("ok", 8, tuple(range(1, 9)))
    assert server.state["last"]["messages"] == list(messages)


@pytest.mark.parametrize("fake", [{"pieces": 3}, {"pattern": [1, 4, 2]}])
def test_several_tokens_in_one_chunk_are_counted_by_usage(server: ModelServer, fake: dict[str, Any]) -> None:
    """Three tokens a chunk: the tokens are those of usage, and a chunk's tokens share the time before it."""
    (sample,) = ask(server, job("several", fake={**fake, "interval": 0.02}))
    assert (sample.outcome, sample.completion_tokens, sample.pieces) == ("ok", 8, len(sample.arrivals_s))
    assert sample.counts == ((3, 6, 8) if "pieces" in fake else (1, 5, 7, 8))
    assert len(sample.itl_s) == 7
    assert sum(sample.itl_s) == pytest.approx(sample.last_s - sample.first_s)
    assert sum(sample.itl_s) / 7 == pytest.approx(sample.tpot_s)


def test_without_usage_in_the_chunks_only_the_mean_is_known(server: ModelServer) -> None:
    one, three = ask(
        server,
        job("mute", fake={"continuous": False, "interval": 0.005}),
        job("mute-3", fake={"continuous": False, "pieces": 3, "interval": 0.005}),
    )
    assert (one.outcome, one.counts, len(one.itl_s)) == ("ok", None, 7)
    assert (three.outcome, three.counts, three.itl_s, three.pieces) == ("ok", None, (), 3)
    assert three.tpot_s == pytest.approx((three.last_s - three.first_s) / 7)


def test_the_token_that_ends_an_answer_has_no_text(server: ModelServer) -> None:
    silent = {"stop": 6, "continuous": False}
    stopped, mute = ask(
        server, job("stop", fake={"stop": 6}, ignore_eos=False), job("m", fake=silent, ignore_eos=False)
    )
    assert (stopped.outcome, stopped.finish_reason, stopped.completion_tokens) == ("ok", "stop", 6)
    assert (stopped.pieces, stopped.counts, len(stopped.itl_s)) == (5, (1, 2, 3, 4, 5, 6), 5)
    assert (mute.outcome, mute.pieces, len(mute.itl_s)) == ("ok", 5, 4)


def test_frames_cut_anywhere_by_packets() -> None:
    with ModelServer(split=7) as server:
        (sample,) = ask(server, job("cut"))
    assert (sample.outcome, sample.pieces, sample.counts) == ("ok", 8, tuple(range(1, 9)))


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        ({"usage": {"prompt_tokens": 1}}, "usage counts 6 prompt tokens of 5 sent"),
        ({"usage": {"completion_tokens": -1}}, "usage counts 7 tokens of exactly 8"),
        ({"usage": {"completion_tokens": 1}}, "usage counts 9 tokens of at most 8"),
        ({"usage": None}, "the answer has no usage, so that its tokens are not known"),
        ({"empty": True}, "status 200 and no text; tokens counted: 0"),
        ({"text": ""}, "status 200 and no text; tokens counted: 8"),
        ({"stop": 6}, "usage counts 6 tokens of exactly 8"),
    ],
)
def test_a_server_that_lies_voids(server: ModelServer, fake: dict[str, Any], reason: str) -> None:  # H2
    (sample,) = ask(server, job("lie", fake=fake))
    assert (sample.outcome, sample.reason, sample.status) == ("void", reason, 200)


def test_fewer_tokens_than_chunks_with_text_is_a_lie(server: ModelServer) -> None:
    (sample,) = ask(server, job("lie", fake={"usage": {"completion_tokens": -2}}, ignore_eos=False))
    assert (sample.outcome, sample.reason) == ("void", "usage counts 6 tokens, and 8 chunks carried text")


def test_an_answer_without_end_is_cut() -> None:
    """The server goes on beyond max_tokens: 100,000 tokens where 8 were asked for."""
    with ModelServer() as server:
        (sample,) = ask(server, job("endless", fake={"stop": 100_000, "interval": 0.001}))
    assert (sample.outcome, sample.reason) == (
        "failed",
        "the answer goes on beyond the tokens asked for, after 9 chunks of text",
    )


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("half", "the connection ended in the middle of the answer, after 3 chunks of text"),
        ("cut", "the connection ended in the middle of the answer, after 3 chunks of text"),
        ("done", "the stream ended without [DONE], after 3 chunks of text"),
        ("error", "an error in the stream: as told, after 3 chunks of text"),
        ("garbage", "a frame is not what the API says: {garbage}, after 3 chunks of text"),
        ("silence", "nothing more within 0.3 s, after 3 chunks of text"),
    ],
)
def test_a_server_that_breaks_off_fails(server: ModelServer, how: str, reason: str) -> None:
    (sample,) = ask(server, job("broken", fake={"break": {"how": how, "after": 3}}), silence_s=0.3)
    assert (sample.outcome, sample.reason, sample.status) == ("failed", reason, 200)
    assert (sample.pieces, sample.counts) == (3, (1, 2, 3))


def test_a_connection_that_is_reset_fails(server: ModelServer) -> None:
    (sample,) = ask(server, job("reset", fake={"break": {"how": "reset", "after": 3}, "interval": 0.01}))
    assert (sample.outcome, sample.pieces) == ("failed", 3)
    assert sample.reason.startswith("the connection ended in the middle of the answer: ")


def test_a_slow_server_is_waited_for_and_a_silent_one_is_not(server: ModelServer) -> None:
    slow, silent = ask(
        server,
        job("slow", fake={"head_delay": 0.2, "delay": 0.2, "interval": 0.2}),
        job("silent", fake={"head_delay": 60}),
        silence_s=0.7,
    )
    assert (slow.outcome, slow.pieces) == ("ok", 8)
    assert slow.ttft_s is not None
    assert slow.ttft_s >= 0.4
    assert (silent.outcome, silent.reason, silent.status) == (
        "failed",
        "no answer within 0.7 s, after 0 chunks of text",
        None,
    )


def test_a_server_that_is_not_there_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    target = Target(f"http://127.0.0.1:{port}/v1", "fake")
    (sample,) = run(drive(target, alone(job("nobody")), concurrency=1))
    assert (sample.outcome, sample.status) == ("failed", None)
    assert sample.reason.startswith(f"no connection to 127.0.0.1:{port}: ")


@pytest.mark.parametrize(
    ("raw", "outcome", "reason"),
    [
        ("", "failed", "the connection ended before an answer, after 0 chunks of text"),
        ("SSH-2.0-OpenSSH_9\r\n", "failed", "no HTTP: "),
        (
            'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"choices": []}',
            "failed",
            'status 200 and no stream: {"choices": []}',
        ),
        ("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 0\r\n\r\n", "void", "no answer in it"),
        (
            'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 12\r\n\r\ndata: {"choi',
            "failed",
            "the stream ended in the middle of a frame, after 0 chunks of text",
        ),
        ("HTTP/1.1 502 Bad\r\nContent-Type: text/html\r\n\r\n<h1>bad\ngateway</h1>", "failed", "502: <h1>bad gateway"),
        ("HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", "failed", "status 302: nothing said"),
    ],
)
def test_other_servers(server: ModelServer, raw: str, outcome: str, reason: str) -> None:
    (sample,) = ask(server, job("odd", fake={"raw": raw}))
    assert sample.outcome == outcome
    assert reason in sample.reason


def stream(*frames: str) -> str:
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    return head + "".join(f"data: {frame}\n\n" for frame in (*frames, "[DONE]"))


def counted(usage: str, finish: str = '"length"') -> tuple[str, ...]:
    """Eight chunks of text, the last one with that usage."""
    word = '{"choices": [{"text": " word", "finish_reason": null}]}'
    return (*[word] * 7, f'{{"choices": [{{"text": " word", "finish_reason": {finish}}}], "usage": {usage}}}')


USAGE = '{"prompt_tokens": 5, "completion_tokens": 8%s}'
NO_API = "a frame is not what the API says"
NO_COUNTS = "the answer has no counts in its usage"


@pytest.mark.parametrize(
    ("raw", "outcome", "reason"),
    [
        (stream(*counted("[1]")), "failed", NO_API),
        (stream(*counted('"many"')), "failed", NO_API),
        (stream(*counted('{"prompt_tokens": 5, "completion_tokens": 1.5}')), "void", NO_COUNTS),
        (stream(*counted('{"prompt_tokens": 5, "completion_tokens": -8}')), "void", NO_COUNTS),
        (stream(*counted('{"prompt_tokens": 5, "completion_tokens": 1' + "0" * 400 + "}")), "void", NO_COUNTS),
        (stream(*counted('{"prompt_tokens": true, "completion_tokens": 8}')), "void", NO_COUNTS),
        (stream(*counted(USAGE % "", '{"a": 1}')), "failed", NO_API),
        (stream(*counted(USAGE % "", r'"\ud800"')), "failed", NO_API),
        (stream(r'{"choices": [{"text": "\ud800"}]}'), "failed", NO_API),
        (stream('{"choices": [{"text": 5}]}'), "failed", NO_API),
        (stream('{"choices": [{"text": ["a"]}]}'), "failed", NO_API),
        (stream('{"choices": [{"delta": {"content": 5}}]}'), "failed", NO_API),
        (stream("[" * 100_000), "failed", NO_API),
        (stream(r'{"error": "\ud800"}'), "failed", "an error in the stream"),
        ("HTTP/1.1 500 Bad\r\n\r\n" + "[" * 3900, "failed", "status 500: [["),
        ("HTTP/1.1 429 Bad\r\n\r\n" + "[" * 3900, "rejected", "status 429 without a Retry-After: [["),
    ],
)
def test_what_no_server_should_say_is_a_sample_with_a_reason(
    server: ModelServer, raw: str, outcome: str, reason: str
) -> None:
    (sample,) = ask(server, job("odd", fake={"raw": raw}))
    assert sample.outcome == outcome
    assert reason in sample.reason


@pytest.mark.parametrize("count", ["-5", "1" + "0" * 30, "1" + "0" * 400, "true", "1.5", '"3"', "[3]", "6"])
def test_a_count_of_cached_tokens_that_cannot_be_is_not_known(server: ModelServer, count: str) -> None:
    details = ', "prompt_tokens_details": {"cached_tokens": %s}'
    for said, known in ((count, None), ("3", 3)):
        (sample,) = ask(server, job("odd", fake={"raw": stream(*counted(USAGE % (details % said)))}))
        assert (sample.outcome, sample.cached_tokens) == ("ok", known)


def test_a_count_on_the_way_that_is_none_leaves_the_chunks_uncounted(server: ModelServer) -> None:
    *words, last = counted(USAGE % "")
    odd = [word[:-1] + f', "usage": {{"completion_tokens": {place}.5}}}}' for place, word in enumerate(words)]
    (sample,) = ask(server, job("odd", fake={"raw": stream(*odd, last)}))
    assert (sample.outcome, sample.counts, sample.completion_tokens) == ("ok", None, 8)


def test_a_line_without_end_is_not_kept(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.answer.LARGEST_FRAME", 1 << 16)
    (sample,) = ask(server, job("long", fake={"raw": stream("x" * (1 << 20))}))
    assert (sample.outcome, "a frame of more than 65536 bytes" in sample.reason) == ("failed", True)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("0", 0.25),
        ("0.001", 0.25),
        ("7", 7.0),
        ("-1", None),
        ("-1e308", None),
        ("nan", None),
        ("inf", None),
        ("1e999", None),
        ("", None),
        ("1, 2, 3 4 5", None),
        ("Mon, 99 Foo 99999 00:00:00 +9999", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.25),
    ],
)
def test_a_server_is_not_asked_again_at_once(said: str, seconds: float | None) -> None:
    assert retry_after_s(Reply(0.0, status=429, headers={"retry-after": said})) == seconds


def test_a_date_at_the_end_of_time_is_no_error() -> None:
    for said in ("Fri, 31 Dec 9999 23:59:59 -2359", "Mon, 01 Jan 0001 00:00:00 +2359"):
        retry_after_s(Reply(0.0, status=429, headers={"retry-after": said}))


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_that_says_when_to_come_again_is_heeded_and_counted(server: ModelServer, status: int) -> None:
    fake = {"status": status, "retry_after": 0.25, "times": 2}
    (sample,) = ask(server, job(f"again-{status}", fake=fake))
    assert (sample.outcome, sample.retries, sample.status) == ("ok", 2, 200)
    assert sample.refused_s >= 0.5
    assert sample.ttft_s is not None
    assert sample.ttft_s <= sample.ended_s - sample.sent_s
    assert sample.sent_s - sample.asked_s == sample.refused_s


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_for_good_is_rejected(server: ModelServer, status: int) -> None:
    never, later = ask(
        server,
        job(f"never-{status}", fake={"status": status}),
        job(f"later-{status}", fake={"status": status, "retry_after": 0.4}),
        refused_s=1.0,
    )
    assert (never.outcome, never.retries) == ("rejected", 0)
    assert never.reason == f"status {status} without a Retry-After: as told"
    assert (later.outcome, later.retries) == ("rejected", 2)
    assert later.reason == f"status {status}, 2 times asked again: as told"


def test_retry_after_may_be_a_date(server: ModelServer) -> None:
    fake = {"status": 429, "retry_after": "Wed, 21 Oct 2015 07:28:00 GMT", "times": 1}
    nonsense = {"status": 429, "retry_after": "soon", "times": 1}
    dated, said = ask(server, job("dated", fake=fake), job("nonsense", fake=nonsense))
    assert (dated.outcome, dated.retries) == ("ok", 1)
    assert (said.outcome, said.retries) == ("rejected", 0)


@pytest.mark.parametrize("status", [400, 401, 404, 500])
def test_an_error_fails_with_the_servers_words(server: ModelServer, status: int) -> None:
    (sample,) = ask(server, job("error", fake={"status": status, "words": "too  long\nby far", "retry_after": 1}))
    assert (sample.outcome, sample.status, sample.retries) == ("failed", status, 0)
    assert sample.reason == f"status {status}: too long by far"


def test_more_requests_than_a_pool_holds_are_in_flight_together() -> None:
    """300 at once, where the pools of usual clients hold 10 or 100: seen by the server, and by the samples."""
    jobs = [job(f"{number}", fake={"delay": 5.0}) for number in range(300)]
    with ModelServer() as server:
        target = Target(server.url, "fake")

        async def until_all_are_there() -> int:
            driving = asyncio.ensure_future(drive(target, alone(*jobs), concurrency=300))
            most = 0
            while most < 300 and not driving.done():
                most = (await asyncio.to_thread(lambda: server.state))["most"]
            samples = await driving
            assert in_flight(samples)[0] == 300
            return most

        assert run(until_all_are_there()) == 300


def test_a_closed_loop_keeps_to_its_concurrency_and_a_conversation_to_its_order(server: ModelServer) -> None:
    talks = [
        Conversation(tuple(job(f"{talk}.{turn}", fake={"interval": 0.002}) for turn in range(3)), (0.0, 0.05, 0.0))
        for talk in range(8)
    ]
    samples = run(drive(Target(server.url, "fake"), talks, concurrency=3))
    assert len(samples) == 24
    assert {sample.outcome for sample in samples} == {"ok"}
    by_id = {sample.job: sample for sample in samples}
    for talk in range(8):
        first, second, third = (by_id[f"{talk}.{turn}"] for turn in range(3))
        # The clocks of a sleep and of the notes differ by less than a millisecond.
        assert second.sent_s >= first.ended_s + 0.049
        assert third.sent_s >= second.ended_s
    assert in_flight(samples)[0] <= 3


def test_an_open_loop_waits_for_nobody(server: ModelServer) -> None:
    jobs = [job(f"open-{number}", fake={"delay": 0.5}) for number in range(5)]
    arrivals = [0.0, 0.05, 0.05, 0.1, 0.2]
    samples = run(drive(Target(server.url, "fake"), alone(*jobs), arrivals=arrivals))
    by_id = {sample.job: sample for sample in samples}
    for one, at_s in zip(jobs, arrivals, strict=True):
        assert by_id[one.id].asked_s == pytest.approx(at_s)
        assert by_id[one.id].sent_s >= at_s - 0.002  # a loop takes what is due within its clock's resolution as due
    assert in_flight(samples)[0] == 5


def test_what_a_cancellation_cuts_has_samples_too(server: ModelServer) -> None:
    """One has its answer, two are in the middle of theirs, one waits to ask again, one was never begun."""
    jobs = [
        job("quick"),
        job("slow-1", fake={"break": {"how": "silence", "after": 3}}),
        job("slow-2", fake={"break": {"how": "silence", "after": 3}}),
        job("refused", fake={"status": 429, "retry_after": 100}),
        job("never"),
    ]
    kept: list[Sample] = []

    async def cut() -> None:
        target = Target(server.url, "fake")
        talks = [Conversation((jobs[0],)), Conversation((jobs[1], jobs[4])), *alone(*jobs[2:4])]
        driving = asyncio.ensure_future(drive(target, talks, concurrency=4, on_sample=kept.append))
        while True:
            times = await asyncio.to_thread(server.get, "/fake/times")
            if kept and all(len(times.get(name, ())) == 3 for name in ("slow-1", "slow-2")):
                break
        driving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await driving

    run(cut())
    met = {sample.job: (sample.outcome, sample.reason) for sample in kept}
    interrupted = ("failed", "interrupted, after 3 chunks of text")
    assert met == {
        "quick": ("ok", ""),
        "slow-1": interrupted,
        "slow-2": interrupted,
        "refused": ("failed", "interrupted, after 0 chunks of text"),
    }
    assert server.state["in_flight"] == 0


def test_who_cannot_keep_samples_hears_of_it(server: ModelServer) -> None:
    def full(sample: Sample) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run(drive(Target(server.url, "fake"), alone(job("kept"), job("lost")), concurrency=2, on_sample=full))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http://", "http://host/v1?x=1"])
def test_no_address(url: str) -> None:
    with pytest.raises(ValueError, match=r"neither http|neither a name|a query"):
        run(drive(Target(url, "fake"), [], concurrency=1))


@pytest.mark.parametrize(
    "loops", [{}, {"concurrency": 1, "arrivals": []}, {"concurrency": 0}, {"arrivals": [0.0, 1.0]}]
)
def test_a_load_that_cannot_be_meant(loops: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"closed loop|nobody would ask|argument"):
        run(drive(Target("http://127.0.0.1:1/v1", "fake"), alone(job("one")), **loops))
