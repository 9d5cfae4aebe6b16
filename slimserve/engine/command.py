"""The one file that knows vLLM's flags: a plan becomes the command line and the environment of the engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimserve.admission.config import STATE_PATH, Config
from slimserve.admission.keys import API_KEY_VARIABLE
from slimserve.engine import ENGINE_VERSION as ENGINE_VERSION
from slimserve.engine.gate import expected
from slimserve.engine.gate.checks import DOOR as DOOR
from slimserve.engine.gate.expected import PLUGIN
from slimserve.engine.variables import (
    ACCEPT_VARIABLE,
    ADMISSION_VARIABLE,
    CACHES,
    FIXED_ENVIRONMENT,
    GATE_VARIABLE,
    SEATS_VARIABLE,
)
from slimserve.exposure import Reach
from slimserve.plan import Plan
from slimserve.policies import BY_ID
from slimserve.records import dataclass
from slimserve.shapes import plain

if TYPE_CHECKING:
    from slimserve.nodes.seat import Seat

ENTRY = "slimserve.engine.entry"
# What the supervisor asks of a running engine.
ASKED = ("/health", "/metrics", STATE_PATH)

# What no profile decides: (engine's name, value, policy).
FIXED: tuple[tuple[str, Any, str], ...] = (
    ("trust_remote_code", False, "pinned-revision"),
    ("prefix_cache_retention_interval", 0, "sparse-states"),
    ("api_server_count", 1, "one-api-server"),
    ("allowed_origins", [], "loopback"),
    ("generation_config", "auto", "never-greedy"),
    ("fail_on_environ_validation", True, "nothing-unread"),
    ("structured_outputs_config", {"backend": "xgrammar"}, "one-grammar-backend"),
)
# Settings of the one API server, which is on node 0.
OF_THE_API_SERVER = frozenset({"api_server_count"})
# The engine gets these of the user's variables and no others: whatever else configures it is the profile's to say.
PASSED = frozenset(
    [
        *"PATH HOME USER LOGNAME LANG LANGUAGE LC_ALL LC_CTYPE TZ TERM SHELL LD_LIBRARY_PATH CUDA_HOME".split(),
        ACCEPT_VARIABLE,
    ]
)
# Variables that would have configured the engine; dropping one of them is said aloud.
_TELLING = tuple("VLLM_ NCCL_ CUDA_ TORCH PYTORCH_ TRITON_ FLASHINFER_ OMP_ KMP_ MKL_ GLOO_ HF_ TRANSFORMERS_".split())
_ALSO_TELLING = frozenset({"PYTHONPATH", "LD_PRELOAD"})


@dataclass(frozen=True)
class Row:
    """One setting as it reaches the engine.

    Args:
        key: key path in the profile, or the engine's name for what a policy fixes.
        value: JSON data.
        argv: the arguments that carry it; empty for environment variables and for the supervisor's own settings.
        why: the reason.
        evidence: where the value comes from.
    """

    key: str
    value: Any
    argv: tuple[str, ...]
    why: str
    evidence: str


@dataclass(frozen=True)
class Command:
    """What is executed.

    Args:
        argv: the whole command line, without secrets.
        env: the whole environment, but for what each start adds.
        admission: what the door is told; None: this node has none.
        rows: every setting with its reason.
        notes: what became of the user's own variables.
        processes: those that have to pass the gate.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    admission: Config | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    processes: tuple[str, ...]

    def shown_env(self) -> dict[str, str]:
        """The environment that slimserve adds, for printing.

        Passed variables, hashes of keys and the gate's copy of the plan are left out.
        """
        ours = {name: value for name, value in self.env.items() if name not in PASSED and name != GATE_VARIABLE}
        if self.admission is not None:
            ours[ADMISSION_VARIABLE] = replace(self.admission, key_hashes={}).to_text()
        return ours


def build(
    plan: Plan, admission: Config, *, cache: Path, user_environment: Mapping[str, str], seat: Seat | None = None
) -> Command:
    """Turn a plan into the engine's command.

    Args:
        plan: the verdict.
        admission: what the door is told; the engine listens at its `control`, and nowhere else.
        cache: slimserve's cache folder; the engine's own caches get a private place in it.
        user_environment: variables of the caller, of which a few are passed on.
        seat: which node of several it is for; None: it is the only one.
    """
    profile = plan.subject.profile
    has_door = seat is None or seat.is_head
    rows = [*_rows(plan), *(_door_rows(admission) if has_door else ()), *(_seat_rows(seat) if seat else ())]
    if not has_door:
        rows = [row for row in rows if row.key not in OF_THE_API_SERVER]
    rows = list({row.key: row for row in rows}.values())  # what a node says of its address takes loopback's place
    # -P: a folder named like one of the engine's modules, where somebody happens to stand, must not replace it.
    argv = [sys.executable, "-P", "-m", ENTRY, "--model", str(plan.weights.folder)]
    argv += ["--served-model-name", profile.id, *profile.aliases]
    argv += [part for row in rows for part in row.argv]
    ours = _environment(plan, cache, seat)
    passed = {name: value for name, value in user_environment.items() if name in PASSED}
    notes = tuple(_dropped(user_environment, ours))
    processes = expected.processes(plan, seat.rank if seat else 0)
    return Command(tuple(argv), {**passed, **ours}, admission if has_door else None, tuple(rows), notes, processes)


def drafter_folder(plan: Plan) -> Path:
    """Where the drafter of `plan` lies: beside the weights."""
    speculation = plan.subject.profile.engine.speculative_config
    name = speculation.value.model if speculation else None
    return plan.weights.folder.with_name(f"{plan.weights.folder.name}-{name}")


