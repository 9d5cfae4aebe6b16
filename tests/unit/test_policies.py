"""Each policy that a profile can break is broken in a copy of one, and the copy is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slimserve.engine.command import OWNED
from slimserve.errors import RegistryError
from slimserve.policies import BY_ID, POLICIES
from slimserve.registry import load_registry

GOOD = Path(__file__).parent.parent / "registry"
RACK, BOX = "expert-fp8-rack.yaml", "tiny-bf16-box.yaml"
GRAPHS = "[3, 24, 48, 96]"

# policy, file, old, new, what the message says
BREAKS = [
    (
        "prefix-caching",
        BOX,
        "value: true\n    why: agents",
        "value: false\n    why: agents",
        "enable_prefix_caching is false",
    ),
    ("prefix-caching", RACK, "value: align", "value: none", "mamba_cache_mode is not align"),
    (
        "exact-kv",
        RACK,
        "kv_cache_dtype:\n    value: bfloat16",
        "kv_cache_dtype:\n    value: fp8",
        "kv_cache_dtype = fp8",
    ),
    ("exact-kv", BOX, "kv_cache_dtype:\n    value: bfloat16", "kv_cache_dtype:\n    value: fp8", "has no source"),
    ("graphs-cover-decode", RACK, GRAPHS, "[3, 24, 48]", "end at 48 and do not contain 96"),  # A6
    ("graphs-cover-decode", RACK, GRAPHS, "[3, 48, 24, 96]", "not in rising order"),
    ("graphs-cover-decode", RACK, GRAPHS, "[3, 24, 92, 128]", "do not contain 96"),  # A7: near is not in
    ("graphs-cover-decode", RACK, "num_speculative_tokens: 2", "num_speculative_tokens: 3", "do not contain 128"),
    (
        "shards-tile",
        RACK,
        "enable_expert_parallel:\n    value: true",
        "enable_expert_parallel:\n    value: false",
        "a shard of 640/8 = 80 is no multiple of the scale block 128",
    ),  # A9
    (
        "tool-calling",
        RACK,
        "value: qwen3_xml",
        "value: hermes",
        "tool_call_parser = hermes with reasoning_parser = qwen3",
    ),
    (
        "tool-calling",
        RACK,
        "enable_auto_tool_choice:\n    value: true",
        "enable_auto_tool_choice:\n    value: false",
        "automatic tool calling is not on",
    ),
    (
        "tool-calling",
        RACK,
        "  reasoning_parser:\n    value: qwen3\n    why: thinking arrives apart from answers\n"
        "    evidence: {policy: tool-calling}\n",
        "",
        "tool_call_parser = qwen3_xml with reasoning_parser = None",
    ),  # C11
    (
        "tool-calling",
        RACK,
        "reasoning_parser:\n    value: qwen3",
        "reasoning_parser:\n    value: deepseek_r1",
        "tool_call_parser = qwen3_xml with reasoning_parser = deepseek_r1",
    ),
    (
        "thinking-on",
        RACK,
        "  reasoning_parser:",
        "  default_chat_template_kwargs:\n    value: {enable_thinking: false}\n"
        "    why: somebody wanted short answers and turned it off\n    evidence: {derived: x}\n  reasoning_parser:",
        "enable_thinking is false",
    ),
    (
        "never-greedy",
        BOX,
        "  kv_cache_memory_bytes:",
        "  override_generation_config:\n    value: {temperature: 0.0}\n"
        "    why: repeatable answers were asked for by somebody\n    evidence: {derived: x}\n  kv_cache_memory_bytes:",
        "is greedy",
    ),
    ("marlin-below-sm89", RACK, "value: marlin", "value: triton", "moe_backend is triton on capability 8.6"),  # A11
    (
        "in-flight-cap",
        BOX,
        "max_in_flight:\n    value: 12",
        "max_in_flight:\n    value: 3",
        "admission.max_in_flight = 3 is less than engine.max_num_seqs = 4",
    ),
]


def load(folder: Path) -> None:
    load_registry(folder, OWNED)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(GOOD, tmp_path / "registry")
    return tmp_path / "registry"


@pytest.mark.parametrize(("policy", "file", "old", "new", "says"), BREAKS, ids=[f"{row[0]}-{row[4]}" for row in BREAKS])
def test_a_broken_policy_is_refused(folder: Path, policy: str, file: str, old: str, new: str, says: str) -> None:
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(RegistryError) as caught:
        load(folder)
    found = [finding for finding in caught.value.findings if says in finding.what]
    assert found, str(caught.value)
    assert f"(policy {policy})" in found[0].why
    assert file in found[0].where


def test_every_policy_with_a_check_is_broken_here() -> None:
    assert {policy.id for policy in POLICIES if policy.check} == {row[0] for row in BREAKS}


def test_policies_that_no_profile_decides_are_fixed_by_the_command() -> None:
    from slimserve.engine.command import FIXED, FIXED_ENVIRONMENT

    fixed = {row[2] for row in (*FIXED, *FIXED_ENVIRONMENT)}
    assert {policy.id for policy in POLICIES if policy.check is None} <= fixed
    assert fixed <= set(BY_ID)


def test_whole_experts_are_accepted(folder: Path) -> None:
    load(folder)  # 512 experts over 8 ranks: 64 whole ones each


def test_experts_that_do_not_spread_whole_are_refused(folder: Path) -> None:
    path = folder / "models/expert.yaml"
    path.write_text(path.read_text().replace("num_experts: 512", "num_experts: 500"))
    with pytest.raises(RegistryError, match="500 experts do not spread whole over 8 ranks"):
        load(folder)


def test_every_quantised_tensor_is_checked(folder: Path) -> None:
    path = folder / "models/expert.yaml"
    dense = "        - {name: attention.o_proj, shape: [2560, 6144], sharded: in}\n"
    narrow = "        - {name: attention.k_proj, shape: [512, 2560], sharded: out}\n"
    path.write_text(path.read_text() + dense + narrow)
    with pytest.raises(RegistryError) as caught:
        load(folder)
    assert "attention.k_proj [512, 2560]: a shard of 512/8 = 64" in str(caught.value)
    assert "attention.o_proj" not in str(caught.value)  # 6144/8 = 768 = 6 x 128
