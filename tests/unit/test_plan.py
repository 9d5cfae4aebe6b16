"""The verdict, on machines that are described: what runs, and each reason why something does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimserve.engine import command, door, variables
from slimserve.errors import Refused
from slimserve.machine import GpuProblem, Machine
from slimserve.plan import Plan, WeightsOnDisk, describe, make_plan, matches
from slimserve.registry import Registry
from slimserve.registry_files import load_registry
from slimserve.shapes import build, plain

GOOD = Path(__file__).parent.parent / "registry"
REAL = Path(__file__).parent.parent.parent / "profiles"
WEIGHTS = WeightsOnDisk(Path("/cache/weights"), ready=False, needed_bytes=1000)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry(GOOD, variables.OWNED)


@pytest.fixture
def rack(registry: Registry) -> Machine:
    return describe(registry.platforms["rack"], 1 << 40)


def change(machine: Machine, **fields: Any) -> Machine:
    """`machine` with fields of any part replaced, validated again."""
    data = plain(machine)
    for path, value in fields.items():
        target = data
        *parents, last = path.split("__")
        for part in parents:
            target = target[int(part)] if part.isdigit() else target[part]
        target[last] = value
    return build(Machine, data)


def refuse(registry: Registry, machine: Machine, profile: str = "expert-fp8-rack") -> str:
    with pytest.raises(Refused) as caught:
        make_plan(registry.subject(registry.profiles[profile]), machine, WEIGHTS)
    assert caught.value.exit_code == 3
    assert all(finding.what and finding.why and finding.do for finding in caught.value.findings)
    return str(caught.value)


def test_the_platform_itself_runs_its_profile(registry: Registry, rack: Machine) -> None:
    plan = make_plan(registry.subject(registry.profiles["expert-fp8-rack"]), rack, WEIGHTS)
    assert [gpu.index for gpu in plan.gpus] == list(range(8))
    assert any("no receipt of ours" in note for note in plan.notes)


def keep(count: int) -> Callable[[dict[str, Any]], None]:
    def cut(data: dict[str, Any]) -> None:
        data["gpus"] = data["gpus"][:count]
        for gpu in data["gpus"]:
            gpu["peers"] = {}

    return cut


@pytest.mark.parametrize("count", [0, 1, 3, 5, 7])
def test_too_few_gpus_names_found_needed_and_legal_counts(registry: Registry, rack: Machine, count: int) -> None:
    data = plain(rack)
    keep(count)(data)
    text = refuse(registry, build(Machine, data))
    assert "needed: 8 x NVIDIA GeForce RTX 3090" in text
    assert (f"GPUs found: {count} x NVIDIA GeForce RTX 3090" if count else "GPUs found: none") in text
    assert "can be split over 1, 2, 4, 8" in text


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("name", "NVIDIA GeForce RTX 3090 Ti", "GPU 3 does not count: it is an NVIDIA GeForce RTX 3090 Ti"),
        ("name", "NVIDIA A10", "GPU 3 does not count: it is an NVIDIA A10"),
        ("capability", "8.9", "its capability is 8.9"),
        ("mig", "on", "MIG is on"),
        ("mig", "instance", "it is a MIG slice"),
        ("mig", "unknown", "could not be read"),
        ("memory_bytes", 12 << 30, "it has 12.0 GiB of memory, 24.0 GiB belong to this card"),
        ("memory_bytes", 48 << 30, "it has 48.0 GiB of memory"),
    ],
)
def test_a_card_that_is_another_does_not_count(
    registry: Registry, rack: Machine, field: str, value: Any, says: str
) -> None:
    changes = {f"gpus__3__{field}": value}
    if field == "memory_bytes":
        changes["gpus__3__free_bytes"] = min(value, 24 << 30)
    text = refuse(registry, change(rack, **changes))
    assert says in text
    assert "needed: 8 x" in text


def test_cards_that_do_not_count_for_one_reason_are_counted(registry: Registry, rack: Machine) -> None:
    text = refuse(registry, change(rack, gpus__2__name="NVIDIA A10", gpus__3__name="NVIDIA A10", gpus__5__mig="on"))
    assert "; 2 GPUs do not count, each because it is an NVIDIA A10; GPU 5 does not count: MIG is on\n" in text


def test_a_busy_card_is_named_with_its_process(registry: Registry, rack: Machine) -> None:
    machine = change(
        rack,
        gpus__2__free_bytes=1 << 30,
        gpus__2__processes=[{"pid": 4711, "name": "python", "used_bytes": 22 << 30}],
    )
    text = refuse(registry, machine)
    assert "GPU 2 has 1.0 GiB of 24.0 GiB free, held by python (pid 4711)" in text
    assert "96% of each card's memory" in text


def test_an_idle_card_is_taken_instead_of_a_busy_one(registry: Registry, rack: Machine) -> None:
    data = plain(rack)
    spare = {**data["gpus"][7], "index": 8, "uuid": "GPU-spare", "peers": {}}
    data["gpus"].append(spare)
    data["gpus"][0]["free_bytes"] = 0
    machine = build(Machine, data)
    plan = make_plan(registry.subject(registry.profiles["expert-fp8-rack"]), machine, WEIGHTS)
    assert [gpu.index for gpu in plan.gpus] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(("driver", "says"), [("570.10", "the driver is 570.10"), (None, "could not be read")])
def test_the_driver(registry: Registry, rack: Machine, driver: str | None, says: str) -> None:
    assert says in refuse(registry, change(rack, driver=driver))


def test_a_newer_driver_is_compared_by_number(registry: Registry, rack: Machine) -> None:
    make_plan(registry.subject(registry.profiles["expert-fp8-rack"]), change(rack, driver="1000.1"), WEIGHTS)


def test_inspection_that_failed_is_told_and_nothing_is_guessed(registry: Registry, rack: Machine) -> None:
    problem = GpuProblem(what="nvmlInit failed: Driver/library version mismatch", why="no GPU is known", do="reboot")
    machine = replace(rack, gpus=(), gpu_problem=problem)
    text = refuse(registry, machine)
    assert "GPUs could not be read: nvmlInit failed" in text
    assert "do:  reboot" in text


def test_every_reason_is_given_at_once(registry: Registry, rack: Machine) -> None:
    machine = change(
        rack,
        driver="1.0",
        memory__available_bytes=1 << 30,
        disk__free_bytes=10,
        gpus__0__free_bytes=0,
    )
    text = refuse(registry, machine)
    for words in ("driver is 1.0", "1.0 GiB of host memory", "are free at /", "GPU 0 has"):
        assert words in text


def test_the_control_group_counts_not_the_ram(registry: Registry, rack: Machine) -> None:
    machine = change(rack, memory__cgroup_limit_bytes=2 << 30, memory__cgroup_used_bytes=1 << 30)
    assert "1.0 GiB of host memory can be used (the control group's limit)" in refuse(registry, machine)


def test_the_wrong_processor(registry: Registry, rack: Machine) -> None:
    assert "the processor is aarch64" in refuse(registry, change(rack, cpu__architecture="aarch64"))


def test_a_disk_that_cannot_be_written(registry: Registry, rack: Machine) -> None:
    assert "cannot be written" in refuse(registry, change(rack, disk__writable=False))


def test_no_disk_is_needed_for_weights_that_are_there(registry: Registry, rack: Machine) -> None:
    weights = WeightsOnDisk(Path("/cache/weights"), ready=True, needed_bytes=0)
    machine = change(rack, disk__free_bytes=0)
    make_plan(registry.subject(registry.profiles["expert-fp8-rack"]), machine, weights)


def test_cards_without_peer_access_run_with_a_note(registry: Registry, rack: Machine) -> None:
    machine = change(rack, gpus__0__peers={str(n): "none" for n in range(1, 8)})
    plan = make_plan(registry.subject(registry.profiles["expert-fp8-rack"]), machine, WEIGHTS)
    assert any("do not reach each other's memory" in note for note in plan.notes)


def test_links_below_those_of_the_platform_are_refused_where_they_are_needed() -> None:
    registry = load_registry(REAL, variables.OWNED)
    subject = registry.subject(registry.profiles["qwen38fn-fp8-h200x2"])
    machine = describe(subject.platform, 1 << 50)
    make_plan(subject, machine, WEIGHTS)
    for one_way in ({"1": "p2p"}, {}):  # a pair that nobody could read is no link either
        with pytest.raises(Refused, match=r"GPUs are not linked by nvlink: 0-1"):
            make_plan(subject, change(machine, gpus__0__peers=one_way), WEIGHTS)


def test_a_described_platform_matches_itself_and_no_other(registry: Registry, rack: Machine) -> None:
    assert matches(registry.platforms["rack"], rack)
    box = describe(registry.platforms["box"], 1 << 40)
    assert matches(registry.platforms["box"], box)
    assert not matches(registry.platforms["rack"], box)


def real_plan(profile: str) -> tuple[Registry, Plan]:
    registry = load_registry(REAL, variables.OWNED)
    subject = registry.subject(registry.profiles[profile])
    return registry, make_plan(subject, describe(subject.platform, 1 << 50), WEIGHTS)


@pytest.mark.parametrize("profile", sorted(path.stem for path in REAL.glob("*.yaml") if path.stem != "sources"))
def test_every_profile_runs_on_its_own_platform(profile: str) -> None:
    _, plan = real_plan(profile)
    assert len(plan.gpus) == (plan.subject.platform.gpus.count if plan.subject.platform.gpus else 0)


def test_the_published_3090_profile_in_full() -> None:
    _, plan = real_plan("qwen38fn-fp8-3090x8")
    admission = door.configure(plan, control=Path("/run/slimserve/engine.sock"))
    built = command.build(plan, admission, cache=Path("/cache"), user_environment={})
    argv = list(built.argv)
    value = {flag: argv[index + 1] for index, flag in enumerate(argv[:-1]) if flag.startswith("--")}
    assert value["--tensor-parallel-size"] == "8"
    assert "--enable-expert-parallel" in argv
    assert 96 in json.loads(value["--compilation-config"])["cudagraph_capture_sizes"]
    assert value["--max-model-len"] == "262144"
    assert value["--moe-backend"] == "marlin"
    assert value["--gpu-memory-utilization"] == "0.96"
    assert built.env["NCCL_P2P_LEVEL"] == "SYS"
    keys = {row.key for row in built.rows}
    assert {key for key, _ in plan.subject.profile.settings()} <= keys
    assert all(row.why and row.evidence for row in built.rows)
