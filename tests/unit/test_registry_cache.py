"""The kept registry: the same as the one that is read, never older than its files, and no way to run anything."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import time
from pathlib import Path

import pytest

from slimserve import registry_cache, registry_files
from slimserve.errors import RegistryError
from slimserve.registry import Registry

GOOD = Path(__file__).parent.parent / "registry"
RESERVED = frozenset({"VLLM_OURS"})
PROFILE = "tiny-bf16-box.yaml"


class Case:
    """A registry and a cache of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder, self.cache = tmp_path / "registry", tmp_path / "cache"
        shutil.copytree(GOOD, self.folder)

    def load(self) -> Registry:
        return registry_cache.load(self.folder, RESERVED, self.cache)

    @property
    def kept(self) -> list[Path]:
        return sorted((self.cache / "registry").iterdir()) if (self.cache / "registry").is_dir() else []

    def edit(self, old: str, new: str) -> None:
        text = (self.folder / PROFILE).read_text()
        assert old in text
        (self.folder / PROFILE).write_text(text.replace(old, new, 1))


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(registry_cache, "_SETTLED_SECONDS", -60.0)  # the files are made a moment before
    return Case(tmp_path)


def unreadable(*args: object) -> Registry:
    raise AssertionError("the files were read")


def test_what_is_kept_is_what_was_read(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    read = case.load()
    assert read == registry_files.load_registry(case.folder, RESERVED)
    with monkeypatch.context() as patch:
        patch.setattr(registry_files, "load_registry", unreadable)
        assert case.load() == read
    assert [path.stat().st_mode & 0o777 for path in case.kept] == [0o600]


@pytest.mark.parametrize("moment", ["later", "hidden"])
def test_a_changed_file_is_read(case: Case, moment: str) -> None:
    before, status = case.load(), (case.folder / PROFILE).stat()
    case.edit("title: ", "title: X")
    case.edit("X", "")
    case.edit("title: T", "title: Z")
    if moment == "hidden":  # of the same size, and its time set back
        os.utime(case.folder / PROFILE, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = case.load()
    assert after != before
    assert after.profiles[PROFILE.removesuffix(".yaml")].title.startswith("Z")


def test_a_problem_is_told_each_time_and_its_registry_never_kept(case: Case) -> None:
    case.load()
    (case.folder / PROFILE).unlink()
    (case.folder / "broken.yaml").write_text("id: [")
    for _ in range(2):
        with pytest.raises(RegistryError):
            case.load()
    assert len(case.kept) == 1


@pytest.mark.parametrize("name", ["note", "receipts/new.json", "receipts/2026/deep.json", "tiny.yaml/"])
def test_whatever_lies_below_the_folder_counts_too(case: Case, name: str) -> None:
    case.load()
    path = case.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith("/"):
        path.mkdir()
        with pytest.raises(RegistryError):
            case.load()
    else:
        path.write_text("{}")
        case.load()
        assert len(case.kept) == 2


def test_a_folder_with_too_much_in_it_is_read(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_cache, "_MOST_FILES", 5)
    assert case.load().default
    assert not case.kept


def test_what_just_changed_is_not_kept(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_cache, "_SETTLED_SECONDS", 2.0)
    os.utime(case.folder / PROFILE, (time.time(), time.time()))
    case.load()
    assert not case.kept


class Command:
    """What a pickle can do."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


def named(name: str) -> bytes:
    """A pickle that calls what `slimserve.registry` has under a name, with the text `"touch ran"`."""
    text = [pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode() for word in ("slimserve.registry", name)]
    argument = pickle.SHORT_BINUNICODE + bytes([9]) + b"touch ran" + pickle.TUPLE1
    return pickle.PROTO + b"\x04" + b"".join(text) + pickle.STACK_GLOBAL + argument + pickle.REDUCE + pickle.STOP


CONTENTS = [b"", b"garbage", pickle.dumps(Command()), pickle.dumps({}), "cut", "open", "link", "folder"]
NAMES = ["Path", "dataclass", "nearest", "Registry.__init__", "dataclass.__builtins__.get", "Id", "Annotated"]


@pytest.mark.parametrize("content", [*CONTENTS, *map(named, NAMES)])
def test_a_kept_file_that_is_no_registry_is_passed_over(
    case: Case, content: bytes | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, (kept,) = case.load(), case.kept
    monkeypatch.chdir(tmp_path)
    if isinstance(content, bytes):
        kept.write_bytes(content)
    elif content == "cut":
        kept.write_bytes(kept.read_bytes()[:-100])
    elif content == "link":
        kept.rename(tmp_path / "elsewhere")
        kept.symlink_to(tmp_path / "elsewhere")
    elif content == "folder":
        kept.parent.chmod(0o777)
    else:
        kept.chmod(0o666)
    if not isinstance(content, bytes) and content != "cut":  # others could have written it
        monkeypatch.setattr(registry_cache, "_Reader", unreadable)
    assert case.load() == read
    assert not (tmp_path / "ran").exists()
    assert case.load() == read


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_classes_of_a_registry_can_be_named(name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=f"{name} is no part of a registry"):
        registry_cache._Reader(io.BytesIO(named(name))).load()


def test_without_a_cache_it_is_read(case: Case) -> None:
    assert registry_cache.load(case.folder, RESERVED, None) == case.load()


@pytest.mark.parametrize("there", ["file", "file-within"])
def test_without_a_folder_to_keep_it_in_it_is_read(case: Case, there: str) -> None:
    place = case.cache if there == "file" else case.cache / "registry"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("mine")
    assert case.load().default
    assert place.read_text() == "mine"


def test_a_folder_that_is_not_there_is_told_as_ever(case: Case) -> None:
    shutil.rmtree(case.folder)
    with pytest.raises(RegistryError, match="cannot be read"):
        case.load()


def test_few_are_kept(case: Case) -> None:
    for number in range(7):
        (case.folder / "note").write_text("." * number)
        case.load()
    assert len(case.kept) == 4
