"""A checkpoint that comes with slimserve: part of its registry, and copied out of it without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from weights_support import put, shard

from harness.manifest import CARD, listing
from slimserve import preparing
from slimserve.cli import main
from slimserve.errors import Failed
from slimserve.model import BUNDLED_BYTES, Checkpoint
from slimserve.plan import describe
from slimserve.registry_files import load_registry
from slimserve.session import Session
from slimserve.shapes import ShapeError, build, plain
from slimserve.weights import check, hub, manifest, read_manifest, state, store

ROOT = Path(__file__).parents[2]
GOOD = ROOT / "tests/registry"
MODEL = "models/tiny.yaml"
PROFILE = "tiny-bf16-box"
SOURCE = "    huggingface: {repo: somebody/tiny, revision: 0123456789abcdef0123456789abcdef01234567}\n"


def silent(done: int, total: int, name: str) -> None:
    assert 0 <= done <= total, name


class Case:
    """A registry of somebody's own whose toy comes with it, and a cache."""

    def __init__(self, folder: Path) -> None:
        self.registry, self.cache = folder / "registry", folder / "cache"
        shutil.copytree(GOOD, self.registry)
        self.bundle = self.registry / "weights/tiny"
        geometry = load_registry(self.registry).models["tiny"].geometry
        config = json.dumps(plain(geometry, nulls=False)).encode()
        self.files = {"model.safetensors": shard(folder, {"weight": 500}), "config.json": config}
        put(self.bundle, {**self.files, "README.md": b"# A toy\n"})
        self.list_files()
        total = sum(len(content) for content in self.files.values())
        self.edit(SOURCE, "    bundled: tiny\n")
        self.edit("bytes: 1000", f"bytes: {total}")

    def list_files(self) -> None:
        (self.registry / "weights/tiny-bf16.manifest").write_text(listing(self.bundle))

    def edit(self, old: str, new: str) -> None:
        path = self.registry / MODEL
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    @property
    def target(self) -> Path:
        return self.cache / "weights/tiny/bf16-tiny"

    def complete(self) -> bool:
        names = {path.name for path in self.target.iterdir() if not path.name.startswith(store.STAMP)}
        files = read_manifest(self.registry / "weights/tiny-bf16.manifest")
        right = all((self.target / name).read_bytes() == content for name, content in self.files.items())
        return right and names == set(self.files) and state(self.target, files).kind == "verified"


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    made = Case(tmp_path)
    monkeypatch.setenv("SLIMSERVE_PROFILES", str(made.registry))
    monkeypatch.setenv("SLIMSERVE_CACHE", str(made.cache))
    monkeypatch.setattr(hub, "download", None)  # nobody is asked for anything
    return made


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(words)
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return status, err


