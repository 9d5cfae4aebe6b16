"""What a run that is killed leaves: everything but the load that was under way, and its name in `--receipts`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from bench_support import command, written
from harness_support import ModelServer
from receipts_support import FACTS, Pace, measure
from waiting import until

from harness import journal
from harness.raw import read_unfinished
from harness.receipt import all_in
from harness.recording import Recording
from slimserve.errors import Failed

ROOT = Path(__file__).parents[2]


def listed(environment: dict[str, str]) -> tuple[str, dict[str, str]]:
    """What `--receipts` says, and what it says of runs without a receipt."""
    words = [sys.executable, "-m", "slimserve", "--receipts"]
    texts = [
        subprocess.run([*words, *more], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
        for more in ((), ("--json",))
    ]
    assert [one.returncode for one in texts] == [0, 0]
    return texts[0].stdout, {one["file"]: one["problem"] for one in json.loads(texts[1].stdout)["unfinished"]}


def test_a_run_that_is_killed_loses_the_load_under_way_alone(tmp_path: Path) -> None:
    loaded = written(tmp_path)
    with ModelServer(interval=0.2) as server:
        against = ("--against", server.url, "--model", "fake")
        workload = str(tmp_path / f"{loaded.workload.id}.yaml")
        argv, environment, receipts = command(tmp_path, "--workload", workload, *against)
        running = subprocess.Popen(
            argv, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        (path,) = until(lambda: list(receipts.glob(f"*{journal.SUFFIX}")))
        until(lambda: read_unfinished(path))
        assert listed(environment)[1] == {path.name: "a run that is under way writes it"}
        running.send_signal(signal.SIGKILL)
        running.communicate(timeout=60)
    assert all_in(receipts) == ([], [])
    counts = Counter((raw.point, raw.round) for raw in read_unfinished(path) if raw.measured)
    # Each load is there whole, or not at all.
    assert counts.pop(("c2", 0)) == 4
    assert all(count == {"c2": 4, "r2.5": 3}[point] for (point, _), count in counts.items())
    text, unfinished = listed(environment)
    assert unfinished[path.name].startswith("its run was killed and proves nothing; zcat shows its requests: 4 of c2")
    assert f"{path.name}  is no receipt: its run was killed" in text
    shown = subprocess.run(["zcat", str(path)], capture_output=True, text=True)
    assert json.loads(shown.stdout.splitlines()[0])["point"] == "c2"


def test_the_journal_of_a_run_with_a_receipt_is_gone(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "one")
    for seed in range(2):
        measure(recording, seed, Pace(), concurrency=8 + seed)
        recording.save()
    (path,) = tmp_path.iterdir()
    assert path.name == f"one{journal.SUFFIX}"
    assert len(read_unfinished(path)) == 96 + 108
    recording.close("whole", (), FACTS)
    assert {each.name for each in tmp_path.iterdir()} == {"one.json", "one.samples.gz"}
    assert journal.left(tmp_path) == []


def test_a_receipt_that_cannot_be_written_leaves_the_journal(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "one")
    measure(recording, 1, Pace())
    recording.save()
    (tmp_path / "one.json").write_text("{}")
    with pytest.raises(Failed, match=r"one\.unfinished\.gz has what was measured"):
        recording.close("whole", (), FACTS)
    assert len(read_unfinished(tmp_path / f"one{journal.SUFFIX}")) == 96


def test_a_journal_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / f"one{journal.SUFFIX}").touch()
    recording = Recording(tmp_path, "one")
    measure(recording, 1, Pace())
    with pytest.raises(Failed, match=r"what was measured cannot be kept in .*: File exists"):
        recording.save()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "its run was killed and proves nothing; zcat shows its requests: none"),
        (b"no gzip at all", "its run was killed, and the samples are damaged or cut off"),
    ],
)
def test_whatever_lies_there_gets_a_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / f"one{journal.SUFFIX}").write_bytes(content)
    (told,) = journal.left(tmp_path)
    assert told.problem.startswith(says)


def test_links_and_pipes_are_told_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / f"link{journal.SUFFIX}").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / f"pipe{journal.SUFFIX}")
    assert [told.problem for told in journal.left(tmp_path)] == [
        "its run was killed, and it is a symbolic link",
        "its run was killed, and it is no plain file",
    ]


def test_a_journal_that_was_cut_off_at_any_byte_gives_what_is_left_of_it(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "one")
    sizes = []
    path = tmp_path / f"one{journal.SUFFIX}"
    for seed in range(3):
        measure(recording, seed, Pace(), concurrency=2 + seed)
        recording.save()
        sizes.append((path.stat().st_size, len(read_unfinished(path))))
    whole = path.read_bytes()
    for end in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:end])
        found = len(read_unfinished(path))
        assert found >= max((count for size, count in sizes if size <= end), default=0)
