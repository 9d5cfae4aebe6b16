"""The ranks themselves, with gloo on the CPU: right values pass, and one that is wrong, hangs or dies is named."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slimserve.preflight import exchange, rank
from slimserve.preflight.exchange import Outcome

# What a rank that something is wrong with runs in the place of the real one. Small sizes: arithmetic is not on trial.
DRIVER = """
import os, sys, time
import torch, torch.distributed as dist
from slimserve.preflight import rank
rank.SIZES, rank.COPY_BYTES, rank.PINNED_BYTES = (1, 1000), 5003, 5003
SECOND = sys.argv[sys.argv.index("--rank") + 1] == "1"
real_sum, real_compare = dist.all_reduce, rank.Check._compare
{fault}
rank.main()
"""
# Whether it is the value that arrives, the exchange, or the process.
A_SUM = """
def all_reduce(mine):
    real_sum(mine)
    if SECOND and mine.dtype is torch.bfloat16 and mine.numel() == 1000:
        mine[7] = torch.nan
dist.all_reduce = all_reduce
"""
A_BIT = """
def compare(self, what, found, wanted):
    if "{step}" in what:
        found[5002] ^= 1
    real_compare(self, what, found, wanted)
rank.Check._compare = compare
"""
# With a file for each rank that has come so far.
A_HANG = """
def all_reduce(mine):
    if mine.numel() == 1000:
        open(__file__ + str(SECOND), "w").close()
        if SECOND:
            time.sleep(600)
    real_sum(mine)
dist.all_reduce = all_reduce
"""
# The first rank copies, and the second has come to the end.
A_HUNG_COPY = """
def compare(self, what, found, wanted):
    if what == "copy from GPU 1 to GPU 0":
        open(__file__ + str(SECOND), "w").close()
        time.sleep(600)
    real_compare(self, what, found, wanted)
def barrier():
    open(__file__ + str(SECOND), "w").close()
    real_barrier()
real_barrier, dist.barrier = dist.barrier, barrier
rank.Check._compare = compare
"""
A_DEATH = A_HANG.replace("time.sleep(600)", "sys.stderr.write('out of luck'); sys.stderr.flush(); os._exit(7)")
NAMES = ("GPU 0", "GPU 1")


torch = pytest.importorskip("torch")


def run(tmp_path: Path, fault: str, ranks: int = 2, look: Callable[[], None] = lambda: None) -> Outcome:
    path = tmp_path / "driver.py"
    path.write_text(DRIVER.format(fault=fault))
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return exchange.run(NAMES[:ranks], "cpu", environ, look, (sys.executable, str(path)), 240.0)


def test_right_values_pass_with_the_real_command_and_sizes() -> None:
    outcome = exchange.run(NAMES, "cpu", {**os.environ, "OMP_NUM_THREADS": "1"}, seconds=240.0)
    assert (outcome.wrong, outcome.failure) == ((), "")
    # A rank: a round trip, and sums of two types, four sizes, two turns; then both ways, sent and copied.
    assert outcome.checked == 2 * (1 + 2 * 4 * 2) + 2 + 2


def test_an_engine_for_cpus_tries_no_gpu() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is for GPUs")
    outcome = exchange.run(NAMES[:1], "cuda", {**os.environ, "OMP_NUM_THREADS": "1"}, seconds=240.0)
    assert outcome.lacks == f"torch {torch.__version__} is built without CUDA"


@pytest.mark.parametrize("world", [2, 3, 8, 16, 64])
def test_sums_are_exact_in_any_order_and_differ_from_place_to_place(world: int) -> None:
    parts = [rank.pattern(number, world, 1000, 1, "cpu") for number in range(world)]
    exact = torch.stack(parts).sum(0)
    rounded = torch.zeros(1000, dtype=torch.bfloat16)
    for part in reversed(parts):
        rounded += part.to(torch.bfloat16)
    assert torch.equal(rounded.float(), exact)
    assert exact.max() < rank.EXACT
    assert not torch.equal(parts[0], parts[1])
    assert not torch.equal(parts[0], rank.pattern(0, world, 1000, 0, "cpu"))


def test_one_rank_alone_tries_pinned_memory() -> None:
    outcome = exchange.run(NAMES[:1], "cpu", {**os.environ, "OMP_NUM_THREADS": "1"}, seconds=240.0)
    assert (outcome.checked, outcome.wrong, outcome.failure) == (1, (), "")


def test_a_sum_that_is_wrong_on_one_rank_is_named(tmp_path: Path) -> None:
    outcome = run(tmp_path, A_SUM)
    assert outcome.failure == ""
    assert len(outcome.wrong) == 2  # in both turns
    assert outcome.wrong[0].startswith(
        "all-reduce of 1,000 bfloat16 on GPU 1: 1 of 1,000 values are wrong, the first at 7"
    )
    assert "nan in the place of " in outcome.wrong[0]


@pytest.mark.parametrize(
    ("step", "ranks"), [("send from GPU 1 to GPU 0", 2), ("copy from GPU 0 to GPU 1", 2), ("to GPU 0 and back", 1)]
)
def test_a_bit_that_is_wrong_is_named_with_its_way(tmp_path: Path, step: str, ranks: int) -> None:
    outcome = run(tmp_path, A_BIT.format(step=step), ranks=ranks)
    assert outcome.failure == ""
    assert len(outcome.wrong) == 1
    assert step in outcome.wrong[0]
    assert "1 of 5,003 values are wrong, the first at 5,002" in outcome.wrong[0]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (A_HANG, "GPU 0, GPU 1 in: all-reduce of 1,000 float32"),
        (A_HUNG_COPY, "GPU 0 in: copy from GPU 1 to GPU 0"),
    ],
    ids=["sum", "copy"],
)
def test_a_rank_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, said: str) -> None:
    now, looks = time.monotonic, 0

    def look() -> None:
        # Between two looks what the ranks have said is read; then the deadline is over, without waiting for it.
        nonlocal looks
        looks += len(list(tmp_path.iterdir())) == 3
        if looks == 2:
            monkeypatch.setattr(time, "monotonic", lambda: now() + 1000.0)

    outcome = run(tmp_path, fault, look=look)
    assert outcome.failure == f"the exchange of values hangs: not done after 240 s, {said}"


def test_a_rank_that_dies_in_a_sum_is_named_with_its_last_words(tmp_path: Path) -> None:
    outcome = run(tmp_path, A_DEATH)
    assert "GPU" in outcome.failure
    assert "in: all-reduce of 1,000 float32" in outcome.failure
