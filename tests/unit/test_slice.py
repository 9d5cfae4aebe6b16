"""Checkpoints without weights: what the generator writes is what the registry expects, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness import slice as slices
from slimserve import weights
from slimserve.engine.variables import OWNED
from slimserve.errors import Refused
from slimserve.model import Checkpoint, Model
from slimserve.plan import WeightsOnDisk, describe, make_plan
from slimserve.registry_files import load_registry

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "profiles", ROOT / "tests" / "hybrid")


def generated() -> Iterator[tuple[Path, Model, str, Checkpoint]]:
    for folder in FOLDERS:
        for model in load_registry(folder, OWNED).models.values():
            for quant, checkpoint in model.checkpoints.items():
                if checkpoint.generated is not None:
                    yield folder, model, quant, checkpoint


CASES = list(generated())
IDS = [model.id for _, model, _, _ in CASES]


def test_each_registry_has_a_slice() -> None:
    assert [folder for folder, _, _, _ in CASES] == list(FOLDERS)


@pytest.mark.parametrize(("folder", "model", "quant", "checkpoint"), CASES, ids=IDS)
def test_what_is_written_is_what_the_manifest_lists(
    tmp_path: Path, folder: Path, model: Model, quant: str, checkpoint: Checkpoint
) -> None:
    slices.write(model, checkpoint.quantisation, tmp_path)
    manifest = weights.manifest(folder, checkpoint)
    assert {path.name for path in tmp_path.iterdir()} == {file.name for file in manifest}
    assert checkpoint.bytes == sum(file.bytes for file in manifest)
    assert weights.check(tmp_path, manifest, weightless=True) == []
    assert weights.verify(tmp_path, manifest, lambda done, total, name: None) == []
    assert weights.check_config(tmp_path, model.geometry) == []
    weights.fetch(checkpoint, tmp_path, manifest, lambda done, total, name: None)  # nothing is left to do


@pytest.mark.parametrize(("folder", "model", "quant", "checkpoint"), CASES, ids=IDS)
def test_a_slice_that_is_not_there_is_refused_with_its_command(
    tmp_path: Path, folder: Path, model: Model, quant: str, checkpoint: Checkpoint
) -> None:
    target = tmp_path / "slice"
    manifest = weights.manifest(folder, checkpoint)
    with pytest.raises(Refused) as caught:
        weights.fetch(checkpoint, target, manifest, lambda done, total, name: None)
    do = caught.value.findings[0].do
    assert do == f"{checkpoint.generated} {target}"
    # The command is taken at its word.
    command = [sys.executable, *do.split()[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"SLIMSERVE_PROFILES": str(folder)})
    assert done.returncode == 0, done.stderr
    assert weights.state(target, manifest).ready


def test_another_shape_is_another_file(tmp_path: Path) -> None:
    folder, model, _, checkpoint = CASES[0]
    wider = replace(model, geometry=replace(model.geometry, num_hidden_layers=16))
    slices.write(wider, checkpoint.quantisation, tmp_path)
    assert weights.check(tmp_path, weights.manifest(folder, checkpoint), weightless=True)
    assert weights.check_config(tmp_path, model.geometry)


def test_what_is_no_slice_is_not_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harness.slice", "qwen38-flash-next", "fp8-block128", str(tmp_path / "x")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no checkpoint that is generated" in done.stderr
    assert not (tmp_path / "x").exists()


def test_every_text_comes_back_from_its_bytes(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    _, model, _, checkpoint = CASES[0]
    slices.write(model, checkpoint.quantisation, tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "".join(map(chr, range(1, 256))) + " naïve 漢字 🦙"
    encoded = tokenizer.encode(text)
    assert len(encoded.ids) == len(text.encode())
    assert tokenizer.decode(encoded.ids) == text
    turn = tokenizer.encode("<|im_start|>a<|im_end|>").ids
    assert [turn[0], turn[-1], len(turn)] == [256, 257, 3]


def test_only_experts_and_the_table_are_quantised() -> None:
    _, model, _, checkpoint = CASES[0]
    named = slices.files(model, checkpoint.quantisation)["config.json"]["quantization_config"]["modules_to_not_convert"]
    assert not [name for name in named if ".experts." in name or "ngram_embedding" in name]
    assert {name.split(".")[2] for name in named if name.startswith("model.layers.")} == {str(n) for n in range(12)}


def test_the_small_hybrid_is_planned_and_no_user_lists_it() -> None:
    registry = load_registry(FOLDERS[1], OWNED)
    (profile,) = registry.profiles.values()
    subject = registry.subject(profile)
    plan = make_plan(subject, describe(subject.platform, 1 << 50), WeightsOnDisk(Path("weights"), True, 0))
    assert plan.room.capacity.slots >= profile.engine.max_num_seqs.value
    assert {group.kind for group in plan.room.rank.caches.groups} == {"state", "attention"}
    assert profile.id not in load_registry(FOLDERS[0], OWNED).profiles
