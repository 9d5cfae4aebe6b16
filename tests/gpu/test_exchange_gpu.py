"""What GPUs exchange arrives: on the GPUs of this machine, by the collectives that the engine uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slimserve.machine import Gpu
from slimserve.preflight import exchange
from slimserve.probe import read_machine


@pytest.fixture(scope="module")
def gpus() -> tuple[Gpu, ...]:
    found = exchange.roomy(read_machine(Path("/tmp"), os.environ).gpus)
    if not found:
        pytest.skip("no GPU here has room")
    return found


def check(gpus: tuple[Gpu, ...]) -> None:
    names = [exchange.name(gpu) for gpu in gpus]
    outcome = exchange.run(names, "cuda", exchange.environment(gpus, os.environ))
    assert (outcome.wrong, outcome.failure) == ((), "")
    count = len(gpus)
    assert outcome.checked == (1 if count == 1 else count * (1 + 2 * 4 * 2) + 2 * count * (count - 1))
    print(outcome)


def test_one_gpu_and_host_memory(gpus: tuple[Gpu, ...]) -> None:
    check(gpus[:1])


def test_all_gpus(gpus: tuple[Gpu, ...]) -> None:
    if len(gpus) < 2:
        pytest.skip(f"{len(gpus)} GPU has room here, and two exchange something")
    check(gpus)
