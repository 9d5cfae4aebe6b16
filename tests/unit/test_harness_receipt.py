"""Receipts: written once and whole, proved by their samples, refused with a sentence when they are something else."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from receipts_support import FACTS, HOST, Pace, answer, job, make, measure, rewrite

from harness import journal, recording
from harness.raw import Raw, pack, read_samples, read_unfinished
from harness.receipt import ServerCounts, Setup, all_in, find, parse
from harness.recording import Recording, begin, without_secrets
from harness.verify import verify
from slimserve import receipt_file
from slimserve.errors import Failed, Refused, UsageError
from slimserve.receipt_file import Unreadable


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_receipt_says_what_its_samples_say(tmp_path: Path) -> None:
    def fill(recording: Recording) -> None:
        recording.add_point(Setup(name="c1", concurrency=1))
        for number in range(4):
            recording.add("c1", number // 2, job(number), answer(number, number * 1.0, 0.1, 0.01))

    point = make(tmp_path, fill=fill).points[0]
    assert (point.sent, point.ok, point.rounds, point.output_tokens, point.prompt_tokens) == (4, 4, 2, 256, 400)
    assert point.prompt_tokens_asked == 400
    assert point.ttft_ms is not None
    assert point.ttft_ms.p50 == pytest.approx(100)
    assert point.itl_ms is not None
    assert (point.itl_ms.p99, point.itl_ms.count) == (pytest.approx(10), 4 * 63)
    assert point.interactivity_p90 == pytest.approx(100)
    # A round is two requests, the second sent a second after the first and answered within 0.73 s.
    assert point.output_tokens_per_s == pytest.approx(128 / 1.73)
    assert point.noise["throughput"] == pytest.approx(0, abs=1e-9)


def test_what_is_written_verifies_and_reads_back(tmp_path: Path) -> None:
    receipt = make(tmp_path, concurrencies=(1, 8))
    assert receipt.outcome == "whole"
    assert verify(receipt, tmp_path) == []
    assert all_in(tmp_path) == ([receipt], [])
    assert find(tmp_path, "on") == receipt
    assert find(tmp_path, str(tmp_path / "one.json")) == receipt


def test_samples_read_back_as_they_were(tmp_path: Path) -> None:
    raw = Raw.of("c1", 2, job(1), answer(1, 12.345678, 0.1, 0.01))
    (tmp_path / "x.gz").write_bytes(pack(raw.line()))
    (back,) = read_samples(tmp_path / "x.gz")[1]
    assert back.sample.itl_s == pytest.approx(raw.sample.itl_s, abs=2e-6)
    assert back.line() == raw.line()


def test_a_receipt_is_never_written_over(tmp_path: Path) -> None:
    make(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(Failed, match="receipts that were there are untouched"):
        make(tmp_path, seed=99)
    assert tree(tmp_path) == before


def test_a_name_that_only_the_receipt_takes_leaves_no_samples_behind(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text("{}")
    before = tree(tmp_path)
    with pytest.raises(Failed, match="cannot be written"):
        make(tmp_path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["t-\u00e9", "C8", "a" * 65])
def test_a_receipt_that_nobody_could_read_back_fails_with_the_reason_and_its_samples_are_kept(
    tmp_path: Path, name: str
) -> None:
    fresh = Recording(tmp_path, "one")
    fresh.add_point(Setup(name=name, concurrency=1))
    fresh.add(name, 0, job(1), answer(1, 0.0, 0.1, 0.01))
    with pytest.raises(Failed, match=r"points\[0\]\.setup\.name = .* is not valid") as caught:
        fresh.close("whole", (), FACTS)
    assert f"one{journal.SUFFIX} has what was measured" in str(caught.value)
    assert list(tree(tmp_path)) == [f"one{journal.SUFFIX}"]
    assert len(read_unfinished(tmp_path / f"one{journal.SUFFIX}")) == 1


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Files of this process end after 4 KiB, as on a disk that is full: a write fails, and no signal is sent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_loses_nothing_that_was_there(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    make(tmp_path, "before")
    before = tree(tmp_path)
    fresh = Recording(tmp_path, "later")
    measure(fresh, 3, Pace(), concurrency=32)
    request.getfixturevalue("small_disk")
    with pytest.raises(Failed, match=r"later\.json cannot be written: File too large"):
        fresh.close("whole", (), FACTS)
    assert tree(tmp_path) == before


def test_a_disk_that_fills_up_during_a_run_ends_it(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    make(tmp_path, "before")
    before = tree(tmp_path)
    fresh = Recording(tmp_path, "later")
    measure(fresh, 3, Pace(), concurrency=32)
    request.getfixturevalue("small_disk")
    with pytest.raises(Failed, match=r"what was measured cannot be kept in .*: File too large"):
        fresh.save()
    left = tree(tmp_path)
    assert len(left.pop("later.unfinished.gz")) == 4096
    assert left == before


def test_a_disk_that_is_full_is_found_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "NEEDED_BYTES", 1 << 62)
    with pytest.raises(Refused, match="MiB are free at"):
        begin(tmp_path, "tiny", "chat")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "receipts").write_text("a file")
    with pytest.raises(Refused, match="no receipt can be written to"):
        begin(tmp_path / "receipts", "tiny", "chat")


def test_names_of_recordings_are_ids_whatever_is_measured(tmp_path: Path) -> None:
    one, other = (begin(tmp_path / "new", "HTTP://Box:80/v1 ünsafe", "chat-1k") for _ in range(2))
    assert one.id != other.id
    one.add_point(Setup(name="c1", concurrency=1))
    one.add("c1", 0, job(0), answer(0, 0, 0.1, 0.01))
    assert find(tmp_path / "new", one.close("whole", (), FACTS).name).id == one.id


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        (
            {"outcome": "void", "reason": "half a frame"},
            "void",
            "1 of 2 requests cannot be believed; first: half a frame",
        ),
        ({"outcome": "failed", "reason": "closed early"}, "failed", "1 of 2 requests failed; first: closed early"),
        (
            {"completion_tokens": 63},
            "void",
            "1 answers count other output tokens than were asked for; first: 63 where 64",
        ),
        (
            {"prompt_tokens": 5128},
            "void",
            "1 answers count other prompt tokens than were asked for; first: 5128 where 100",
        ),
        (
            {"prompt_tokens": None},
            "void",
            "1 answers count other prompt tokens than were asked for; first: None where 100",
        ),
        ({"outcome": "rejected", "reason": "429", "status": 429}, "whole", ""),
    ],
)
def test_one_bad_answer_among_good_ones(tmp_path: Path, changes: dict[str, object], outcome: str, reason: str) -> None:
    def fill(recording: Recording) -> None:
        recording.add_point(Setup(name="c1", concurrency=1))
        recording.add("c1", 0, job(0), answer(0, 0, 0.1, 0.01))
        recording.add("c1", 0, job(1), replace(answer(1, 1, 0.1, 0.01), **changes))

    receipt = make(tmp_path, fill=fill)
    assert receipt.outcome == outcome
    assert " ".join(receipt.reasons) == "" if outcome == "whole" else any(reason in one for one in receipt.reasons)
    assert receipt.samples.count == 2
    assert verify(receipt, tmp_path) == []


def test_answers_that_were_lost_void_the_run(tmp_path: Path) -> None:  # H5
    def fill(recording: Recording) -> None:
        recording.add_point(Setup(name="c1", concurrency=1))
        recording.add("c1", 0, job(0), answer(0, 0, 0.1, 0.01))
        recording.add_begun("c1", 3)

    receipt = make(tmp_path, fill=fill)
    assert receipt.outcome == "void"
    assert receipt.reasons == ("c1: 3 requests were sent, and 1 were answered, 0 failed, 0 were rejected, 0 are void",)


def test_nothing_at_all_is_no_measurement(tmp_path: Path) -> None:
    receipt = make(tmp_path, fill=lambda recording: recording.add_point(Setup(name="c1", concurrency=1)))
    assert (receipt.outcome, receipt.reasons) == ("failed", ("nothing was measured",))


def test_an_interrupted_run_keeps_what_it_had(tmp_path: Path) -> None:
    receipt = make(tmp_path, outcome="aborted", reasons=["it was interrupted"])
    assert (receipt.outcome, receipt.reasons) == ("aborted", ("it was interrupted",))
    assert receipt.points[0].ok == 96
    assert verify(receipt, tmp_path) == []


def test_numbers_of_a_queue_are_called_that(tmp_path: Path) -> None:  # H7
    def fill(recording: Recording) -> None:
        recording.add_point(Setup(name="c64", concurrency=64, slots=32))
        recording.add("c64", 0, job(0), answer(0, 0, 0.1, 0.01))
        recording.add_point(Setup(name="c1", concurrency=1))
        recording.add("c1", 0, job(1), replace(answer(1, 9, 0.1, 0.01), asked_s=3.0))
        recording.add_point(Setup(name="c2", concurrency=2, slots=2))
        recording.add("c2", 0, job(2), answer(2, 0, 0.1, 0.01))
        recording.add_counts("c2", ServerCounts(queue_seconds=95.0, ttft_seconds=100.0, drafts=10, accepted_tokens=25))

    first, second, third = make(tmp_path, fill=fill).points
    assert third.notes == ("admission-bound: 95% of the time to the first token was spent in the server's queue",)
    assert third.server.acceptance_length == 3.5
    assert first.server.acceptance_length is None
    assert first.notes == ("admission-bound: 64 requests at once on 32 slots, so that some wait",)
    assert second.notes[0].startswith("admission-bound: the median request was refused, or late")


def test_no_secret_of_a_command_line_gets_into_a_receipt(tmp_path: Path) -> None:
    command = (
        "slimserve",
        "--against",
        "http://me:hunter2@box:80/v1?key=hunter2#hunter2",
        "--against=http://a:hunter2@b",
    )
    text = json.dumps(
        parse(receipt_file.read(tmp_path / f"{make(tmp_path, facts=replace(FACTS, command=command)).id}.json")).command
    )
    assert "hunter2" not in text
    assert "http://box:80/v1" in text
    assert without_secrets("http://[") == "an address that cannot be read"


def test_control_sequences_do_not_get_into_a_receipt(tmp_path: Path) -> None:
    receipt = make(tmp_path, outcome="failed", reasons=["\x1b[2Jgone"], facts=replace(FACTS, command=("a\nb",)))
    assert receipt.reasons == ("\\x1b[2Jgone",)
    assert receipt.command == ("a\\nb",)


def test_words_that_are_nothing_or_blank_or_no_utf_8_get_into_a_receipt(tmp_path: Path) -> None:
    receipt = make(tmp_path, facts=replace(FACTS, command=("", "  ", "\udcff")))
    assert receipt.command == ("''", "'  '", "\\udcff")


def test_a_number_that_was_changed_is_found_by_the_hash_and_behind_it_by_the_samples(tmp_path: Path) -> None:
    receipt = make(tmp_path)
    path = tmp_path / "one.json"
    data = json.loads(path.read_text())
    data["points"][0]["output_tokens_per_s"] *= 1.2
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="it was changed after it was written"):
        find(tmp_path, "one")
    rewrite(path, points=data["points"])
    findings = verify(find(tmp_path, "one"), tmp_path)
    assert [finding.what for finding in findings] == ["c8: output_tokens_per_s is not what the samples say"]
    assert receipt.outcome == "whole"


def test_a_receipt_that_calls_itself_whole_is_not_believed(tmp_path: Path) -> None:
    def fill(recording: Recording) -> None:
        recording.add_point(Setup(name="c1", concurrency=1))
        recording.add("c1", 0, job(0), replace(answer(0, 0, 0.1, 0.01), outcome="void", reason="empty"))
        recording.add("c1", 0, job(1), answer(1, 1, 0.1, 0.01))

    make(tmp_path, fill=fill)
    rewrite(tmp_path / "one.json", outcome="whole", reasons=[])
    assert [finding.why for finding in verify(find(tmp_path, "one"), tmp_path)] == ["it is called whole"]


def test_samples_of_another_run_are_not_taken(tmp_path: Path) -> None:
    one, other = make(tmp_path, "one"), make(tmp_path, "other", seed=9)
    (tmp_path / one.samples.file).write_bytes((tmp_path / other.samples.file).read_bytes())
    (finding,) = verify(one, tmp_path)
    assert "their hash is not the one that the receipt states" in finding.why


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "there is no such file"),
        (b"\x1f\x8b", "damaged or cut off"),
        (b"no gzip", "damaged or cut off"),
        (gzip.compress(b"[]\n", mtime=0), "a line is no sample"),
        (gzip.compress(b'{"point": 1}\n', mtime=0), "a line is no sample"),
        (gzip.compress(b"[" * 100_000 + b"\n", mtime=0), "damaged or cut off"),
        (gzip.compress(bytes(80 << 20), mtime=0), "unpack to more than a run can have"),
        (gzip.compress(b"", mtime=0) + b"more", "something follows the last line"),
    ],
)
def test_samples_that_are_none(tmp_path: Path, content: bytes, says: str) -> None:
    receipt = make(tmp_path)
    path = tmp_path / receipt.samples.file
    path.unlink()
    if content:
        path.write_bytes(content)
    (finding,) = verify(receipt, tmp_path)
    assert says in finding.why


def test_samples_that_were_cut_off_at_any_byte_are_found(tmp_path: Path) -> None:
    receipt = make(tmp_path)
    path = tmp_path / receipt.samples.file
    whole = path.read_bytes()
    for end in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:end])
        with pytest.raises(Unreadable, match="damaged or cut off"):
            read_samples(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "it is empty"),
        ("{", "no JSON, or was cut off"),
        ("[]", "no JSON object"),
        ("[" * 100_000, "no JSON, or was cut off"),
        ('{"schema": NaN}', "NaN is no number"),
        ('{"schema": 1' + "0" * 5000 + "}", "no JSON, or was cut off"),
        ("\xff", "no JSON, or was cut off"),
        ('{"schema": 1e999}', "a number in it is too large"),
        ('{"schema": -1e999}', "a number in it is too large"),
        (r'{"schema": "\ud800"}', "no JSON, or was cut off"),
        (r'{"\uD800": 1}', "no JSON, or was cut off"),
        ('{"schema": ' + "[" * 64 + "]" * 64 + "}", "nested deeper than 64 levels"),
        ("{}", "no receipt of schema 1"),
        ('{"schema": 2, "sha256": "x"}', "no receipt of schema 1"),
        ('{"schema": 1, "sha256": "x"}', "it was changed after it was written"),
    ],
)
def test_files_that_are_no_receipts_get_a_sentence(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "odd.json").write_bytes(content.encode("latin-1"))
    make(tmp_path)
    receipts, (unusable,) = all_in(tmp_path)
    assert len(receipts) == 1
    assert unusable.name == "odd.json"
    assert says in unusable.problem
    with pytest.raises(UsageError, match="is no usable receipt"):
        find(tmp_path, "odd")


def test_every_beginning_of_a_receipt_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "one.json"
    text = path.read_text().rstrip("\n")
    for end in range(0, len(text), len(text) // 40):
        path.write_text(text[:end])
        with pytest.raises(Unreadable):
            receipt_file.read(path)


def test_links_pipes_folders_and_giants_are_no_receipts(tmp_path: Path) -> None:
    make(tmp_path / "elsewhere")
    (tmp_path / "link.json").symlink_to(tmp_path / "elsewhere" / "one.json")
    (tmp_path / "loop.json").symlink_to("loop.json")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    with open(tmp_path / "giant.json", "wb") as file:
        file.truncate(1 << 40)
    receipts, unusable = all_in(tmp_path)
    assert receipts == []
    assert {one.name: one.problem for one in unusable} == {
        "link.json": "it is a symbolic link",
        "loop.json": "it is a symbolic link",
        "pipe.json": "it is no plain file",
        "folder.json": "it is no plain file",
        "giant.json": f"larger than {receipt_file.LARGEST_BYTES} bytes",
    }


def test_a_receipt_of_another_shape_or_name_is_foreign(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "one.json"
    whole = path.read_text()
    for changes, says in (
        ({"extra": 1}, "unknown key extra"),
        ({"host": {}}, "host.id is missing"),
        ({"id": "two"}, "its file has another name"),
        ({"outcome": "void"}, "a receipt that is not whole says why"),
        ({"samples": json.loads(whole)["samples"] | {"file": "../../etc/passwd"}}, "a plain relative path"),
    ):
        path.write_text(whole)
        rewrite(path, **changes)
        _, (unusable,) = all_in(tmp_path)
        assert says in unusable.problem


def test_names_that_mean_nothing_or_too_much(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds none yet"):
        find(tmp_path, "one")
    make(tmp_path, "one-a")
    make(tmp_path, "one-b", seed=5)
    with pytest.raises(UsageError, match="one begins 2 ids"):
        find(tmp_path, "one")
    with pytest.raises(UsageError, match="there is no receipt ''"):
        find(tmp_path, "")
    assert HOST.id == find(tmp_path, "one-a").host.id
