"""The start record as a file that anything may have been written into, and whom it may name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from slimserve.engine import procfs, record
from slimserve.engine.record import RunFolder, StartRecord, leftovers

GOOD = StartRecord("p", 8000, 4242, 7, "tag", 4241, 6, ("serve", "x"), "/tmp/slimserve-abcdefgh")
# A leader that starts a child in its session, tells the child's pid, and ends; the child ends with its stdin.
LEADER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
"""


def write(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps({**asdict(GOOD), **changes}))
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", tmp_path / "run/engine.sock")
    folder.prepare()
    folder.write(GOOD)
    assert record.read(tmp_path / "run" / record.FILE_NAME) == GOOD


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": -1},
        {"pid": 0},
        {"pid": 1},
        {"pid": "4242"},
        {"pid": 4242.0},
        {"pid": True},
        {"pid": 10**400},
        {"start_ticks": "7"},
        {"start_ticks": None},
        {"supervisor_pid": [4241]},
        {"port": -1},
        {"port": "8000"},
        {"tag": ""},
        {"tag": 5},
        {"tag": "a\u0000b"},
        {"profile_id": {}},
        {"argv": "serve"},
        {"argv": [1]},
        {"boot": 3},
        {"scratch": "/home/somebody"},
        {"scratch": "slimserve-x"},
        {"scratch": "/tmp/slimserve-x/.."},
        {"extra": 1},
    ],
)
def test_a_record_with_a_wrong_value_is_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write(tmp_path / "engine.json", **changes)
    assert record.read(path) is None


@pytest.mark.parametrize("name", list(asdict(GOOD)))
def test_a_record_that_lacks_a_key_is_none(tmp_path: Path, name: str) -> None:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({key: value for key, value in asdict(GOOD).items() if key != name}))
    assert record.read(path) is None


@pytest.mark.parametrize("raw", [b"", b"3", b"null", b'"boot"', b'["boot"]', b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_record_is_none(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "engine.json"
    path.write_bytes(raw)
    assert record.read(path) is None


def test_another_users_word_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "engine.json")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert record.read(path) is None


def test_only_a_regular_file_is_read_and_nothing_is_waited_for(tmp_path: Path) -> None:
    good = write(tmp_path / "good.json")
    assert record.read(good) == GOOD
    (tmp_path / "link.json").symlink_to(good)
    assert record.read(tmp_path / "link.json") is None
    (tmp_path / "folder.json").mkdir()
    assert record.read(tmp_path / "folder.json") is None
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / record.FILE_NAME)
    # In a process of its own: an open that waits for a writer would hold the tests up.
    code = (
        "import pathlib, sys; from slimserve.engine import record; print(record.leftovers(pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=20)
    assert done.stdout == "[]\n", done.stderr


@contextmanager
def orphan(tag: str) -> Iterator[tuple[int, int]]:
    """A session whose leader is gone and reaped; yields its number and the pid of the process that is left in it."""
    leader = subprocess.Popen(
        [sys.executable, "-S", "-c", LEADER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={procfs.TAG: tag},
        text=True,
    )
    with leader:
        assert leader.stdout is not None
        child = int(leader.stdout.readline())
        leader.wait(10)
        try:
            yield leader.pid, child
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("tag", ["ours", "a-strangers"])
def test_when_the_leader_is_gone_only_the_tag_tells_the_engine_s(tmp_path: Path, tag: str) -> None:
    (tmp_path / "run").mkdir()
    with orphan(tag) as (session, child):
        found = procfs.read(child)
        assert found is not None
        assert found.session == session
        own = procfs.read(os.getpid())
        assert own is not None
        path = write(
            tmp_path / "run" / record.FILE_NAME,
            pid=session,
            tag="ours",
            supervisor_pid=own.pid,
            supervisor_start_ticks=own.start_ticks - 1,
        )
        named = [process.pid for leftover in leftovers(tmp_path) for process in leftover.processes]
        assert named == ([child] if tag == "ours" else [])
        assert path.exists() is (tag == "ours")
