"""The manifest format: what it takes, what it refuses and with which line, and the manifests that are committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimserve.errors import RegistryError
from slimserve.model import HuggingFace
from slimserve.shapes import ShapeError, build
from slimserve.weights import ManifestFile, read_manifest
from slimserve.weights.manifest_file import MAX_BYTES, digest

PROFILES = Path(__file__).parents[2] / "profiles"
SHA256, SHA1 = "a" * 64, "b" * 40


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.manifest"
    path.write_text(text)
    return path


def test_both_kinds_of_line_and_comments(tmp_path: Path) -> None:
    text = f"# from somewhere\n\nsha256:{SHA256}  5  a/b c.safetensors\r\ngit-blob-sha1:{SHA1}  0  config.json\n"
    assert read_manifest(write(tmp_path, text)) == (
        ManifestFile("a/b c.safetensors", 5, "sha256", SHA256),
        ManifestFile("config.json", 0, "git-blob-sha1", SHA1),
    )


BAD = {
    f"sha256:{SHA256} 5 one-space": "two spaces",
    f"md5:{'a' * 32}  5  x": "'md5' is not a known hash",
    f"{SHA256}  5  x": "is not a known hash",
    f"sha256:{SHA256[:-1]}  5  x": "64 lower-case hex digits, here are 63",
    f"sha256:{SHA1}  5  x": "here are 40",
    f"git-blob-sha1:{SHA256}  5  x": "40 lower-case hex digits",
    f"sha256:{'A' * 64}  5  x": "lower-case",
    f"sha256:{'g' * 64}  5  x": "hex digits",
    f"sha256:{SHA256}  -5  x": "'-5' is not a size",
    f"sha256:{SHA256}  5.0  x": "'5.0' is not a size",
    f"sha256:{SHA256}  \u0665  x": "is not a size",
    f"sha256:{SHA256}  {10**18}  x": "is not a size",
    f"sha256:{SHA256}  5  ": "not a plain relative path",
    f"sha256:{SHA256}  5  ../x": "not a plain relative path",
    f"sha256:{SHA256}  5  a/../../x": "not a plain relative path",
    f"sha256:{SHA256}  5  /etc/passwd": "not a plain relative path",
    f"sha256:{SHA256}  5  a//b": "not a plain relative path",
    f"sha256:{SHA256}  5  a\\b": "not a plain relative path",
    f"sha256:{SHA256}  5  .verified.json": "not a plain relative path",
    f"sha256:{SHA256}  5  a/.under-way": "not a plain relative path",
    f"sha256:{SHA256}  5  a\x07b": "not a plain relative path",
    f"sha256:{SHA256}  5   x": "not a plain relative path",
    f"sha256:{SHA256}  5  {'x' * 256}": "not a plain relative path",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(RegistryError) as caught:
        read_manifest(write(tmp_path, f"# c\nsha256:{SHA256}  5  good\n{line}\n"))
    (finding,) = caught.value.findings
    assert BAD[line] in finding.what
    assert finding.where == f"{tmp_path}/x.manifest:3"


def test_all_bad_lines_at_once_and_duplicates(tmp_path: Path) -> None:
    good = f"sha256:{SHA256}  5  x"
    with pytest.raises(RegistryError) as caught:
        read_manifest(write(tmp_path, "\n".join([good, *BAD, good])))
    assert len(caught.value.findings) == len(BAD) + 1
    assert caught.value.findings[-1].what == "x is listed twice"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("content", [b"", b"# only a comment\n", b"\xff\xfe\n", b"#" * (MAX_BYTES + 1)])
def test_what_is_no_manifest(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.manifest"
    path.write_bytes(content)
    with pytest.raises(RegistryError, match="manifest"):
        read_manifest(path)


def test_a_missing_manifest_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.manifest", tmp_path):
        with pytest.raises(RegistryError, match=r"cannot be read|empty or larger"):
            read_manifest(path)


def test_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    lines = [f"sha256:{SHA256}  5  x", f"sha256:{SHA256}  6  y"]
    one = read_manifest(write(tmp_path, "\n".join(lines)))
    two = read_manifest(write(tmp_path, "# c\n" + "\n".join(reversed(lines))))
    assert digest(one) == digest(two) != digest(one[:1])


def test_hashes_are_the_tools_own() -> None:
    # `printf hello | git hash-object --stdin` and `printf hello | sha256sum`
    blob = ManifestFile("x", 5, "git-blob-sha1", "").hasher()
    blob.update(b"hello")
    assert blob.hexdigest() == "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"
    plain = ManifestFile("x", 5, "sha256", "").hasher()
    plain.update(b"hello")
    assert plain.hexdigest() == "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


@pytest.mark.parametrize(
    ("name", "shards", "total"),
    [
        ("qwen38-flash-next-fp8", 131, 185_523_317_458),
        ("qwen38-flash-next-nvfp4-radixark", 206, 135_195_303_851),
        ("smollm2-135m-instruct-bf16", 1, 269_060_552),
    ],
)
def test_committed_manifests(name: str, shards: int, total: int) -> None:
    manifest = read_manifest(PROFILES / "weights" / f"{name}.manifest")
    weights = [file for file in manifest if file.name.endswith(".safetensors")]
    assert (len(weights), sum(file.bytes for file in weights)) == (shards, total)
    assert all(file.kind == "sha256" for file in weights)
    names = {file.name for file in manifest}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not {"README.md", ".gitattributes"} & names
    assert shards == 1 or "model.safetensors.index.json" in names


def test_a16_only_a_commit_pins_a_revision() -> None:
    for moving in ("main", "v1.0", "0123456", "0" * 39, "G" * 40, "A" * 40):
        with pytest.raises(ShapeError):
            build(HuggingFace, {"repo": "a/b", "revision": moving})