def flags(name: str, value: Any) -> tuple[str, ...]:
    """The arguments for one setting: false becomes `--no-x`, nested data becomes JSON.

    Args:
        name: the engine's name, with underscores.
        value: JSON data.
    """
    flag = "--" + name.replace("_", "-")
    if value is True:
        return (flag,)
    if value is False:
        return ("--no-" + name.replace("_", "-"),)
    if isinstance(value, (dict, list)):
        return (flag, json.dumps(value, sort_keys=True, separators=(",", ":")))
    return (flag, str(value))


def _rows(plan: Plan) -> Iterator[Row]:
    for key, setting in plan.subject.profile.settings():
        section, name = key.split(".", 1)
        value = plain(setting.value, nulls=False)
        if name == "speculative_config" and "model" in value:
            value = {**value, "model": str(drafter_folder(plan))}
        yield Row(key, value, flags(name, value) if section == "engine" else (), setting.why, str(setting.evidence))
    for name, value, policy in FIXED:
        yield Row(name, value, flags(name, value), BY_ID[policy].reason, f"policy: {policy}")
    for name, value, policy in FIXED_ENVIRONMENT:
        yield Row(f"environment.{name}", value, (), BY_ID[policy].reason, f"policy: {policy}")


def _door_rows(admission: Config) -> Iterator[Row]:
    """How the engine is reached: by its supervisor over a private socket, by everybody else through the door."""
    control, cap, loopback = str(admission.control), BY_ID["in-flight-cap"], BY_ID["loopback"]
    yield Row("uds", control, flags("uds", control), loopback.reason, f"policy: {loopback.id}")
    yield Row("middleware", DOOR, flags("middleware", DOOR), cap.reason, f"policy: {cap.id}")
    asked = ",".join(ASKED)
    why = "the supervisor asks for these every second, and would fill the log of the engine with its own questions"
    name = "disable_access_log_for_endpoints"
    yield Row(name, asked, flags(name, asked), why, "derived: 86,400 lines a day")


def _seat_rows(seat: Seat) -> Iterator[Row]:
    """What tells the engine which node it is on, and where the others find it."""
    policy = BY_ID["private-nodes"]
    # The first pair is for the front and the replicas, the second for the group of all ranks of all nodes.
    front = {"data_parallel_address": seat.head, "data_parallel_rpc_port": seat.engine_port}
    ranks = {"master_addr": seat.head, "master_port": seat.ranks_port}
    for name, value in (front | ranks).items():
        yield Row(name, value, flags(name, value), policy.reason, f"policy: {policy.id}")
    why = f"this node computes the replicas that follow from its number among {seat.count}"
    yield Row("node_rank", seat.rank, flags("node_rank", seat.rank), why, "derived: --node")
    if not seat.is_head:
        why = "the endpoint, and with it the only API server, is on node 0"
        yield Row("headless", True, flags("headless", True), why, "derived: --node")
    for name, value in _seat_environment(seat).items():
        yield Row(f"environment.{name}", value, (), policy.reason, f"policy: {policy.id}")


def _seat_environment(seat: Seat) -> dict[str, str]:
    """Where the engine's ports and collectives between the nodes are bound: without a name they guess an interface."""
    names = {"GLOO_SOCKET_IFNAME": seat.interface, "NCCL_SOCKET_IFNAME": f"={seat.interface}"}
    return {"VLLM_HOST_IP": seat.address, **names}


def reach_rows(reach: Reach) -> tuple[Row, ...]:
    """What a launch says of its door, beside what the profile says: the engine's own `allowed_origins` is another."""
    policy = BY_ID["loopback"]
    values = {f"door.{name}": value for name, value in reach.to_json().items()}
    return tuple(Row(key, value, (), policy.reason, f"policy: {policy.id}") for key, value in values.items())


def engine_cache(cache: Path, profile_id: str) -> Path:
    """Where the engine and its compilers cache for one profile."""
    return cache / "engine" / f"vllm-{ENGINE_VERSION}" / profile_id


def _environment(plan: Plan, cache: Path, seat: Seat | None) -> dict[str, str]:
    profile = plan.subject.profile
    own = engine_cache(cache, profile.id)
    result = {
        # Spawned children run the entry's first lines again, which tie their lives to ours.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in plan.gpus),
        "PYTHONUNBUFFERED": "1",
        # An allow-list: whatever else is installed beside the engine must not change it.
        "VLLM_PLUGINS": PLUGIN,
        GATE_VARIABLE: json.dumps(expected.planned(plan)),
    }
    if seats := {group: setting.value for group, setting in profile.seats.items()}:
        result[SEATS_VARIABLE] = json.dumps(seats)
    result.update({name: str(own / folder) for name, folder in CACHES.items()})
    result.update({name: value for name, value, _ in FIXED_ENVIRONMENT})
    result.update({name: setting.value for name, setting in profile.environment.items()})
    result.update(_seat_environment(seat) if seat else {})
    return result


def _dropped(user: Mapping[str, str], ours: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(user):
        # CUDA_VISIBLE_DEVICES was heeded when the machine was read: the plan chose among the devices that it shows.
        if name in PASSED or name in (API_KEY_VARIABLE, "CUDA_VISIBLE_DEVICES"):
            continue
        if name in ours and user[name] != ours[name]:
            yield f"your {name} is overridden = {ours[name]!r}: the profile decides"
        elif name not in ours and (name.startswith(_TELLING) or name in _ALSO_TELLING):
            yield f"your {name} is not passed on: only the profile configures the engine"