def test_it_is_copied_and_verified(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([PROFILE, "--fetch"]) == 0
    assert f"weights are complete in {case.target}" in capsys.readouterr().err
    assert case.complete()
    assert not store.partial(case.target).exists()
    # The copy is one: what happens to it is no matter to the registry.
    (case.target / "config.json").write_text("{}")
    assert main([PROFILE, "--fetch"]) == 0
    assert case.complete()


def test_a_start_copies_it_by_itself(case: Case) -> None:
    registry = load_registry(case.registry)
    machine = describe(registry.platforms["box"], 1 << 30)
    session = Session(registry, machine, True, case.cache, os.environ)
    assert preparing.prepare_weights(session, session.plan(registry.default), silent) == case.target
    assert case.complete()


def test_the_listing_and_the_plan_say_where_it_comes_from(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--on", "box"]) == 0
    assert "weights come with slimserve; they are copied at the first start, or with --fetch" in capsys.readouterr().out
    assert main(["--list", "--json", "--on", "box"]) == 0
    (row,) = (row for row in json.loads(capsys.readouterr().out)["profiles"] if row["id"] == PROFILE)
    assert (row["bundled"], row["fetchable"], row["weights_ready"]) == (True, True, False)
    assert main([PROFILE, "--plan", "--on", "box"]) == 0
    out = capsys.readouterr().out
    assert "bf16, tiny, which comes with slimserve\n" in out
    assert "  weights   they come with slimserve, and copying them takes up to 0 MiB of disk\n" in out


def test_half_a_copy_is_made_anew(case: Case) -> None:
    (model, _) = sorted(read_manifest(case.registry / "weights/tiny-bf16.manifest"), key=lambda file: -file.bytes)
    for content in (b"h", b"\0" * model.bytes):
        part = store.part(case.target, model)
        put(part.parent, {part.name: content})
        assert main([PROFILE, "--fetch"]) == 0
        assert case.complete()
        shutil.rmtree(case.target)


@pytest.mark.parametrize("calls", range(1, 5))
def test_a_kill_between_any_two_renames(case: Case, calls: int) -> None:
    pid = os.fork()
    if pid == 0:
        left, inner = calls, (os.replace, os.rename)

        def step(number: int, *paths: str) -> None:
            nonlocal left
            left -= "weights" in str(paths[1])
            if left == 0:
                os._exit(9)
            inner[number](*paths)

        os.replace = lambda *paths: step(0, *paths)  # type: ignore[assignment]
        os.rename = lambda *paths: step(1, *paths)  # type: ignore[assignment]
        main([PROFILE, "--fetch"])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert not case.target.exists()
    assert main([PROFILE, "--fetch"]) == 0
    assert case.complete()


def test_an_altered_byte_is_named_and_nothing_of_it_is_used(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(case.files["model.safetensors"])
    data[-1] ^= 1
    put(case.bundle, {"model.safetensors": bytes(data)})
    status, err = refused(capsys, PROFILE, "--fetch")
    assert status == Failed.exit_code
    assert "model.safetensors has sha256" in err
    assert f"do:  restore {case.bundle}, or install slimserve again" in err
    assert not case.target.exists()
    put(case.bundle, case.files)
    assert main([PROFILE, "--fetch"]) == 0
    assert case.complete()


def test_a_file_that_goes_while_it_is_fetched_is_named(case: Case) -> None:
    registry = load_registry(case.registry)
    machine = describe(registry.platforms["box"], 1 << 30)
    session = Session(registry, machine, True, case.cache, os.environ)
    (case.bundle / "config.json").unlink()
    with pytest.raises(Failed, match=r"config\.json cannot be read: No such file"):
        preparing.prepare_weights(session, session.plan(registry.default), silent)


def elsewhere(path: Path) -> None:
    """The same, behind a link that leads out of the registry."""
    other = path.parents[2] / f"other-{path.name}"
    path.rename(other)
    path.symlink_to(other)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


FAULTS: list[tuple[str, Callable[[Case], object], str]] = [
    ("no folder", lambda case: shutil.rmtree(case.bundle), "weights/tiny cannot be read: No such file"),
    ("no file", lambda case: (case.bundle / "config.json").unlink(), "config.json cannot be read: No such file"),
    ("short file", lambda case: put(case.bundle, {"config.json": b"{}"}), "config.json is 2 bytes long, its manifest"),
    ("folder for a file", lambda case: a_folder(case.bundle / "config.json"), "config.json is not a file"),
    ("pipe for a file", lambda case: a_pipe(case.bundle / "config.json"), "config.json is not a file"),
    ("linked file", lambda case: elsewhere(case.bundle / "config.json"), "config.json leads elsewhere"),
    ("linked folder", lambda case: elsewhere(case.bundle), "weights/tiny leads elsewhere"),
    ("endless link", lambda case: endless(case.bundle / "config.json"), "config.json cannot be read: Too many levels"),
    (
        "broken manifest",
        lambda case: put(case.registry / "weights", {"tiny-bf16.manifest": b"x"}),
        "tiny-bf16.manifest:1",
    ),
]


@pytest.mark.parametrize(("spoil", "says"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_a_bundle_that_is_not_whole_is_a_fault_of_the_registry(
    case: Case, spoil: Callable[[Case], object], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(case)
    status, err = refused(capsys, "--list")
    assert status == 2
    line = (case.registry / MODEL).read_text()[: (case.registry / MODEL).read_text().index("bundled")].count("\n") + 1
    assert f"{MODEL}:{line}: checkpoints.bf16.bundled = tiny: " in err
    assert says in err


def test_a_registry_that_is_reached_through_a_link_is_whole(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(case.registry)
    monkeypatch.setenv("SLIMSERVE_PROFILES", str(tmp_path / "link"))
    assert main([PROFILE, "--fetch"]) == 0
    assert case.complete()


@pytest.mark.parametrize("name", ["../tiny", "..", "/etc", "a/b", ".tiny", "tiny/", "Tiny", "", "a\\b"])
def test_a_name_that_is_a_path_is_refused(case: Case, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    case.edit("bundled: tiny", f"bundled: {json.dumps(name)}")
    status, err = refused(capsys, "--list")
    assert status == 2
    assert f"checkpoints.bf16.bundled = {json.dumps(name)} is not valid" in err
    assert "lower-case letters, digits, dots and hyphens" in err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"manifest": None, "unlisted": "why not"}, "a manifest is needed"),
        ({"bytes": BUNDLED_BYTES + 1}, f"bytes is above {BUNDLED_BYTES}"),
        ({"generated": "write it"}, "exactly one source is needed: huggingface, package, bundled or generated"),
    ],
)
def test_what_a_model_file_may_say_of_it(change: dict[str, object], says: str) -> None:
    data = {"bundled": "tiny", "licence": "none", "manifest": "tiny", "bytes": BUNDLED_BYTES}
    assert build(Checkpoint, data).is_fetchable
    with pytest.raises(ShapeError, match=says):
        build(Checkpoint, {**data, **change})


def test_its_manifest_is_printed(case: Case, tmp_path: Path) -> None:
    put(case.bundle / "sub", {"part.bin": b"12"})
    put(case.bundle, {".hidden": b"x"})
    command = [sys.executable, "-m", "harness.manifest", str(case.bundle)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    put(tmp_path, {"new.manifest": done.stdout.encode()})
    files = read_manifest(tmp_path / "new.manifest")
    assert [file.name for file in files] == ["config.json", "model.safetensors", "sub/part.bin"]
    assert done.stdout.startswith(f"# {sum(file.bytes for file in files)} bytes in 3 files\n")
    assert check(case.bundle, files) == []
    assert subprocess.run([*command[:-1], "nowhere"], cwd=ROOT, capture_output=True).returncode == 1


def test_all_that_comes_with_slimserve_is_as_listed_and_has_a_card(tmp_path: Path) -> None:
    registry = load_registry(ROOT / "profiles")
    found = [one for model in registry.models.values() for one in model.checkpoints.values() if one.bundled is not None]
    for checkpoint in found:
        folder = ROOT / "profiles/weights" / str(checkpoint.bundled)
        assert (folder / CARD).is_file()
        (tmp_path / "new.manifest").write_text(listing(folder))
        assert set(read_manifest(tmp_path / "new.manifest")) == set(manifest(ROOT / "profiles", checkpoint))
