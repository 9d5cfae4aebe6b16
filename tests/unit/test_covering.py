"""A profile says `measured` only while its receipts match its settings."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from receipts_support import FACTS, facts_of, make

from harness.recording import Facts
from slimserve import covering
from slimserve.errors import RegistryError
from slimserve.registry import Registry
from slimserve.registry_files import load_registry

REGISTRY = Path(__file__).resolve().parents[1] / "registry"
PROFILE = "tiny-bf16-box"


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    """A registry whose profile is measured, and cites a receipt for its slots."""
    folder = tmp_path / "registry"
    shutil.copytree(REGISTRY, folder)
    subject = load_registry(folder).subject(load_registry(folder).profiles[PROFILE])
    make(folder / "receipts", "one", facts=facts_of(subject))
    text = (folder / f"{PROFILE}.yaml").read_text()
    block = re.search(r"  max_num_seqs:\n(?:    .*\n)+", text)
    assert block is not None
    cited = re.sub(r"    evidence:.*\n(?:      .*\n)*", "    evidence: {receipt: one.json}\n", block[0])
    assert cited != block[0]
    text = text.replace(block[0], cited)
    (folder / f"{PROFILE}.yaml").write_text(re.sub(r"(?m)^status: .*$", "status: measured", text))
    return folder


def change(folder: Path, old: str, new: str, name: str = f"{PROFILE}.yaml") -> None:
    path = folder / name
    text = path.read_text()
    assert old in text, old
    path.write_text(text.replace(old, new, 1))


def facts(folder: Path) -> Facts:
    plain = load_registry(REGISTRY)
    return facts_of(plain.subject(plain.profiles[PROFILE]))


def problems(folder: Path) -> str:
    with pytest.raises(RegistryError) as error:
        load_registry(folder)
    return str(error.value)


def test_a_profile_whose_receipts_match_is_measured(registry: Path) -> None:
    found: Registry = load_registry(registry)
    assert found.profiles[PROFILE].status == "measured"


def test_each_setting_that_changes_is_named_with_the_receipts_that_no_longer_cover_it(registry: Path) -> None:
    profile = load_registry(registry).profiles[PROFILE]
    keys = [key for key, _ in profile.settings() if not key.startswith("serve.")]
    assert len(keys) > 8
    subject = load_registry(registry).subject(profile)
    for key in keys:
        section, name = key.split(".", 1)
        part = getattr(profile, section)
        setting = part[name] if isinstance(part, dict) else getattr(part, name)
        other = replace(setting, value="something else")
        whole = {**part, name: other} if isinstance(part, dict) else replace(part, **{name: other})
        changed = replace(subject, profile=replace(profile, **{section: whole}))
        (problem,) = covering.check(changed, registry / "receipts")
        assert problem.what == f'{key} = "something else" is no longer covered by the receipt one.json'
        assert problem.why == f"it was taken with {covering.as_text(setting.value)}"
        assert problem.loc[: len(key.split("."))] == tuple(key.split("."))


def test_the_finding_has_file_and_line_and_the_remedy(registry: Path) -> None:
    text = (registry / f"{PROFILE}.yaml").read_text()
    value = re.search(r"  max_num_seqs:\n    value: (\d+)", text)
    assert value is not None
    line = text[: value.start(1)].count("\n") + 1
    change(registry, value[0], f"  max_num_seqs:\n    value: {int(value[1]) - 1}")
    said = problems(registry)
    assert (
        f"{PROFILE}.yaml:{line}: engine.max_num_seqs = {int(value[1]) - 1} is no longer covered by the receipt" in said
    )
    assert f"measure anew: slimserve {PROFILE} --bench" in said


def test_deadlines_of_the_supervisor_are_in_no_measured_number(registry: Path) -> None:
    profile = load_registry(registry).profiles[PROFILE]
    later = replace(profile.serve, load_seconds=replace(profile.serve.load_seconds, value=9999))
    changed = replace(load_registry(registry).subject(profile), profile=replace(profile, serve=later))
    assert list(covering.check(changed, registry / "receipts")) == []


def test_another_engine_and_other_weights_are_not_covered(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimserve.engine.ENGINE_VERSION", "0.33.0")
    assert "engine = 0.33.0 is no longer covered by the receipt one.json" in problems(registry)


@pytest.mark.parametrize("name", ["model", "quant", "platform", "weights"])
def test_what_was_measured_otherwise_is_named(registry: Path, name: str) -> None:
    now = facts(registry)
    assert now.profile is not None
    assert now.weights is not None
    if name == "weights":
        then = replace(now, weights=replace(now.weights, origin="another 1.0"))
    else:
        then = replace(now, profile=replace(now.profile, **{name: "another"}))
    (registry / "receipts" / "one.json").unlink()
    (registry / "receipts" / "one.samples.gz").unlink()
    make(registry / "receipts", "one", facts=then)
    assert f"{name} = " in problems(registry)


def test_a_receipt_covers_what_cites_it_even_where_the_profile_is_not_measured(registry: Path) -> None:
    change(registry, "status: measured", "status: unmeasured")
    change(registry, "  max_num_batched_tokens:\n    value: ", "  max_num_batched_tokens:\n    value: 1")
    load_registry(registry)
    text = (registry / f"{PROFILE}.yaml").read_text()
    value = re.search(r"  max_num_seqs:\n    value: (\d+)", text)
    assert value is not None
    change(registry, value[0], f"  max_num_seqs:\n    value: {int(value[1]) - 1}")
    assert "no longer covered by the receipt one.json" in problems(registry)


@pytest.mark.parametrize(
    ("outcome", "reasons"), [("aborted", ["Ctrl-C"]), ("void", ["lies"]), ("failed", ["it was not there"])]
)
def test_only_whole_receipts_may_be_cited(registry: Path, outcome: str, reasons: list[str]) -> None:
    make(registry / "receipts", "other", facts=facts(registry), outcome=outcome, reasons=reasons)  # type: ignore[arg-type]
    change(registry, "one.json", "other.json")
    assert f'its outcome is "{outcome}", and only a whole one proves anything' in problems(registry)


def test_receipts_of_others_may_not_be_cited(registry: Path) -> None:
    now = facts(registry)
    assert now.profile is not None
    make(registry / "receipts", "server", facts=FACTS)
    make(registry / "receipts", "stranger", facts=replace(now, profile=replace(now.profile, id="stranger")))
    change(registry, "one.json", "server.json")
    assert "it was taken of a server that no profile launched" in problems(registry)
    change(registry, "server.json", "stranger.json")
    assert "it was taken of stranger" in problems(registry)


def test_a_cited_receipt_that_was_changed_or_cut_off_is_said(registry: Path) -> None:
    path = registry / "receipts" / "one.json"
    text = path.read_text()
    path.write_text(text.replace('"ok": 96', '"ok": 95'))
    assert "it was changed after it was written" in problems(registry)
    path.write_text(text[:100])
    assert "was cut off" in problems(registry)
    path.unlink()
    path.symlink_to(__file__)
    assert "it is a symbolic link" in problems(registry)


def test_only_what_is_cited_is_read(registry: Path) -> None:
    for number in range(3):
        (registry / "receipts" / f"broken{number}.json").write_text("{")
    load_registry(registry)
