"""The test of what GPUs exchange, seen from outside: ranks that are wrong, hang, die, talk nonsense or do not start."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from slimserve.engine import procfs
from slimserve.machine import Gpu
from slimserve.preflight import exchange
from slimserve.preflight.exchange import Outcome
from slimserve.preflight.rank import _pairs

# What every scripted rank begins with: its pid is left in the folder PIDS, and NUMBER is its rank.
START = """
import json, os, pathlib, signal, subprocess, sys, time
NUMBER = int(sys.argv[sys.argv.index("--rank") + 1])
pathlib.Path(os.environ["PIDS"], str(NUMBER)).write_text(str(os.getpid()))
def put(**line):
    print(json.dumps(line), flush=True)
def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
"""
DONE = 'put(done={"checked": 3, "wrong": []})\nsys.stdin.read()\n'


def run(folder: Path, script: str, ranks: int = 2, seconds: float = 120.0, **values: Any) -> Outcome:
    """The outcome with scripted ranks; none of their processes is left."""
    command = (sys.executable, "-S", "-c", START + script)
    names = [f"GPU {number}" for number in range(ranks)]
    try:
        return exchange.run(names, "cpu", {"PIDS": str(folder)}, command=command, seconds=seconds, **values)
    finally:
        for path in folder.iterdir():
            process = procfs.read(int(path.read_text()))
            assert process is None or not process.alive, f"{path.name} still lives"


def what(outcome: Outcome) -> str:
    (concern,) = outcome.concerns()
    return concern.what


def test_what_all_ranks_found_is_counted(tmp_path: Path) -> None:
    outcome = run(tmp_path, 'put(step=1, at="load torch")\n' + DONE)
    assert (outcome.checked, outcome.wrong, outcome.failure) == (6, (), "")
    assert list(outcome.concerns()) == []


def test_a_wrong_value_is_a_finding_that_blocks(tmp_path: Path) -> None:
    script = (
        'put(done={"checked": 3, "wrong": ["copy from GPU 1 to GPU 0: 1 of 4"] if NUMBER else []})\nsys.stdin.read()'
    )
    outcome = run(tmp_path, script)
    assert what(outcome) == "values arrive wrong: copy from GPU 1 to GPU 0: 1 of 4"
    assert next(outcome.concerns()).blocks == "profiles on several GPUs"
    assert str(outcome).startswith("5 of 6 comparisons right on GPU 0, GPU 1, in ")


def test_of_many_wrong_values_the_first_are_named() -> None:
    outcome = Outcome(gpus=("GPU 0",), checked=9, wrong=tuple("abcde"))
    assert what(outcome) == "values arrive wrong: a; b; c, and 2 more"
    assert next(outcome.concerns()).blocks == "profiles on GPUs"


def test_of_a_hang_the_rank_is_named_that_keeps_the_others_waiting(tmp_path: Path) -> None:
    script = """
put(step=4, at="copy from GPU 0 to GPU 1")
if NUMBER == 0:
    hang()
put(step=5, at="wait for the others")
hang()
"""
    outcome = run(tmp_path, script, ranks=3, seconds=3.0)
    assert outcome.failure == "the exchange of values hangs: not done after 3 s, GPU 0 in: copy from GPU 0 to GPU 1"
    assert next(outcome.concerns()).blocks == "profiles on several GPUs"


def test_where_all_hang_all_are_named(tmp_path: Path) -> None:
    outcome = run(tmp_path, 'put(step=3, at="meet")\nhang()', seconds=3.0)
    assert outcome.failure == "the exchange of values hangs: not done after 3 s, GPU 0, GPU 1 in: meet"


def test_a_rank_that_was_done_is_not_called_hung(tmp_path: Path) -> None:
    script = 'put(step=3, at="meet")\nif NUMBER:\n    hang()\n' + DONE
    outcome = run(tmp_path, script, seconds=3.0)
    assert outcome.failure.endswith("GPU 1 in: meet")
    assert outcome.checked == 3


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit('no room\\n on the card')", "ended with code 1 in: meet; it said: no room / on the card"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV in: meet"),
        ("sys.exit(0)", "ended with code 0 in: meet"),
        ("print('\\x1b[2J', file=sys.stderr); sys.exit(3)", "ended with code 3 in: meet; it said: ?[2J"),
    ],
)
def test_a_rank_that_dies_ends_the_test_at_once(tmp_path: Path, end: str, said: str) -> None:
    outcome = run(tmp_path, f'put(step=3, at="meet")\nif NUMBER == 1:\n    {end}\nhang()')
    assert outcome.failure == f"the process of GPU 1 {said}"


def test_a_rank_that_has_no_output_left_and_does_not_end_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_END_SECONDS", 0.1)
    outcome = run(tmp_path, 'put(step=3, at="meet")\nif NUMBER == 1:\n    os.close(1)\nhang()')
    assert outcome.failure == "the process of GPU 1 closed its output and does not end, in: meet"


def test_an_error_of_a_rank_is_said_though_what_is_loaded_would_not_let_it_end(tmp_path: Path) -> None:
    script = """
