"""`--plan --set`: what another value would do, by the profile's own rules; never for serving."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plan_support import REGISTRY

from slimserve.cli import main
from slimserve.errors import UsageError
from slimserve.planner.what_if import Change, change

RACK = "qwen38fn-fp8-3090x8"
PLAN = ("qwen38fn-fp8-8", "--plan", "--on", "rtx3090x8")


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main([*PLAN, *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_same_at_the_profiles_own_share(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ask(capsys)
    assert status == 0
    assert "33 of 32 needed, 1 to spare; 39 while none is at a block boundary" in out
    assert "of 3,000 tokens takes up to 25 blocks, 12 of them for state" in out
    assert "from 800 tokens on, in steps of 400" in out
    assert "10 sizes up to 96; a full step is 32 x (1 + 2) = 96" in out
    assert "what if" not in out


def test_whether_32_fit_at_nine_tenths(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ask(capsys, "--set", "engine.gpu_memory_utilization=0.90")
    assert status == 3
    assert "memory of each rank, gpu_memory_utilization 0.9" in out
    assert "22 of 32 needed, 10 short; 26 while none is at a block boundary" in out
    assert "from 800 tokens on, in steps of 400" in out
    assert "engine.max_num_seqs = 32 does not fit: 22 requests of 3,000 tokens do, 10 short" in err
    assert "26 fit while none is at a block boundary" in err
    assert "12 of them for its state groups" in err
    assert f"{RACK}.yaml:" in err  # the line that would have to change
    assert "qwen38fn-fp8-h200x2 (two H200, NVLink)" in err  # a profile that fits


def test_the_largest_number_of_slots_comes_with_the_size_that_has_to_be_captured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = ask(capsys, "--set", "engine.gpu_memory_utilization=0.96")
    assert "engine.max_num_seqs = 33, with 99 among the cudagraph_capture_sizes" in out
    changed = "engine.compilation_config.cudagraph_capture_sizes=[3,6,12,24,48,96,99]"
    status, out, err = ask(capsys, "--set", "engine.max_num_seqs=33", "--set", changed)
    assert (status, err) == (0, "")
    status, _, err = ask(capsys, "--set", "engine.max_num_seqs=34", "--set", changed.replace("99", "102"))
    assert status == 3
    assert "use engine.max_num_seqs of at most 33 (with 99 among the cudagraph_capture_sizes)" in err


def test_a_changed_value_is_shown_as_changed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--set", "engine.gpu_memory_utilization=0.955", "--set", "environment.NCCL_P2P_LEVEL=PIX")
    status, out, _ = ask(capsys, *words)
    assert status == 0
    assert "what if   engine.gpu_memory_utilization = 0.955, the profile: 0.96" in out
    assert 'what if   environment.NCCL_P2P_LEVEL = "PIX", the profile: "SYS"' in out
    assert "--gpu-memory-utilization 0.955" in out
    assert "NCCL_P2P_LEVEL=PIX" in out
    assert "[derived: --set; the profile says 0.96]" in out


def test_the_same_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ask(capsys, "--set", "engine.max_num_batched_tokens=1024", "--json")
    data = json.loads(out)
    assert status == 0
    assert data["what_if"] == [{"key": "engine.max_num_batched_tokens", "profile": 2048, "value": 1024}]
    assert all(sum(line["bytes"] for line in one["lines"]) == one["total_bytes"] for one in data["memory"])
    assert data["capacity"]["slots"] >= 33
    assert data["largest"]["engine.max_num_batched_tokens"] == 2502
    status, out, _ = ask(capsys, "--set", "engine.gpu_memory_utilization=0.90", "--json")
    assert status == 3


@pytest.mark.parametrize(
    ("assignments", "says"),
    [
        (["engine.gpu_memory_utilisation=0.9"], "did you mean engine.gpu_memory_utilization?"),
        (["gpu_memory_utilization=0.9"], "did you mean engine.gpu_memory_utilization?"),
        (["engine.max_num_seqs"], "an assignment is KEY=VALUE"),
        (["engine.=3"], "an assignment is KEY=VALUE"),
        (["=3"], "an assignment is KEY=VALUE"),
        (["id=other"], "is not understood"),
        (["environment.=3"], "is not understood"),
        (["environment.lower=3"], "capitals, digits and underscores"),
        (["engine.max_num_seqs=many"], "give a whole number"),
        (["engine.max_num_seqs=3.5"], "give a whole number"),
        (["engine.gpu_memory_utilization=1"], "between 0 and 1"),
        (["engine.gpu_memory_utilization=" + "1" * 400], "a whole number beyond every float is given"),
        (["engine.gpu_memory_utilization=" + "1" * 5000], "give a number"),
        (["engine.dtype=float8"], "bfloat16 or float16 or float32"),
        (["engine.max_num_seqs=" + "[" * 3000 + "]" * 3000], "give a whole number"),
        (["engine.speculative_config=" + '{"a":' * 3000 + "1" + "}" * 3000], "give a mapping with method"),
        (["engine.block_size.deep=3"], "give a whole number"),
        (["engine.speculative_config.tokens=3"], "unknown key engine.speculative_config.value.tokens"),
        (["engine.max_num_seqs=3", "engine.max_num_seqs=4"], "second value of engine.max_num_seqs"),
    ],
)
def test_what_is_not_understood(assignments: list[str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        change(REGISTRY.profiles[RACK], assignments)
    assert says in str(caught.value)
    assert all(finding.what and finding.why and finding.do for finding in caught.value.findings)


def test_no_depth_is_too_much() -> None:
    for depth in range(700, 1100, 3):  # from what is read and shown to what is not even read
        with pytest.raises(UsageError) as caught:
            change(REGISTRY.profiles[RACK], ["engine.max_num_seqs=" + "[" * depth + "]" * depth])
        assert "--set: " in str(caught.value)


def test_every_slip_is_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        change(REGISTRY.profiles[RACK], ["engine.max_seqs=3", "engine.max_len=4"])
    assert len(caught.value.findings) == 2


@pytest.mark.parametrize(
    ("assignment", "before", "after"),
    [
        ("engine.speculative_config.num_speculative_tokens=3", 2, 3),
        ("engine.block_size=64", None, 64),
        ("engine.enforce_eager=true", False, True),
        ('admission.queue={"length": 3, "seconds": 4}', None, {"length": 3, "seconds": 4}),
        ("environment.NCCL_P2P_LEVEL=PIX", "SYS", "PIX"),
        ("environment.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=128", "256", "128"),
    ],
)
def test_what_is_understood(assignment: str, before: Any, after: Any) -> None:
    profile, changes = change(REGISTRY.profiles[RACK], [assignment])
    assert changes == (Change(assignment.partition("=")[0], before, after),)
    old, new = dict(REGISTRY.profiles[RACK].settings()), dict(profile.settings())
    different = [key for key in new if old.get(key) != new[key]]
    assert len(different) == 1
    assert assignment.startswith(different[0])


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("engine.max_num_seqs=40", "do not contain 120"),
        ("engine.kv_cache_dtype=fp8", "policy exact-kv"),
        ("environment.VLM_USE_V1=1", "it configures neither the engine nor a library of it"),
        ("environment.VLLM_API_KEY=1", "a secret does not belong in a profile"),
        ("environment.VLLM_HOST_IP=0.0.0.0", "it is fixed for every profile"),
        ("environment.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=abc", "not a whole number of MiB"),
        ("environment.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=-5", "not a whole number of MiB"),
        ("environment.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=0", "not a whole number of MiB"),
        ("environment.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=2.5", "not a whole number of MiB"),
        ("environment.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=" + "9" * 5000, "not a whole number of MiB"),
        ("engine.tensor_parallel_size=4", "makes 4 ranks for 8 devices"),
        ("engine.max_model_len=300000", "was trained for 262144 positions"),
        ("engine.max_num_seqs=8192", "engine.max_num_batched_tokens = 2048 < max_num_seqs = 8192"),
    ],
)
def test_policies_and_rules_hold_for_it(assignment: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = ask(capsys, "--set", assignment)
    assert status == 3
    assert says in err
    assert "--set: " in err


@pytest.mark.parametrize("action", ["--serve", "--fetch"])
def test_never_for_serving(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qwen38fn-fp8-8", action, "--set", "engine.max_num_seqs=4"]) == 2
    assert f"--set says nothing to {action}" in capsys.readouterr().err


def test_never_for_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--set", "engine.max_num_seqs=4"]) == 2
    assert "--set says nothing to --list" in capsys.readouterr().err
