"""What the doctor finds on each kind of machine, and how it prints it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from machine_support import machines

from slimserve.doctor import examine, render, to_json
from slimserve.machine import (
    GIB,
    Engine,
    Folder,
    Gpu,
    HugePages,
    Limits,
    Machine,
    NcclSetting,
    gib,
    load_machine,
)
from slimserve.preflight import concerns as findings
from slimserve.preflight.exchange import Outcome

MACHINES = Path(__file__).parent.parent / "machines"

# The beginning of each finding, in order.
FOUND = {
    "cpu-only": [],
    "rtx3090x8": [],
    "h200x2": [],
    "a100-40gb": [],
    "h200-mig-slice": [],
    "gpus-unreadable": ["GPUs cannot be read: nvmlInit failed: Driver/library version mismatch"],
    "h200-mig-card": ["MIG is on: GPU 0"],
    "rtx3090x3": [
        "no peer-to-peer access between any two GPUs",
        "the BAR1 window of GPU 0, 1, 2 is smaller than its memory: 256 MiB of 24.0 GiB",
    ],
    "rtx3090x8-busy": [
        "GPU 2 is in use: 21.1 GiB of 24.0 GiB are taken, by python3 (4711, 20.5 GiB)",
        "GPU 5 is in use: 15.2 GiB of 24.0 GiB are taken, and no process is seen",
    ],
    "mixed": [
        "the GPUs are not all alike: GPU 0, 1: NVIDIA GeForce RTX 3090, 24.0 GiB, capability 8.6; "
        "GPU 2: NVIDIA GeForce RTX 3060, 12.0 GiB",
        "no peer-to-peer access between any two GPUs",
    ],
    "container": [
        "no peer-to-peer access between any two GPUs",
        "the control group allows 48.0 GiB of RAM, and the machine has 256.0 GiB",
        "only 8 MiB of memory may be locked",
        "/dev/shm has 64 MiB",
        "the cache folder /var/cache/slimserve cannot be written to",
        "3.0 GiB of 100.0 GiB are free where the cache folder /var/cache/slimserve lies",
    ],
}


def load(name: str) -> Machine:
    return load_machine(MACHINES / f"{name}.yaml")


def changed(name: str, part: str, **values: Any) -> Machine:
    machine = load(name)
    return replace(machine, **{part: replace(getattr(machine, part), **values)})


def whats(machine: Machine) -> list[str]:
    return [finding.what for finding in findings(machine)]


def test_every_machine_file_is_judged() -> None:
    assert set(FOUND) == {path.stem for path in MACHINES.glob("*.yaml")}


@pytest.mark.parametrize(("name", "expected"), FOUND.items(), ids=FOUND.keys())
def test_what_is_found(name: str, expected: list[str]) -> None:
    found = whats(load(name))
    assert len(found) == len(expected)
    assert all(what.startswith(start) for what, start in zip(found, expected, strict=True))


def test_gpus_that_are_all_hidden_are_a_finding_and_some_are_not() -> None:
    none_left = replace(load("cpu-only"), hidden_gpus=2)
    assert whats(none_left) == ["all 2 GPUs are hidden by CUDA_VISIBLE_DEVICES"]
    assert whats(replace(load("rtx3090x8"), hidden_gpus=2)) == []


def test_only_several_gpus_need_shared_memory() -> None:
    small = {"shm_total_bytes": GIB, "shm_free_bytes": GIB}
    assert whats(changed("h200x2", "memory", **small)) == ["/dev/shm has 1.0 GiB"]
    assert whats(changed("a100-40gb", "memory", **small)) == []


def test_shared_memory_that_is_full() -> None:
    assert whats(changed("h200x2", "memory", shm_free_bytes=GIB)) == [
        "/dev/shm is nearly full: 1.0 GiB of 512.0 GiB are free"
    ]


def test_a_lock_limit_matters_only_with_gpus() -> None:
    assert whats(changed("a100-40gb", "memory", memlock_bytes=0)) == ["only 0.0 GiB of memory may be locked"]
    assert whats(changed("cpu-only", "memory", memlock_bytes=0)) == []


def test_a_group_limit_above_the_memory_is_none() -> None:
    assert whats(changed("cpu-only", "memory", cgroup_limit_bytes=999 * GIB, cgroup_used_bytes=0)) == []


def test_links_that_are_off_for_some_are_named_with_the_boot_parameters() -> None:
    machine = load("rtx3090x8")
    first = replace(machine.gpus[0], peers={**machine.gpus[0].peers, 3: "none"})
    machine = replace(machine, gpus=(first, *machine.gpus[1:]), kernel_parameters="iommu=on")
    assert whats(machine) == ["no peer-to-peer access between GPU 0 and 3; the kernel was started with iommu=on"]


def test_over_nvlink_the_window_does_not_matter() -> None:
    machine = load("h200x2")
    narrow: list[Gpu] = [replace(gpu, bar1_bytes=GIB) for gpu in machine.gpus]
    assert whats(replace(machine, gpus=tuple(narrow))) == []


def test_what_is_unknown_is_no_finding() -> None:
    machine = load("h200x2")
    update = {
        "bar1_bytes": None,
        "peers": {},
        "mig": "unknown",
        "numa_node": None,
        "pcie_width": None,
        "pcie_generation": None,
    }
    blank = replace(machine, gpus=tuple(replace(gpu, **update) for gpu in machine.gpus), driver=None)
    assert findings(blank) == ()
    text = render(blank, ())
    assert "MIG unknown" in text
    assert "None" not in text


def test_the_json_form_holds_the_findings_and_reads_back_as_the_machine(tmp_path: Path) -> None:
    machine = load("container")
    data = to_json(machine, findings(machine))
    assert [finding["what"] for finding in data["findings"]] == whats(machine)
    path = tmp_path / "m.json"
    path.write_text(json.dumps(data))
    assert replace(load_machine(path), source=machine.source) == machine


def test_what_the_test_of_the_gpus_found_is_said_and_is_no_fact_of_the_machine(tmp_path: Path) -> None:
    machine = load("h200x2")
    outcome = Outcome(gpus=("GPU 0", "GPU 1"), checked=40, wrong=("copy: 1 of 2 values are wrong",), seconds=12.34)
    text = render(machine, tuple(outcome.concerns()), outcome)
    assert "values exchanged\n  39 of 40 comparisons right on GPU 0, GPU 1, in 12.3 s\n" in text
    assert "values arrive wrong: copy: 1 of 2 values are wrong" in text
    assert "blocks: profiles on several GPUs" in text
    data = to_json(machine, tuple(outcome.concerns()), outcome)
    assert data["exchange"] == {"gpus": ["GPU 0", "GPU 1"], "checked": 40, "seconds": 12.3}
    assert data["findings"][0]["blocks"] == "profiles on several GPUs"
    path = tmp_path / "m.json"
    path.write_text(json.dumps(data))
    assert replace(load_machine(path), source=machine.source) == machine


def test_the_gpus_of_a_described_machine_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimserve.preflight.exchange.run", lambda *args: pytest.fail("tried"))
    machine = load("h200x2")
    assert examine(machine, here=False, environment={}).outcome is None


def test_those_with_room_are_tried_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = load("rtx3090x8-busy")
    full = [replace(gpu, free_bytes=0) if gpu.index == 2 else gpu for gpu in machine.gpus]
    tried: list[Any] = []

    def run(names: list[str], kind: str, environ: dict[str, str]) -> Outcome:
        tried.append((names, kind, environ["CUDA_VISIBLE_DEVICES"].split(",")))
        return Outcome(gpus=tuple(names), failure="it hangs")

    monkeypatch.setattr("slimserve.preflight.exchange.run", run)
    report = examine(replace(machine, gpus=tuple(full)), here=True, environment={"SLIMSERVE_STATE": str(tmp_path)})
    rest = [gpu for gpu in machine.gpus if gpu.index != 2]
    assert tried == [([f"GPU {gpu.index}" for gpu in rest], "cuda", [gpu.uuid for gpu in rest])]
    assert report.findings[-1].what == "it hangs"


def test_every_finding_says_why_and_what_to_do() -> None:
    for name in FOUND:
        for finding in findings(load(name)):
            assert finding.why
            assert finding.do
            assert finding.where == ""


def test_the_page() -> None:
    machine = load("container")
    text = render(machine, findings(machine))
    assert text == PAGE.format(
        source=machine.source, uuid0=machine.gpus[0].uuid, uuid1=machine.gpus[1].uuid, findings=all_lines(machine)
    )


def all_lines(machine: Machine) -> str:
    return "\n".join(f"  {line}" for finding in findings(machine) for line in str(finding).splitlines())


PAGE = """\
machine
  source        {source}
  system        Linux on x86_64
  processor     AMD EPYC 7532 32-Core Processor, 64 cores to use
  layout        2 sockets, 2 NUMA nodes
  vector units  avx2
  cache folder  /var/cache/slimserve (not writable)
  disk          3.0 GiB free of 100.0 GiB
  ports taken   22

