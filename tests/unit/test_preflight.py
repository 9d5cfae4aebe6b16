"""What becomes of facts: which concern, in which words, and which launches it stands in the way of."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimserve import cli, paths, preparing
from slimserve.engine.variables import OWNED
from slimserve.errors import Refused
from slimserve.machine import GIB, Engine, Folder, GpuProcess, HugePages, Limits, Machine, NcclSetting, load_machine
from slimserve.plan import Plan, WeightsOnDisk, make_plan
from slimserve.preflight import blocking, concerns, host, warnings
from slimserve.preflight.concern import Concern
from slimserve.preflight.exchange import Outcome
from slimserve.preflight.traffic import module_words
from slimserve.registry import Registry
from slimserve.registry_files import load_registry
from slimserve.session import Session

MACHINES = Path(__file__).parent.parent / "machines"
NCCL_FILE = "/etc/nccl.conf"


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry(paths.profiles_folder(), OWNED)


def load(name: str) -> Machine:
    return load_machine(MACHINES / f"{name}.yaml")


def with_gpus(name: str, *indices: int, **values: Any) -> Machine:
    """The machine with some facts of some GPUs changed; of all of them when none is named."""
    machine = load(name)
    gpus = tuple(replace(gpu, **values) if gpu.index in indices or not indices else gpu for gpu in machine.gpus)
    return replace(machine, gpus=gpus)


def only(machine: Machine) -> Concern:
    found = concerns(machine)
    assert len(found) == 1, [str(one) for one in found]
    return found[0]


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"throttled_by": ("heat",), "clock_mhz": 600}, "the clocks of GPU 1, 6 are held down: heat"),
        (
            {"throttled_by": ("hardware slowdown", "power brake")},
            "the clocks of GPU 1, 6 are held down: hardware slowdown, power brake",
        ),
        (
            {"throttled_by": ("set clocks",), "clock_mhz": 600, "clock_max_mhz": 2100},
            "the clocks of GPU 1, 6 are set by somebody, and run at 600 of 2100 MHz",
        ),
        ({"throttled_by": ("set clocks",)}, "the clocks of GPU 1, 6 are set by somebody, and run at unknown of"),
        ({"persistence": False}, "persistence mode is off: GPU 1, 6"),
        (
            {"pcie_width": 4, "pcie_width_max": 16},
            "the PCIe link of GPU 1, 6 is less than it could be: 4 of 16 lanes",
        ),
        (
            {"pcie_generation": 3, "pcie_generation_card": 4},
            "the PCIe link of GPU 1, 6 is less than it could be: generation 3, and the card could 4",
        ),
        ({"iommu": "translated"}, "the IOMMU translates what GPU 1, 6 sends"),
        ({"acs": "redirecting"}, "PCIe ACS redirects what GPU 1, 6 sends to its peers"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_slow_card_is_a_warning(values: dict[str, Any], what: str) -> None:
    found = only(with_gpus("rtx3090x8", 1, 6, **values))
    assert found.what.startswith(what)
    assert found.blocks == "nothing"


@pytest.mark.parametrize(
    "values",
    [
        {"throttled_by": ("power cap", "sync boost", "display clocks")},
        {"pcie_generation_now": 1, "pcie_generation": 4, "pcie_generation_card": 4},
        {"pcie_width": 8, "pcie_width_max": 8},
        {"persistence": True},
        {"iommu": "passthrough", "acs": "off"},
    ],
    ids=str,
)
def test_what_a_sound_card_does_is_no_concern(values: dict[str, Any]) -> None:
    assert concerns(with_gpus("rtx3090x8", **values)) == ()


def test_over_nvlink_and_alone_the_way_over_pcie_does_not_matter() -> None:
    assert concerns(with_gpus("h200x2", iommu="translated", acs="redirecting")) == ()
    assert concerns(with_gpus("a100-40gb", iommu="translated", acs="redirecting")) == ()


def test_a_card_at_a_node_that_is_not_ours() -> None:
    machine = load("rtx3090x8")
    assert concerns(replace(machine, cpu=replace(machine.cpu, own_nodes=(0, 1)))) == ()
    found = only(replace(machine, cpu=replace(machine.cpu, own_nodes=(0,))))
    assert found.what == "GPU 4, 5, 6, 7 lies at NUMA node 1, where this process has no core"
    found = only(replace(machine, memory=replace(machine.memory, own_nodes=(1,))))
    assert found.what == "GPU 0, 1, 2, 3 lies at NUMA node 0, where this process may take no memory"


@pytest.mark.parametrize(
    ("module", "words"),
    [("open", "only when they are patched for it"), ("proprietary", "in the place of the proprietary one 580.95.05")],
)
def test_what_the_drivers_module_has_to_do_with_peer_access(module: Any, words: str) -> None:
    machine = replace(load("rtx3090x3"), driver_module=module)
    first = concerns(machine)[0]
    assert first.what.startswith("no peer-to-peer access")
    assert words in first.do
    assert first.blocks == "profiles that need peer access"


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        (
            "rtx3090x8",
            "open",
            "driver 580.95.05, open kernel module, changed to allow peer access between GeForce cards",
        ),
        ("rtx3090x3", "open", "driver 580.95.05, open kernel module, without peer access between GeForce cards"),
        ("h200x2", "proprietary", "proprietary kernel module"),
        ("cpu-only", "unknown", ""),
    ],
)
def test_the_driver_in_words(name: str, module: Any, words: str) -> None:
    said = module_words(replace(load(name), driver_module=module))
    assert said.endswith(words)
    assert bool(said) == bool(words)


@pytest.mark.parametrize(
    ("name", "value", "over_pcie", "over_nvlink"),
    [
        ("NCCL_P2P_DISABLE", "1", True, True),
        ("NCCL_P2P_DISABLE", "0", False, False),
        ("NCCL_P2P_LEVEL", "SYS", False, False),
        ("NCCL_P2P_LEVEL", "LOC", True, True),
        ("NCCL_P2P_LEVEL", "PHB", True, False),
        ("NCCL_P2P_LEVEL", "nvl", True, False),
        ("NCCL_SHM_DISABLE", "1", True, True),
        ("NCCL_PROTO", "LL,LL128", True, True),
        ("NCCL_PROTO", "^LL128", False, False),
        ("NCCL_ALGO", "Ring", True, True),
        ("NCCL_MAX_NCHANNELS", "1", True, True),
        ("NCCL_DEBUG", "trace", True, True),
        ("NCCL_DEBUG", "WARN", False, False),
        ("NCCL_CUMEM_ENABLE", "1", False, False),
    ],
)
def test_settings_of_nccl_that_hurt(name: str, value: str, over_pcie: bool, over_nvlink: bool) -> None:
    for machine, hurts in (("rtx3090x8", over_pcie), ("h200x2", over_nvlink)):
        for source in (NCCL_FILE, "the environment"):
            setting = NcclSetting(name=name, value=value, source=source)
            found = concerns(replace(load(machine), nccl=(setting,)))
            assert [one.what for one in found] == ([f"{name}={value} is set in {source}"] if hurts else [])
    assert concerns(replace(load("a100-40gb"), nccl=(setting,))) == ()  # one card exchanges nothing


def test_a_setting_of_the_environment_does_not_reach_the_engine_and_one_of_a_file_does(registry: Registry) -> None:
    off = NcclSetting(name="NCCL_P2P_DISABLE", value="1", source="the environment")
    machine = replace(load("h200x2"), nccl=(off,))
    assert "the engine is not given it" in only(machine).why
    need, want = registry.platforms["h200x2"], registry.platforms["rtx3090x8"]
    assert list(blocking(machine, need)) == []
    machine = replace(machine, nccl=(replace(off, source=NCCL_FILE),))
    assert [one.what for one in blocking(machine, need)] == [f"NCCL_P2P_DISABLE=1 is set in {NCCL_FILE}"]
    assert list(blocking(machine, want)) == []  # there it is recommended: slower, and right


def test_limits_of_processes() -> None:
    machine = load("cpu-only")
    assert concerns(replace(machine, limits=Limits(open_files=None, tasks=None))) == ()
    found = concerns(replace(machine, limits=Limits(open_files=1024, tasks=512)))
    assert [one.what for one in found] == [
        "a process may open 1,024 files at most",
        "512 processes and threads are allowed at most",
    ]


def test_huge_pages() -> None:
    machine = load("a100-40gb")

    def pages(reserved: int, free: int, transparent: Any = "madvise") -> Machine:
        huge = HugePages(reserved_bytes=reserved, free_bytes=free, transparent=transparent)
        return replace(machine, memory=replace(machine.memory, huge_pages=huge))

    assert concerns(pages(64 * GIB, 0)) == ()  # somebody uses them
    assert only(pages(64 * GIB, 64 * GIB)).what.startswith("64.0 GiB of ")
    assert only(pages(0, 0, "never")).what == "transparent huge pages are off"
    assert concerns(pages(0, 0, "unknown")) == ()


def test_folders_that_a_launch_needs_stop_every_profile(registry: Registry) -> None:
    folder = Folder(purpose="logs", path="/srv/state", variable="SLIMSERVE_STATE", writable=False, free_bytes=0)
    for one, what in (
        (folder, "/srv/state cannot be written to"),
        (replace(folder, writable=True), "the disk of /srv/state is full"),
    ):
        machine = replace(load("cpu-only"), folders=(one,))
        assert only(machine).what == what
        assert "SLIMSERVE_STATE" in only(machine).do
        assert [found.what for found in blocking(machine, registry.platforms["cpu-x86-64"])] == [what]


def test_a_cache_from_which_nothing_is_loaded_stops_profiles_on_gpus(registry: Registry) -> None:
    machine = load("h200x2")
    machine = replace(machine, disk=replace(machine.disk, executable=False))
    assert "noexec" in only(machine).what
    assert len(list(blocking(machine, registry.platforms["h200x2"]))) == 1
    assert list(blocking(machine, registry.platforms["cpu-x86-64"])) == []


def test_an_engine_that_was_lost_is_named_and_one_that_serves_is_not() -> None:
    lost = Engine(profile="tiny", port=8000, lost=True, pids=(41, 42))
    machine = replace(load("cpu-only"), engines=(lost,))
    found = only(machine)
    assert found.what == "an engine of tiny lives, and its supervisor does not: processes 41 42"
    assert found.do == "the next start ends it; by hand: kill -9 41 42"
    assert concerns(replace(machine, engines=(replace(lost, lost=False),))) == ()


def test_the_memory_that_our_own_engine_holds_is_no_concern() -> None:
    machine = with_gpus("a100-40gb", free_bytes=0, processes=(GpuProcess(pid=41, name="python3"),))
    assert only(machine).what.startswith("GPU 0 is in use")
    ours = Engine(profile="tiny", port=8000, lost=False, pids=(40, 41))
    assert concerns(replace(machine, engines=(ours,))) == ()
    assert "python3 (41)" in concerns(replace(machine, engines=(replace(ours, lost=True),)))[0].what


def test_the_usual_port_is_taken_by_a_stranger() -> None:
    assert host.ENDPOINT_PORT == cli.DEFAULT_PORT
    machine = replace(load("cpu-only"), listening_ports=(host.ENDPOINT_PORT,))
    assert only(machine).what == "port 8000 is taken by another program"
    ours = Engine(profile="tiny", port=host.ENDPOINT_PORT, lost=False)
    assert concerns(replace(machine, engines=(ours,))) == ()


def test_a_plan_is_refused_for_what_stops_its_platform_and_told_of_what_makes_it_slow(registry: Registry) -> None:
    subject = registry.subject(registry.profiles["qwen38fn-fp8-3090x8"])
    weights = WeightsOnDisk(Path("/dev/null"), ready=True, needed_bytes=0)
    slow = with_gpus("rtx3090x8", 3, throttled_by=("heat",), persistence=False)
    notes = make_plan(subject, slow, weights).notes
    assert any(note.startswith("the clocks of GPU 3 are held down: heat; ") for note in notes)
    assert any(note.startswith("persistence mode is off: GPU 3") for note in notes)
    folder = Folder(purpose="logs", path="/srv/state", variable="SLIMSERVE_STATE", writable=False, free_bytes=0)
    with pytest.raises(Refused, match="/srv/state cannot be written to"):
        make_plan(subject, replace(slow, folders=(folder,)), weights)


def plan_of(registry: Registry, name: str, machine: Machine) -> Plan:
    weights = WeightsOnDisk(Path("/dev/null"), ready=True, needed_bytes=0)
    return make_plan(registry.subject(registry.profiles[name]), machine, weights)


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome(gpus=("GPU 0", "GPU 1"), checked=9, wrong=("a sum",)), "values arrive wrong: a sum"),
        (Outcome(gpus=("GPU 0", "GPU 1"), failure="it hangs"), "it hangs"),
        (Outcome(gpus=("GPU 0", "GPU 1"), checked=9), ""),
    ],
)
def test_a_launch_tries_the_gpus_of_the_plan_with_the_profiles_variables(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Outcome, said: str
) -> None:
    tried: list[Any] = []

    def run(names: list[str], kind: str, environ: dict[str, str], look: Any) -> Outcome:
        look()
        tried.append((names, kind, environ))
        return outcome

    monkeypatch.setattr("slimserve.preflight.exchange.run", run)
    monkeypatch.setattr(preparing, "prepare_weights", lambda *args: pytest.fail("later") if said else tmp_path)
    machine = load("rtx3090x8")
    plan = plan_of(registry, "qwen38fn-fp8-3090x8", machine)
    session = Session(registry, machine, True, tmp_path, {"PATH": "/bin", "NCCL_ALGO": "Ring"})
    ticks: list[Any] = []
    with pytest.raises(Refused, match=said) if said else contextlib.nullcontext():
        preparing.prepare(session, plan, lambda *tick: ticks.append(tick))
    ((names, kind, environ),) = tried
    assert (names, kind) == ([f"GPU {index}" for index in range(8)], "cuda")
    assert environ["CUDA_VISIBLE_DEVICES"] == ",".join(gpu.uuid for gpu in machine.gpus)
    assert environ["NCCL_P2P_LEVEL"] == "SYS"
    assert "NCCL_ALGO" not in environ
    assert ticks == [(0, 0, "values are exchanged between the GPUs")]


def test_a_profile_without_gpus_exchanges_nothing(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("slimserve.preflight.exchange.run", lambda *args: pytest.fail("tried"))
    monkeypatch.setattr(preparing, "prepare_weights", lambda *args: tmp_path)
    machine = load("cpu-only")
    plan = plan_of(registry, "smollm2-135m-bf16-cpu", machine)
    preparing.prepare(Session(registry, machine, True, tmp_path, {}), plan, lambda *tick: None)


def test_warnings_are_those_of_the_gpus_that_are_used() -> None:
    machine = with_gpus("rtx3090x8", 3, iommu="translated", throttled_by=("heat",))
    assert len(list(warnings(machine, machine.gpus))) == 2
    assert list(warnings(machine, machine.gpus[:3])) == []
    assert [one.what for one in warnings(machine, machine.gpus[3:4])] == ["the clocks of GPU 3 are held down: heat"]


def test_every_concern_says_in_json_what_it_blocks() -> None:
    for path in MACHINES.glob("*.yaml"):
        for one in concerns(load_machine(path)):
            assert set(one.to_json()) == {"what", "why", "do", "blocks"}
            assert ("blocks: " in str(one)) == (one.blocks != "nothing")
