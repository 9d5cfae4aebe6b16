"""Each policy that a profile can break is broken in a copy of one, and the copy is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from plan_support import REGISTRY, setting, with_engine

from slimserve import exposure
from slimserve.engine.command import FIXED
from slimserve.engine.variables import FIXED_ENVIRONMENT, OWNED
from slimserve.errors import Refused, RegistryError
from slimserve.model import Checkpoint, HuggingFace
from slimserve.policies import BY_ID, POLICIES, broken
from slimserve.policy_checks import ranks_of_experts
from slimserve.profile import Engine, Profile, Sampling, TemplateDefaults
from slimserve.registry_files import load_registry
from slimserve.shapes import ShapeError, build, fields_of
from slimserve.subject import Subject

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
        "graphs-cover-decode",
        RACK,
        "enforce_eager:\n    value: false",
        "enforce_eager:\n    value: true",
        "enforce_eager is true on a CUDA platform",
    ),
    (
        "real-weights",
        BOX,
        "  kv_cache_memory_bytes:",
        "  load_format:\n    value: dummy\n    why: somebody wanted to start sooner than a disk can read\n"
        "    evidence: {derived: x}\n  kv_cache_memory_bytes:",
        "engine.load_format is dummy",
    ),
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
    fixed = {row[2] for row in (*FIXED, *FIXED_ENVIRONMENT)} | {"private-nodes"}  # `nodes.seat` is what fixes that
    assert {policy.id for policy in POLICIES if policy.check is None} <= fixed
    assert fixed <= set(BY_ID)


ARGUED = "\n    why: somebody wanted it otherwise than all of the others have it\n    evidence: {derived: x}\n"


@pytest.mark.parametrize(("name", "value", "policy"), FIXED, ids=[row[0] for row in FIXED])
def test_what_the_command_fixes_is_refused_in_a_profile(folder: Path, name: str, value: object, policy: str) -> None:
    path, place = folder / BOX, "  kv_cache_memory_bytes:"
    path.write_text(path.read_text().replace(place, f"  {name}:\n    value: {json.dumps(value)}{ARGUED}{place}"))
    with pytest.raises(RegistryError, match=f"unknown key engine.{name}"):
        load(folder)


@pytest.mark.parametrize("name", sorted(OWNED))
def test_a_variable_that_is_fixed_is_refused_in_a_profile(folder: Path, name: str) -> None:
    path = folder / BOX
    path.write_text(path.read_text().replace("environment:\n", f'environment:\n  {name}:\n    value: "1"{ARGUED}'))
    with pytest.raises(RegistryError, match=rf"environment\.{name}\n  why: (it is fixed for every profile|a secret)"):
        load(folder)


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


# A way to break each policy in a profile of the registry; None where the profile has nothing to break it with.


def _no_caching(subject: Subject) -> Profile:
    return with_engine(subject.profile, enable_prefix_caching=False)


def _states_lost(subject: Subject) -> Profile | None:
    return with_engine(subject.profile, mamba_cache_mode="none") if "hybrid" in subject.model.traits else None


def _unsourced_kv(subject: Subject) -> Profile:
    return with_engine(subject.profile, kv_cache_dtype="fp8")


def _short_graphs(subject: Subject) -> Profile | None:
    graphs = subject.profile.engine.compilation_config
    if graphs is None:
        return None
    sizes = graphs.value.cudagraph_capture_sizes[:-1]
    return with_engine(subject.profile, compilation_config=replace(graphs.value, cudagraph_capture_sizes=sizes))


def _unlisted_graphs(subject: Subject) -> Profile | None:
    cuda = subject.platform.kind == "cuda"
    return with_engine(subject.profile, enforce_eager=True, compilation_config=None) if cuda else None


def _cut_experts(subject: Subject) -> Profile | None:
    """Experts cut through their scales, where a cut over the ranks would not tile them."""
    quantisation = subject.model.checkpoints[subject.profile.quant].quantisation
    ranks = ranks_of_experts(subject)
    inner = subject.model.geometry.moe_intermediate_size
    tp = subject.profile.engine.tensor_parallel_size.value
    if quantisation is None or ranks == 1 or inner is None or inner % (tp * quantisation.block[1]) == 0:
        return None
    return with_engine(subject.profile, enable_expert_parallel=False)


def _wrong_pair(subject: Subject) -> Profile | None:
    return with_engine(subject.profile, tool_call_parser="hermes") if "tools" in subject.model.traits else None


def _forced_tools(subject: Subject) -> Profile | None:
    return with_engine(subject.profile, enable_auto_tool_choice=None) if "tools" in subject.model.traits else None


def _no_thought(subject: Subject) -> Profile | None:
    off = TemplateDefaults(enable_thinking=False)
    return (
        with_engine(subject.profile, default_chat_template_kwargs=off) if "thinking" in subject.model.traits else None
    )


def _greedy(subject: Subject) -> Profile:
    return with_engine(subject.profile, override_generation_config=Sampling(temperature=0.0))


def _not_marlin(subject: Subject) -> Profile | None:
    gpus = subject.platform.gpus
    old = gpus is not None and float(gpus.capability) < 8.9
    return with_engine(subject.profile, moe_backend="triton") if old else None


def _small_cap(subject: Subject) -> Profile | None:
    """One slot fewer than all replicas have together."""
    engine = subject.profile.engine
    slots = engine.max_num_seqs.value * (engine.data_parallel_size.value if engine.data_parallel_size else 1)
    admission = replace(subject.profile.admission, max_in_flight=setting(slots - 1))
    return replace(subject.profile, admission=admission) if slots > 1 else None


def _noise(subject: Subject) -> Profile:
    """Dummy weights where there are real ones, and none where there are not."""
    generated = subject.model.checkpoints[subject.profile.quant].generated is not None
    return with_engine(subject.profile, load_format=None if generated else "dummy")


BREAKERS: dict[str, tuple[Callable[[Subject], Profile | None], ...]] = {
    "prefix-caching": (_no_caching, _states_lost),
    "exact-kv": (_unsourced_kv,),
    "graphs-cover-decode": (_short_graphs, _unlisted_graphs),
    "shards-tile": (_cut_experts,),
    "tool-calling": (_wrong_pair, _forced_tools),
    "thinking-on": (_no_thought,),
    "never-greedy": (_greedy,),
    "marlin-below-sm89": (_not_marlin,),
    "in-flight-cap": (_small_cap,),
    "real-weights": (_noise,),
}


def broken_copies(profile: Profile) -> Iterator[tuple[str, Subject]]:
    subject = REGISTRY.subject(profile)
    for policy, breakers in BREAKERS.items():
        for breaker in breakers:
            worse = breaker(subject)
            if worse is not None:
                yield policy, replace(subject, profile=worse)


@pytest.mark.parametrize("profile", REGISTRY.profiles.values(), ids=REGISTRY.profiles)
def test_no_profile_breaks_a_policy_and_every_copy_that_does_is_refused(profile: Profile) -> None:
    assert list(broken(REGISTRY.subject(profile))) == []
    for policy, worse in broken_copies(profile):
        reasons = [problem.why for problem in broken(worse)]
        assert any(f"(policy {policy})" in reason for reason in reasons), f"{policy}: {reasons}"


def test_every_way_of_breaking_is_tried_on_some_profile() -> None:
    assert set(BREAKERS) == {policy.id for policy in POLICIES if policy.check}
    subjects = [REGISTRY.subject(profile) for profile in REGISTRY.profiles.values()]
    for breakers in BREAKERS.values():
        for breaker in breakers:
            assert any(breaker(subject) is not None for subject in subjects), breaker.__name__


def _subject(name: str) -> Subject:
    return REGISTRY.subject(REGISTRY.profiles[name])


def _quantised_kv() -> Subject:
    subject = _subject("qwen38max-nvfp4-b200x8")
    assert subject.profile.engine.kv_cache_dtype.value == "fp8"
    return subject


def _eager_on_a_cpu() -> Subject:
    subject = REGISTRY.subject(REGISTRY.default)
    assert subject.profile.engine.enforce_eager.value
    return subject


def _no_parsers() -> Subject:
    subject = REGISTRY.subject(REGISTRY.default)
    assert subject.profile.engine.tool_call_parser is None
    return subject


def _verification() -> Subject:
    subject = REGISTRY.subject(REGISTRY.default)
    policy = replace(subject.profile.policy, greedy=setting("verification"))
    return replace(subject, profile=replace(subject.profile, policy=policy))


def _slice() -> Subject:
    subject = _subject("qwen38fn-slice12-fp8-h200x1")
    assert subject.profile.engine.load_format == replace(setting("dummy"), why=ANY, evidence=ANY)
    return subject


def _reachable_with_a_key() -> Subject:
    subject = REGISTRY.subject(REGISTRY.default)
    with pytest.raises(Refused, match="is not loopback, and there is no key"):
        exposure.keys({"SLIMSERVE_KEYS": "/nowhere/keys"}, "0.0.0.0")
    assert exposure.keys({"SLIMSERVE_KEYS": "/nowhere/keys", "SLIMSERVE_API_KEY": "sk-one"}, "0.0.0.0").required
    return subject


def _unlisted() -> Subject:
    subject = _subject("qwen38max-nvfp4-b200x8")
    source = subject.model.drafters["dspark"].checkpoint.huggingface
    assert source is not None
    assert source.revision is None
    return subject


EXCEPTIONS: dict[str, Callable[[], Subject]] = {
    "exact-kv": _quantised_kv,
    "graphs-cover-decode": _eager_on_a_cpu,
    "tool-calling": _no_parsers,
    "never-greedy": _verification,
    "real-weights": _slice,
    "loopback": _reachable_with_a_key,
    "pinned-revision": _unlisted,
}


@pytest.mark.parametrize("policy", sorted(policy.id for policy in POLICIES if policy.exception))
def test_the_one_exception_of_a_policy_is_allowed(policy: str) -> None:
    assert list(broken(EXCEPTIONS[policy]())) == []


def test_no_key_of_a_profile_reaches_what_the_command_fixes() -> None:
    keys = {field.name for field in fields_of(Engine)}
    assert not keys & {name for name, _, _ in FIXED}
    assert {name for name, _, _ in FIXED_ENVIRONMENT} <= OWNED


@pytest.mark.parametrize("revision", ["main", "v1.0", "236dfdf2", "G" * 40])
def test_a_revision_that_can_move_is_no_revision(revision: str) -> None:  # A16
    with pytest.raises(ShapeError):
        build(HuggingFace, {"repo": "owner/name", "revision": revision})


def test_only_an_unlisted_checkpoint_has_no_revision() -> None:
    known = {"huggingface": {"repo": "owner/name"}, "licence": "none", "bytes": 1}
    assert build(Checkpoint, {**known, "unlisted": "nobody has seen its files"}).manifest is None
    with pytest.raises(ShapeError, match="revision is missing"):
        build(Checkpoint, {**known, "manifest": "some"})
    with pytest.raises(ShapeError, match="manifest is needed"):
        build(Checkpoint, known)
