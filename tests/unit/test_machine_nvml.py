"""What becomes of the driver's answers: whole, half and none, each failure named and nothing made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nvml_fake import MIB, Card, FakeNvml

from slimserve.probe.gpus import GpuReading, cards_on_bus, driver_present, read_gpus, reading
from slimserve.probe.nvml import read

OPTIONAL = [
    ("nvmlDeviceGetBAR1MemoryInfo", "bar1_bytes", None),
    ("nvmlDeviceGetMaxPcieLinkGeneration", "pcie_generation", None),
    ("nvmlDeviceGetCurrPcieLinkWidth", "pcie_width", None),
    ("nvmlDeviceGetPciInfo", "numa_node", None),
    ("nvmlDeviceGetMaxPcieLinkWidth", "pcie_width_max", None),
    ("nvmlDeviceGetCurrPcieLinkGeneration", "pcie_generation_now", None),
    ("nvmlDeviceGetGpuMaxPcieLinkGeneration", "pcie_generation_card", None),
    ("nvmlDeviceGetPersistenceMode", "persistence", None),
    ("nvmlDeviceGetClockInfo", "clock_mhz", None),
    ("nvmlDeviceGetMaxClockInfo", "clock_max_mhz", None),
    ("nvmlDeviceGetCurrentClocksEventReasons", "throttled_by", None),
    ("nvmlDeviceGetMigMode", "mig", "unknown"),
    ("nvmlDeviceGetP2PStatus", "peers", {0: "unknown"}),
    ("nvmlDeviceGetComputeRunningProcesses", "processes", ()),
    ("nvmlDeviceGetGraphicsRunningProcesses", "processes", ()),
]
NECESSARY = [
    ("nvmlDeviceGetHandleByIndex", "name, uuid, memory_bytes, capability"),
    ("nvmlDeviceGetName", "name"),
    ("nvmlDeviceGetUUID", "uuid"),
    ("nvmlDeviceGetMemoryInfo", "memory_bytes"),
    ("nvmlDeviceGetCudaComputeCapability", "capability"),
]


def ask(nvml: FakeNvml, root: Path = Path("/nowhere"), **environ: str) -> GpuReading:
    """The reading, by way of the same JSON that the child prints."""
    return reading(json.loads(json.dumps(read(nvml, lambda call, gpu: None))), environ, root)


def what(found: GpuReading) -> str:
    assert found.gpu_problem is not None
    assert all((found.gpu_problem.what, found.gpu_problem.why, found.gpu_problem.do))
    return found.gpu_problem.what


def two(**of_the_second: Any) -> tuple[Card, Card]:
    return Card(), Card(uuid="GPU-1", bus="00000000:42:00.0", **of_the_second)


def test_whole_answers(tmp_path: Path) -> None:
    node = tmp_path / "sys/bus/pci/devices/0000:41:00.0/numa_node"
    node.parent.mkdir(parents=True)
    node.write_text("1\n")
    found = ask(FakeNvml(*two()), tmp_path)
    assert found.gpu_problem is None
    assert found.driver == "580.95.05"
    first, second = found.gpus
    assert (first.index, first.name, first.uuid, first.capability) == (0, "NVIDIA GeForce RTX 3090", "GPU-0", "8.6")
    assert (first.memory_bytes, first.free_bytes, first.bar1_bytes) == (24576 * MIB, 24210 * MIB, 32768 * MIB)
    assert (first.mig, first.pcie_generation, first.pcie_width) == ("off", 4, 16)
    assert (first.pcie_generation_now, first.pcie_generation_card, first.pcie_width_max) == (1, 4, 16)
    assert (first.clock_mhz, first.clock_max_mhz, first.throttled_by, first.persistence) == (210, 2100, (), True)
    assert (first.numa_node, second.numa_node) == (1, None)
    assert (first.peers, second.peers) == ({1: "p2p"}, {0: "p2p"})


@pytest.mark.parametrize(
    "error", [999, 4, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), AttributeError("no such symbol")], ids=repr
)
@pytest.mark.parametrize(("call", "field", "unknown"), OPTIONAL, ids=[row[0] for row in OPTIONAL])
def test_a_fact_that_fails_is_unknown_and_named(
    call: str, field: str, unknown: object, error: int | Exception, tmp_path: Path
) -> None:
    found = ask(FakeNvml(*two(), fail={(call, 1): error}), tmp_path)
    assert [gpu.index for gpu in found.gpus] == [0, 1]
    assert getattr(found.gpus[1], field) == unknown
    assert f"{call} failed on GPU 1: " in what(found)


@pytest.mark.parametrize(("call", "lacking"), NECESSARY, ids=[row[0] for row in NECESSARY])
def test_a_gpu_without_what_a_plan_needs_is_left_out_and_named(call: str, lacking: str) -> None:
    found = ask(FakeNvml(*two(), fail={(call, 0): 15}))
    assert [gpu.index for gpu in found.gpus] == [1]
    assert f"{call} failed on GPU 0: GPU is lost" in what(found)
    assert f"GPU 0 is left out: the driver does not give its {lacking}" in what(found)
    assert found.gpus[0].peers == {}
    assert found.hidden_gpus == 0  # it is lost, and not hidden


def test_one_error_of_many_gpus_is_one_sentence() -> None:
    cards = [Card(uuid=f"GPU-{index}") for index in range(8)]
    found = ask(FakeNvml(*cards, fail={"nvmlDeviceGetBAR1MemoryInfo": 999}))
    assert what(found) == "nvmlDeviceGetBAR1MemoryInfo failed on GPU 0, 1, 2, 3, 4, 5, 6, 7: Unknown Error"


@pytest.mark.parametrize(("call", "field"), [(call, field) for call, field, _ in OPTIONAL[:11]])
def test_what_a_card_does_not_have_is_no_problem(call: str, field: str) -> None:
    found = ask(FakeNvml(Card(), fail={call: 3}))
    assert getattr(found.gpus[0], field) is None
    assert found.gpu_problem is None


@pytest.mark.parametrize(("call", "field"), [(call, field) for call, field, _ in OPTIONAL[4:11]])
def test_a_driver_that_is_too_old_for_a_question_is_no_problem(call: str, field: str) -> None:
    found = ask(FakeNvml(Card(), fail={call: 13}))
    assert getattr(found.gpus[0], field) is None
    assert found.gpu_problem is None


@pytest.mark.parametrize(
    ("reasons", "words"),
    [(0, ()), (0x1, ()), (0x5, ("power cap",)), (0x48, ("hardware slowdown", "heat, in hardware")), (1 << 40, ())],
)
def test_what_holds_clocks_down(reasons: int, words: tuple[str, ...]) -> None:
    assert ask(FakeNvml(Card(reasons=reasons))).gpus[0].throttled_by == words


def test_processes_that_are_not_told_are_a_problem() -> None:
    # An empty list would say that nobody uses the card.
    assert "nvmlDeviceGetComputeRunningProcesses failed" in what(
        ask(FakeNvml(Card(), fail={"nvmlDeviceGetComputeRunningProcesses": 3}))
    )


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(4, "/dev/nvidiactl"), (9, "modprobe"), (12, "libnvidia-ml.so.1"), (18, "restart"), (999, "dmesg")],
)
def test_a_library_that_does_not_start(code: int, remedy: str) -> None:
    found = ask(FakeNvml(Card(), fail={"nvmlInit": code}))
    assert found.gpus == ()
    assert what(found).startswith("GPUs cannot be read: nvmlInit failed: ")
    assert found.gpu_problem is not None
    assert remedy in found.gpu_problem.do


def test_a_count_that_fails_is_not_taken_for_none() -> None:  # A13
    assert "nvmlDeviceGetCount failed: Unknown Error" in what(ask(FakeNvml(Card(), fail={"nvmlDeviceGetCount": 999})))


def test_a_driver_version_that_fails_costs_only_itself() -> None:
    found = ask(FakeNvml(Card(), fail={"nvmlSystemGetDriverVersion": 999}))
    assert found.driver is None
    assert len(found.gpus) == 1
    assert "nvmlSystemGetDriverVersion failed: Unknown Error" in what(found)


def test_a_driver_that_lists_nothing_is_a_problem() -> None:
    assert "lists no GPU" in what(ask(FakeNvml()))


def test_a_missing_binding_is_a_problem() -> None:
    found = reading({"driver": None, "missing": True, "failures": [], "cards": []}, {}, Path("/nowhere"))
    assert "nvidia-ml-py is not installed" in what(found)


@pytest.mark.parametrize(
    ("card", "key"),
    [
        (Card(free=99 << 40), "free_bytes = "),
        (Card(capability=(0, 0)), "capability"),
        (Card(bus=b"\xff"), ""),
        (Card(compute=[(1, 99 << 40)]), "used_bytes of process 1"),
    ],
)
def test_answers_that_cannot_be_true_cost_the_gpu(card: Card, key: str) -> None:
    found = ask(FakeNvml(card))
    if key:
        assert found.gpus == ()
        assert "GPU 0 is left out: the driver's answer contradicts itself" in what(found)
        assert key in what(found)
    else:
        assert found.gpus[0].numa_node is None


def test_two_gpus_of_one_uuid_are_not_both_shown() -> None:
    found = ask(FakeNvml(Card(), Card()))
    assert [gpu.index for gpu in found.gpus] == [0]
    assert "GPU 1 is left out: its UUID is that of another" in what(found)


def test_a_name_cannot_reach_the_terminal_as_a_command() -> None:
    assert ask(FakeNvml(Card(name=b"RTX\x1b[2J"))).gpus[0].name == "RTX?[2J"


LINKS = {
    (0, 0, 0): "nvlink",
    (0, 0, 5): "p2p",
    (0, 4, 5): "none",
    (1, 0, 0): "none",
    (6, 0, 5): "unknown",
    (0, 0, 6): "unknown",
    (5, 6, 6): "none",
}


@pytest.mark.parametrize(("states", "link"), LINKS.items(), ids=map(str, LINKS))
def test_links(states: tuple[int, int, int], link: str) -> None:
    found = ask(FakeNvml(Card(link=states), Card(uuid="GPU-1")))
    assert found.gpus[0].peers == {1: link}
    assert found.gpus[1].peers == {0: "p2p"}  # each direction is asked by itself


def test_processes() -> None:
    card = Card(compute=[(10, 100), (9999, None)], graphics=[(10, 70), (11, 5)])
    processes = ask(FakeNvml(card)).gpus[0].processes
    assert [(p.pid, p.name, p.used_bytes) for p in processes] == [
        (10, "/usr/bin/python3", 100),
        (9999, None, None),
        (11, "/usr/bin/python3", 5),
    ]


def cut_card() -> Card:
    first = Card(name="NVIDIA H200 MIG 3g.71gb", uuid="MIG-a", memory=71424 * MIB, free=71000 * MIB)
    second = Card(name="NVIDIA H200 MIG 1g.18gb", uuid="MIG-b", memory=16384 * MIB, free=16000 * MIB)
    return Card(
        name="NVIDIA H200",
        uuid="GPU-1",
        capability=(9, 0),
        memory=143771 * MIB,
        mig=1,
        slices={0: (first, 2, 0), 5: (second, 9, 0)},
    )


def test_a_card_that_is_cut_says_so() -> None:
    found = ask(FakeNvml(Card(mig=0), cut_card()))
    assert [gpu.mig for gpu in found.gpus] == ["off", "on"]


@pytest.mark.parametrize("value", ["MIG-b", "MIG-GPU-1/9/0"])
def test_a_slice_that_is_chosen_has_the_memory_of_the_slice(value: str) -> None:
    found = ask(FakeNvml(Card(), cut_card()), CUDA_VISIBLE_DEVICES=value)
    (gpu,) = found.gpus
    assert (gpu.uuid, gpu.mig, gpu.capability, gpu.memory_bytes) == ("MIG-b", "instance", "9.0", 16384 * MIB)
    assert gpu.index == 3  # after the two cards and the slice before it
    assert gpu.peers == {}
    assert found.hidden_gpus == 1


def test_hidden_gpus_are_counted_and_no_peer_names_them() -> None:
    cards = [Card(uuid=f"GPU-{index}") for index in range(4)]
    found = ask(FakeNvml(*cards), CUDA_VISIBLE_DEVICES="3,1")
    assert [(gpu.index, gpu.peers) for gpu in found.gpus] == [(3, {1: "p2p"}), (1, {3: "p2p"})]
    assert found.hidden_gpus == 2
    assert found.gpu_problem is None


@pytest.mark.parametrize("value", ["", "-1"])
def test_hiding_all_is_one_count_and_no_problem(value: str) -> None:
    found = ask(FakeNvml(*two()), CUDA_VISIBLE_DEVICES=value)
    assert (found.gpus, found.hidden_gpus, found.gpu_problem) == ((), 2, None)


def test_a_bad_list_is_a_problem() -> None:
    found = ask(FakeNvml(*two()), CUDA_VISIBLE_DEVICES="0,5\x1b")
    assert "CUDA_VISIBLE_DEVICES=0,5?: entry 2, '5?', names a GPU that is not there: 2 found" in what(found)


@pytest.mark.parametrize(
    ("environ", "warned"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "is FASTEST_FIRST"),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, "is not set"),
        ({"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, ""),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, ""),
    ],
)
def test_numbers_among_unlike_cards_need_an_order(environ: dict[str, str], warned: str) -> None:
    unlike = ask(FakeNvml(*two(name="NVIDIA GeForce RTX 3060")), **environ)
    assert (warned in what(unlike)) if warned else unlike.gpu_problem is None
    assert ask(FakeNvml(*two()), **environ).gpu_problem is None


def test_without_a_driver_nothing_is_asked(tmp_path: Path) -> None:
    command = ("/nowhere/must-not-run",)
    assert not driver_present(tmp_path)
    assert read_gpus(tmp_path, {}, command) == GpuReading()


@pytest.mark.parametrize("sign", ["dev/nvidia0", "proc/driver/nvidia/version", "usr/lib/wsl/lib/libnvidia-ml.so.1"])
def test_signs_of_a_driver(tmp_path: Path, sign: str) -> None:
    (tmp_path / sign).parent.mkdir(parents=True)
    (tmp_path / sign).touch()
    assert driver_present(tmp_path)


def test_a_gpu_without_a_driver_is_named(tmp_path: Path) -> None:
    for name, vendor, kind in (("0", "0x10de", "0x030200"), ("1", "0x10de", "0x040300"), ("2", "0x8086", "0x030000")):
        device = tmp_path / "sys/bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
    assert cards_on_bus(tmp_path) == 1  # the sound device of the card and the other maker's are none
    assert what(read_gpus(tmp_path, {})) == "1 NVIDIA GPU on the PCI bus, and no driver is loaded"