import atexit, site
site.main()
from slimserve.preflight import rank
def run(self, store, seconds):
    self.note("meet")
    atexit.register(time.sleep, 600)
    raise RuntimeError("no way to GPU 1")
rank.Check.run = run
rank.main()
"""
    outcome = run(tmp_path, script, ranks=1, seconds=60.0)
    assert outcome.failure.startswith("the process of GPU 0 ended with code 1 in: meet; it said: ")
    assert outcome.failure.endswith("RuntimeError: no way to GPU 1")


def test_where_nothing_can_be_tried_nothing_is_blocked(tmp_path: Path) -> None:
    outcome = run(tmp_path, 'put(step=1, at="load torch")\nput(lacks="torch is not installed")\n' + "hang()")
    assert what(outcome) == "the values that GPUs exchange were not compared: torch is not installed"
    assert next(outcome.concerns()).blocks == "nothing"
    assert (outcome.failure, outcome.checked) == ("", 0)
    assert str(outcome).startswith("nothing was compared on GPU 0, GPU 1")


def test_nonsense_between_the_lines_does_no_harm(tmp_path: Path) -> None:
    script = "print('hello'); print('[1]'); print('{'); sys.stdout.write('{\"at\": ')\nprint('\"x\", \"step\": 1}')\n"
    assert run(tmp_path, script + DONE).checked == 6


def test_a_command_that_cannot_be_run_is_said(tmp_path: Path) -> None:
    outcome = exchange.run(["GPU 0"], "cpu", {}, command=(str(tmp_path / "nowhere"),))
    assert outcome.failure == "the values that GPUs exchange cannot be compared: No such file or directory"


def test_a_folder_that_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    outcome = exchange.run(["GPU 0"], "cpu", {})
    assert outcome.failure == "the values that GPUs exchange cannot be compared: No such file or directory"


class Enough(BaseException):
    """Not an error, as an interruption is none."""


def test_who_does_not_want_to_wait_leaves_nothing_behind(tmp_path: Path) -> None:
    def look() -> None:
        if len(list(tmp_path.iterdir())) == 2:
            raise Enough

    with pytest.raises(Enough):
        run(tmp_path, "hang()", look=look)


def test_what_a_rank_has_started_ends_with_it(tmp_path: Path) -> None:
    script = (
        """
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
pathlib.Path(os.environ["PIDS"], f"child-{NUMBER}").write_text(str(child.pid))
"""
        + DONE
    )
    pids: list[int] = []

    def look() -> None:
        pids[:] = [int(path.read_text() or 0) for path in tmp_path.glob("child-*")]

    command = (sys.executable, "-S", "-c", START + script)
    exchange.run(["GPU 0"], "cpu", {"PIDS": str(tmp_path)}, look, command)
    child = int((tmp_path / "child-0").read_text())
    until(lambda: (process := procfs.read(child)) is None or not process.alive)


def test_every_pair_is_tried_both_ways() -> None:
    assert list(_pairs(3)) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]


def gpu(index: int, free: int, mig: Any = "off") -> Gpu:
    return Gpu(
        index=index,
        name="card",
        uuid=f"GPU-{index}",
        capability="8.6",
        memory_bytes=24 << 30,
        free_bytes=free,
        mig=mig,
    )


def test_full_and_cut_cards_are_not_tried() -> None:
    cards = [gpu(0, 24 << 30), gpu(1, 1 << 30), gpu(2, 24 << 30, "on"), gpu(3, 24 << 30, "instance")]
    assert [card.index for card in exchange.roomy(cards)] == [0, 3]


def test_the_ranks_are_given_what_an_engine_is_given() -> None:
    user = {"PATH": "/bin", "NCCL_P2P_DISABLE": "1", "SECRET": "x", "TMPDIR": "/scratch"}
    given = exchange.environment([gpu(1, 0), gpu(0, 0)], user, {"NCCL_P2P_LEVEL": "SYS"})
    assert given == {
        "PATH": "/bin",
        "NCCL_P2P_LEVEL": "SYS",
        "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-0",
        "TMPDIR": "/scratch",
    }
    assert os.environ.get("PATH") in exchange.environment([], os.environ).values()
