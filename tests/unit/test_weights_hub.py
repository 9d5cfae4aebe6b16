"""Fetching from a Hub: a real server that cuts, lies, stalls and refuses, and a client that is killed."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from weights_support import REPO, REVISION, Hub, hub_checkpoint, manifest_of, put, sharded

from slimserve.errors import Failed, Refused, SlimserveError
from slimserve.weights import Manifest, check, hub, state, store, transfer

BIG = "layer-00-experts.safetensors"
DRIVER = Path(__file__).with_name("weights_driver.py")
ROOT = Path(__file__).parents[2]


def silent(done: int, total: int, name: str) -> None:
    assert 0 <= done <= total, name


class Case:
    """A hub, the manifest of what it has, and where the checkpoint goes."""

    def __init__(self, server: Hub, folder: Path) -> None:
        self.hub, self.manifest, self.target = server, manifest_of(server.files), folder / "cache" / "m" / "fp8-0123"
        self.checkpoint = hub_checkpoint(self.manifest, REPO, REVISION)
        self.environ = {"HF_ENDPOINT": server.url}

    def fetch(self, free: int = 1 << 40, manifest: Manifest | None = None, **more: str) -> None:
        environ = {**self.environ, **more}
        transfer.fetch(self.checkpoint, self.target, manifest or self.manifest, silent, environ, lambda path: free)

    def refused(self, kind: type[SlimserveError] = Failed, **more: str) -> str:
        with pytest.raises(kind) as caught:
            self.fetch(**more)
        return str(caught.value)

    def start(self, **more: str) -> subprocess.Popen[str]:
        path = self.target.parent.parent / "list.manifest"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{f.kind}:{f.hex}  {f.bytes}  {f.name}\n" for f in self.manifest))
        argv = [sys.executable, str(DRIVER), str(self.target), str(path), REPO, REVISION]
        environment = {**os.environ, **self.environ, "PYTHONPATH": str(ROOT), **more}
        return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)

    def complete(self) -> bool:
        there = {name: (self.target / name).read_bytes() for name in self.hub.files}
        return (
            there == self.hub.files
            and check(self.target, self.manifest) == []
            and not store.partial(self.target).exists()
        )


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with Hub(sharded(tmp_path, size=1 << 20)) as server:
        yield Case(server, tmp_path)


def test_everything_arrives_verified_and_once(case: Case) -> None:
    assert state(case.target, case.manifest).kind == "absent"
    case.fetch()
    assert case.complete()
    assert state(case.target, case.manifest).kind == "verified"
    before = len(case.hub.requests)
    case.fetch()
    assert len(case.hub.requests) == before


def test_a_kill_in_mid_file_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    # The library writes what has arrived in pieces of ten megabytes: two of them are there when the kill comes.
    piece = 10 << 20
    with Hub({"config.json": b"{}", "x.safetensors": os.urandom(24 << 20), "y.safetensors": b"y"}) as server:
        case = Case(server, tmp_path)
        server.switches.stall_after = 23 << 20
        child = case.start()
        assert server.stalled.wait(60)
        part = store.part(case.target, case.manifest[1])
        deadline = time.monotonic() + 30
        while not part.exists() or part.stat().st_size < 2 * piece:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        child.kill()
        child.wait()
        server.switches.stall_after = None
        assert state(case.target, case.manifest) == store.State("partial", 2 + 2 * piece)
        case.fetch()
        assert {name: (case.target / name).read_bytes() for name in server.files} == server.files
        assert [request.start for request in server.gets("x.safetensors")] == [0, 2 * piece]
        assert len(server.gets("config.json")) == len(server.gets("y.safetensors")) == 1


@pytest.mark.parametrize("calls", range(1, 12))
def test_a_kill_between_any_two_steps(case: Case, calls: int) -> None:
    """The process ends at the n-th rename; whatever was left, the next attempt completes it."""
    pid = os.fork()
    if pid == 0:
        left, replace, rename = calls, os.replace, os.rename

        def counted(inner: Callable[..., None]) -> Callable[..., None]:
            def step(*paths: object) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os._exit(9)
                inner(*paths)

            return step

        os.replace, os.rename = counted(replace), counted(rename)
        case.fetch()
        os._exit(0)
    os.waitpid(pid, 0)
    case.fetch()
    assert case.complete()
    assert state(case.target, case.manifest).kind == "verified"
    for name in case.hub.files:
        assert len(case.hub.gets(name)) == 1, name


def test_a_connection_that_breaks_is_continued_by_itself(tmp_path: Path) -> None:
    with Hub({"x.safetensors": os.urandom(24 << 20)}) as server:
        case = Case(server, tmp_path)
        server.switches.drop_after, server.switches.drops = 11 << 20, 1
        case.fetch()
        assert (case.target / "x.safetensors").read_bytes() == server.files["x.safetensors"]
        assert [request.start for request in server.gets("x.safetensors")] == [0, 10 << 20]


def test_a_server_without_byte_ranges_starts_anew(case: Case) -> None:
    case.hub.switches.ignore_range = True
    put(
        store.partial(case.target) / store.UNDER_WAY,
        {store.part(case.target, case.manifest[0]).name: case.hub.files[BIG][:1000]},
    )
    case.fetch()
    assert case.complete()


def test_wrong_bytes_are_removed_and_named(case: Case) -> None:
    case.hub.switches.wrong_bytes = True
    text = case.refused()
    assert f"{BIG} has sha256" in text
    assert f"the manifest says {case.manifest[0].hex}" in text
    assert "what arrived was removed" in text
    assert not store.part(case.target, case.manifest[0]).exists()
    assert not case.target.exists()
    case.hub.switches.wrong_bytes = False
    case.fetch()
    assert case.complete()


@pytest.mark.parametrize("left", [b"garbage", b"g" * 3_000_000, b""])
def test_what_an_earlier_attempt_left_is_not_trusted(case: Case, left: bytes) -> None:
    put(store.partial(case.target) / store.UNDER_WAY, {store.part(case.target, case.manifest[0]).name: left})
    case.fetch()
    assert case.complete()


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "", ("answered 401", "HF_TOKEN")),
        (403, "GatedRepo", ("answered 403", "licence")),
        (404, "RepoNotFound", ("answered 404", "does not exist, is private")),
        (404, "RevisionNotFound", ("the pinned revision is gone",)),
        (404, "EntryNotFound", ("has no such file",)),
        (500, "", ("answered 500", "busy or out of order")),
    ],
)
def test_what_the_hub_refuses(case: Case, status: int, code: str, words: tuple[str, ...]) -> None:
    case.hub.switches.status, case.hub.switches.error_code = status, code
    text = case.refused()
    for word in (REPO, *words):
        assert word in text
    assert "Traceback" not in text


def test_the_token_is_sent(case: Case) -> None:
    case.hub.switches.token = "hf_secret"
    assert "HF_TOKEN" in case.refused(HF_TOKEN="hf_wrong")
    case.fetch(HF_TOKEN="hf_secret")
    assert case.complete()


def test_another_commit_size_or_hash_is_found_before_the_download(case: Case) -> None:
    case.hub.switches.commit = "f" * 40
    assert f"the Hub answered with commit {'f' * 40}" in case.refused()
    case.hub.switches.commit = REVISION
    case.hub.switches.etag = "e" * 64
    assert f"{BIG} has sha256 {'e' * 64} on the Hub" in case.refused()
    case.hub.switches.etag = None
    case.hub.files[BIG] += b"more"
    assert "bytes on the Hub" in case.refused()
    assert [request for request in case.hub.requests if request.method == "GET"] == []


def test_no_network_is_a_sentence(case: Case) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: refused at once
        text = case.refused(HF_ENDPOINT=f"http://127.0.0.1:{free.getsockname()[1]}")
    assert "did not arrive from http://127.0.0.1" in text
    assert "HF_ENDPOINT" in text
    assert store.partial(case.target).is_dir()


def test_offline_is_a_sentence(case: Case) -> None:
    child = case.start(HF_HUB_OFFLINE="1")
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "HF_HUB_OFFLINE forbids to fetch it" in out


def test_b5_a_slow_download_is_not_cut_by_a_deadline(tmp_path: Path) -> None:
    with Hub({"x.safetensors": os.urandom(4000)}) as server:
        case = Case(server, tmp_path)
        server.switches.bytes_per_second = 1000
        # Four seconds of download under a limit of one second without any byte.
        child = case.start(HF_HUB_DOWNLOAD_TIMEOUT="1", HF_HUB_ETAG_TIMEOUT="1")
        out, _ = child.communicate(timeout=60)
        assert child.returncode == 0, out
        assert len(server.gets("x.safetensors")) == 1


def test_too_little_space_is_refused_before_the_first_byte(case: Case) -> None:
    needed = case.checkpoint.bytes
    with pytest.raises(Refused, match=f"{needed} bytes are needed at .*, {needed - 1} are free"):
        case.fetch(free=needed - 1)
    assert case.hub.requests == []
    put(store.partial(case.target), {"config.json": case.hub.files["config.json"]})
    case.fetch(free=needed - len(case.hub.files["config.json"]))
    assert case.complete()


def test_a_disk_that_fills_up_on_the_way(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    part, download = store.part(case.target, case.manifest[0]), hub.download

    def on_a_full_disk(*arguments: Any) -> None:
        part.symlink_to("/dev/full")  # writes to it fail as they do on a full disk
        download(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(hub, "download", on_a_full_disk)
        text = case.refused()
    assert os.strerror(errno.ENOSPC) in text
    assert "what has arrived is kept" in text
    part.unlink()
    case.fetch()
    assert case.complete()


def as_nobody(action: Callable[[], None]) -> str:
    """Run `action` in a fork that may not write what root wrote; the text of its error."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            action()
            text = "no error"
        except SlimserveError as error:
            text = str(error)
        except BaseException as error:
            text = repr(error)
        os.write(writer, text.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read().decode()
    os.waitpid(pid, 0)
    return text


def test_no_permission_is_a_sentence_and_nothing_is_lost(case: Case) -> None:
    case.fetch()
    for path in case.target.iterdir():
        path.chmod(0o444)
    parent = case.target.parent
    other = Case(case.hub, parent)
    other.target = parent / "other"
    parent.chmod(0o555)
    for folder in parent.parents:
        if folder.stat().st_uid == os.getuid() and str(folder).startswith("/tmp/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    text = as_nobody(other.fetch)
    parent.chmod(0o755)
    assert os.strerror(errno.EACCES) in text
    assert "SLIMSERVE_CACHE" in text
    assert case.complete()


def test_a_file_in_the_way_of_the_folder(case: Case) -> None:
    case.target.parent.parent.mkdir(parents=True)
    case.target.parent.write_text("mine")
    assert "File exists" in case.refused()
    assert case.target.parent.read_text() == "mine"


def test_two_writers(case: Case) -> None:
    case.hub.switches.stall_after = 1000
    child = case.start()
    assert case.hub.stalled.wait(60)
    text = case.refused(kind=Refused)
    assert f"process {child.pid} is fetching" in text
    case.hub.switches.go.set()
    assert child.wait(60) == 0
    assert case.complete()
    case.fetch()


def test_a_damaged_checkpoint_is_mended_with_one_file(case: Case) -> None:
    case.fetch()
    before = len(case.hub.requests)
    (case.target / "odd name (1).safetensors").write_bytes(b"\0" * len(case.hub.files["odd name (1).safetensors"]))
    (case.target / "notes.txt").write_text("mine")
    case.fetch()
    assert case.complete()
    assert {request.name for request in case.hub.requests[before:]} == {"odd name (1).safetensors"}
    assert (case.target / "notes.txt").read_text() == "mine"


def test_a_truncated_file_is_continued(case: Case) -> None:
    case.fetch()
    os.truncate(case.target / BIG, 5000)
    case.fetch()
    assert case.complete()
    assert case.hub.gets(BIG)[-1].start == 5000


def test_an_unverified_copy_is_only_hashed(case: Case) -> None:
    put(case.target, case.hub.files)
    case.fetch()
    assert case.hub.requests == []
    assert state(case.target, case.manifest).kind == "verified"


def test_a_damaged_target_beside_work_that_was_begun(case: Case) -> None:
    put(case.target, {"config.json": case.hub.files["config.json"], "notes.txt": b"mine"})
    put(store.partial(case.target), {BIG: case.hub.files[BIG]})
    case.fetch()
    assert case.complete()
    assert case.hub.gets(BIG) == case.hub.gets("config.json") == []
    assert (case.target.with_name(case.target.name + ".replaced-1") / "notes.txt").read_bytes() == b"mine"