memory
  RAM            240.0 GiB available of 256.0 GiB
  control group  6.0 GiB used of 48.0 GiB allowed
  usable         42.0 GiB
  lockable       8 MiB
  /dev/shm       64 MiB free of 64 MiB

GPUs
  driver 580.95.05, without peer access between GeForce cards
  0  NVIDIA GeForce RTX 3090  capability 8.6  23.6 GiB free of 24.0 GiB  PCIe 4 x16  BAR1 32.0 GiB  NUMA 0  {uuid0}
  1  NVIDIA GeForce RTX 3090  capability 8.6  23.6 GiB free of 24.0 GiB  PCIe 4 x16  BAR1 32.0 GiB  NUMA 1  {uuid1}

  from \\ to
     0     1
  0  -     none
  1  none  -

findings
{findings}
"""


def test_what_is_known_of_a_machine_is_shown() -> None:
    machine = load("rtx3090x8")
    card = replace(
        machine.gpus[0],
        pcie_width=8,
        pcie_width_max=16,
        pcie_generation_card=5,
        pcie_generation_now=1,
        iommu="passthrough",
        acs="off",
        persistence=False,
        clock_mhz=210,
        clock_max_mhz=2100,
        throttled_by=("heat",),
    )
    machine = replace(
        machine,
        gpus=(card, *machine.gpus[1:]),
        driver_module="open",
        limits=Limits(open_files=1024, tasks=None),
        folders=(Folder(purpose="logs", path="/srv", variable="SLIMSERVE_STATE", writable=False, free_bytes=0),),
        nccl=(NcclSetting(name="NCCL_DEBUG", value="WARN", source="the environment"),),
        engines=(Engine(profile="tiny", port=8000, lost=True),),
        memory=replace(machine.memory, huge_pages=HugePages(reserved_bytes=GIB, free_bytes=0, transparent="never")),
        disk=replace(machine.disk, executable=False),
    )
    text = render(machine, ())
    for part in (
        "driver 580.95.05, open kernel module, changed to allow peer access between GeForce cards",
        "PCIe 4 x8 (x16, card 5, now 1)",
        "IOMMU passthrough",
        "ACS off",
        "210 of 2100 MHz, held by heat",
        "not persistent",
        "1,024 open files, unlimited tasks",
        "SLIMSERVE_STATE  /srv (not writable)",
        "WARN (in the environment)",
        "tiny, port 8000, lost",
        "0.0 GiB free of 1.0 GiB reserved; transparent ones: never",
        "/var/cache/slimserve (noexec)",
    ):
        assert part in text


def test_a_machine_without_gpus_and_without_faults() -> None:
    text = render(load("cpu-only"), ())
    assert "GPUs\n  none\n" in text
    assert text.endswith("findings\n  nothing is wrong\n")


def test_gpus_that_could_not_be_read_are_not_called_none() -> None:
    assert "GPUs\n  none could be read\n" in render(load("gpus-unreadable"), ())


@given(machines())
def test_every_machine_can_be_judged_and_printed(machine: Machine) -> None:
    text = render(machine, findings(machine))
    assert text.endswith("\n")
    assert all(line == line.rstrip() and (line.isprintable() or not line) for line in text.split("\n"))


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.0 GiB"), (8 << 20, "8 MiB"), (GIB - 1, "1024 MiB"), (GIB, "1.0 GiB"), (24 * GIB, "24.0 GiB")],
)
def test_sizes(size: int, text: str) -> None:
    assert gib(size) == text
