"""The machine's facts: what a file may say, what it may not, and that writing and reading are inverse."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from machine_support import machines

from slimserve.errors import RegistryError
from slimserve.machine import GIB, Machine, Memory, load_machine
from slimserve.shapes import plain

MACHINES = Path(__file__).parent.parent / "machines"
FILES = sorted(MACHINES.glob("*.yaml"))


def read_back(text: str) -> Machine:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.yaml"
        path.write_text(text, encoding="utf-8")
        return load_machine(path)


@given(machines())
def test_the_json_form_reads_back_equal(machine: Machine) -> None:
    text = json.dumps(plain(machine), ensure_ascii=False)
    assert replace(read_back(text), source=machine.source) == machine


@given(machines())
def test_what_is_usable_is_never_more_than_any_limit(machine: Machine) -> None:
    memory = machine.memory
    assert 0 <= memory.usable_bytes <= memory.available_bytes <= memory.total_bytes
    if memory.cgroup_limit_bytes is not None:
        assert memory.usable_bytes <= memory.cgroup_limit_bytes


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_machine_file_of_the_tests_is_valid(path: Path) -> None:
    machine = load_machine(path)
    assert machine.source == str(path)
    assert machine.system == "Linux"


def test_usable_memory_is_the_least() -> None:
    def memory(**values: Any) -> Memory:
        base: dict[str, Any] = {"total_bytes": 64 * GIB, "available_bytes": 60 * GIB, "memlock_bytes": None}
        base |= {"shm_total_bytes": 0, "shm_free_bytes": 0, "cgroup_limit_bytes": None, "cgroup_used_bytes": None}
        return Memory(**(base | values))

    assert memory().usable_bytes == 60 * GIB
    assert memory(cgroup_limit_bytes=32 * GIB, cgroup_used_bytes=2 * GIB).usable_bytes == 30 * GIB
    assert memory(cgroup_limit_bytes=99 * GIB, cgroup_used_bytes=0).usable_bytes == 60 * GIB
    assert memory(cgroup_limit_bytes=GIB, cgroup_used_bytes=2 * GIB).usable_bytes == 0


GOOD = (MACHINES / "rtx3090x3.yaml").read_text()

LIES = {
    "free above total": (
        "free_bytes: 25386024960",
        "free_bytes: 99386024960",
        "free_bytes = 99386024960 is more than memory_bytes",
    ),
    "available above total": (
        "total_bytes: 137438953472",
        "total_bytes: 1",
        "available_bytes = 124554051584 is more than total_bytes = 1",
    ),
    "negative": ("memory_bytes: 25769803776", "memory_bytes: -1", "gpus[0].memory_bytes = -1"),
    "no memory": ("memory_bytes: 25769803776", "memory_bytes: 0", "gpus[0].memory_bytes = 0"),
    "absurd memory": ("memory_bytes: 25769803776", "memory_bytes: 9999999999999999999999", "gpus[0].memory_bytes"),
    "a capability without a point": ('capability: "8.6"', 'capability: "86"', "gpus[0].capability"),
    "a capability as a number": ('capability: "8.6"', "capability: 8.6", "gpus[0].capability"),
    "one UUID twice": (
        "GPU-0cb1e29c-658c-da14-95e6-0af593bd04cf",
        "GPU-0fd630f1-f29d-0da9-953f-48f1a09f76b5",
        "uuid GPU-0fd630f1-f29d-0da9-953f-48f1a09f76b5 is given to more",
    ),
    "a peer that is not there": ('1: "none"', '7: "none"', "peers of GPU 0 names GPU 7"),
    "a peer that is itself": ('1: "none"', '0: "none"', "peers names the GPU itself, 0"),
    "an unknown link": ('1: "none"', '1: "nvlnk"', "nvlnk"),
    "an unknown key": ("pcie_width: 16", "pcie_widht: 16", "did you mean pcie_width"),
    "a lacking field": ('  mig: "off"\n', "", "gpus[0].mig is missing"),
    "half a control group": ("cgroup_limit_bytes: null", "cgroup_limit_bytes: 1000", "belong together"),
    "a text for a number": ("cores: 64", 'cores: "64"', "cpu.cores"),
    "a number for a truth": ("writable: true", "writable: 1", "disk.writable"),
    "no cores": ("cores: 64", "cores: 0", "cpu.cores"),
    "a port that is none": ("- 22\n", "- 70000\n", "listening_ports"),
    "a control sequence": ('name: "NVIDIA', 'name: "\\e[2JNVIDIA', "cannot be printed"),
}


@pytest.mark.parametrize(("old", "new", "said"), LIES.values(), ids=LIES.keys())
def test_a_file_that_lies_is_refused_by_name_and_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    path = tmp_path / "m.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(RegistryError) as caught:
        load_machine(path)
    assert said in str(caught.value)
    assert all(finding.where.startswith(f"{path}:") for finding in caught.value.findings)
    assert caught.value.exit_code == 2


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(GOOD.replace("cores: 64", "cores: 0").replace("writable: true", "writable: maybe"))
    with pytest.raises(RegistryError) as caught:
        load_machine(path)
    assert len(caught.value.findings) == 2


@pytest.mark.parametrize("field", ["memlock_bytes", "cgroup_limit_bytes", "total_bytes", "gpus", "cpu", "system"])
def test_no_fact_is_assumed_for_a_field_that_is_lacking(field: str) -> None:
    data = plain(load_machine(MACHINES / "cpu-only.yaml"))
    for part in (data, data["memory"]):
        part.pop(field, None)
    with pytest.raises(RegistryError, match=f"{field} is missing"):
        read_back(json.dumps(data))


def test_a_file_that_is_not_there_is_an_error_of_the_registry(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"m\.yaml"):
        load_machine(tmp_path / "m.yaml")


def test_two_gpus_of_one_number_are_refused() -> None:
    machine = load_machine(MACHINES / "mixed.yaml")
    alike = [replace(gpu, index=3, peers={}) for gpu in machine.gpus]
    with pytest.raises(ValueError, match="index 3 is given to more than one GPU"):
        replace(machine, gpus=tuple(alike))


def test_a_machine_is_frozen() -> None:
    machine = load_machine(MACHINES / "rtx3090x8.yaml")
    with pytest.raises(FrozenInstanceError):
        machine.driver = "1"  # type: ignore[misc]


def test_a_pair_that_nobody_read_is_unknown() -> None:
    machine = load_machine(MACHINES / "rtx3090x3.yaml")
    stranger = load_machine(MACHINES / "rtx3090x8.yaml").gpus[7]
    assert machine.gpus[0].link(machine.gpus[1]) == "none"
    assert machine.gpus[0].link(stranger) == "unknown"


def test_a_path_with_odd_bytes_is_shown_and_does_not_fail(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"m\x1b\xff.yaml")
    path.write_text(GOOD)
    assert load_machine(path).source == str(tmp_path / "m??.yaml")
