"""Keys as an operator handles them: added, removed, listed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from keys_support import ALICE, BOB, line, write

from slimserve import paths
from slimserve.admission.keys import digest, is_usable, load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}


def slimserve(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "slimserve", *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr
    return done


def test_where_the_file_lies(tmp_path: Path) -> None:
    assert paths.keys_file({"HOME": "/home/a"}) == Path("/home/a/.config/slimserve/keys")
    assert paths.keys_file({"HOME": "/home/a", "XDG_CONFIG_HOME": "/xdg"}) == Path("/xdg/slimserve/keys")
    assert paths.keys_file({"SLIMSERVE_KEYS": str(tmp_path / "k")}) == tmp_path / "k"


def test_a_key_is_printed_once_and_kept_as_a_hash(environment: dict[str, str]) -> None:
    done = slimserve(environment, "--add-key", "alice")
    key = done.stdout.removesuffix("\n")
    assert key.startswith("sk-slim-")
    assert len(key) == len("sk-slim-") + 43
    assert is_usable(key)
    file = paths.keys_file(environment)
    assert f"alice is added to {file}" in done.stderr
    assert load(file) == {"alice": digest(key)}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    listed = slimserve(environment, "--list-keys")
    assert listed.stdout == f"{digest(key)[:8]}  alice\n"
    as_json = json.loads(slimserve(environment, "--list-keys", "--json").stdout)
    assert as_json == [{"name": "alice", "sha256_prefix": digest(key)[:8]}]
    assert all(key not in path.read_text() for path in file.parent.iterdir())
    assert key not in listed.stdout + listed.stderr + done.stderr


@pytest.mark.parametrize("stdout", [">&-", ">/dev/full"])
def test_a_key_that_cannot_be_shown_is_not_kept(stdout: str, environment: dict[str, str]) -> None:
    slimserve(environment, "--add-key", "alice")
    file = paths.keys_file(environment)
    before = file.read_text()
    command = f"{sys.executable} -m slimserve --add-key bob {stdout}"
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the output cannot be used" in done.stderr
    assert "is added" not in done.stderr
    assert file.read_text() == before
    assert not list(file.parent.glob(".keys.*"))
    assert slimserve(environment, "--add-key", "bob").returncode == 0


def test_a_key_whose_reader_went_away_is_not_kept(environment: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "slimserve", "--add-key", "alice"]
    done = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
    assert not paths.keys_file(environment).exists()


def test_adding_keeps_what_is_there(environment: dict[str, str], tmp_path: Path) -> None:
    file = write(tmp_path / "real", f"# ours\n{line('alice', ALICE).strip()}")  # no line feed at its end
    (tmp_path / "link").symlink_to(file)
    environment["SLIMSERVE_KEYS"] = str(tmp_path / "link")
    key = slimserve(environment, "--add-key", "bob").stdout.strip()
    assert file.read_text().startswith(f"# ours\n{line('alice', ALICE)}bob sha256:{digest(key)}  # added ")
    assert (tmp_path / "link").is_symlink()


def test_two_at_once_lose_nothing(environment: dict[str, str]) -> None:
    names = [f"key-{number}" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        keys = list(pool.map(lambda name: slimserve(environment, "--add-key", name).stdout.strip(), names))
    added = {name: digest(key) for name, key in zip(names, keys, strict=True)}
    assert load(paths.keys_file(environment)) == added
    assert not list(paths.keys_file(environment).parent.glob(".keys.*"))


def test_removing_takes_one_and_says_when_it_was_the_last(environment: dict[str, str]) -> None:
    file = paths.keys_file(environment)
    file.parent.mkdir(parents=True)
    write(file, f"# ours\n{line('alice', ALICE)}{line('alice-2', BOB)}")
    assert "no key is left" not in slimserve(environment, "--remove-key", "alice").stderr
    assert file.read_text() == f"# ours\n{line('alice-2', BOB)}"
    unknown = slimserve(environment, "--remove-key", "alice2")
    assert unknown.returncode == 2
    assert "did you mean alice-2?" in unknown.stderr
    assert "no key is left: nobody is admitted" in slimserve(environment, "--remove-key", "alice-2").stderr
    assert file.read_text() == "# ours\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--add-key", ""], 2, "is no name"),
        (["--add-key", "Alice"], 2, "is no name"),
        (["--add-key", "environment"], 2, "no key may be named environment"),
        (["--remove-key", "alice"], 2, "there is no key named alice"),
        (["--add-key", "alice", "--list-keys"], 2, "not allowed with"),
        (["smollm2-135m-bf16-cpu", "--add-key", "alice"], 2, "--add-key takes no profile"),
        (["--add-key", "alice", "--port", "9"], 2, "--port says nothing to --add-key"),
        (["smollm2-135m-bf16-cpu", "-p", "x", "--host", "0.0.0.0"], 3, "--host 0.0.0.0 is not loopback"),
        (["smollm2-135m-bf16-cpu", "-p", "x", "--origin", "http://a"], 2, "--origin says nothing to a chat"),
        (["smollm2-135m-bf16-cpu", "--serve", "--origin", "*"], 2, "--origin * is not the origin of a page"),
    ],
)
def test_wrong_uses(environment: dict[str, str], arguments: list[str], status: int, says: str) -> None:
    done = slimserve(environment, *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert says in done.stderr
    assert not paths.keys_file(environment).exists()


def test_a_place_that_cannot_be_written_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing" / "keys")
    write(tmp_path / "a-file", "")
    for place in (tmp_path / "nowhere", tmp_path / "a-file" / "keys"):
        done = slimserve({**environment, "SLIMSERVE_KEYS": str(place)}, "--add-key", "alice")
        assert (done.returncode, done.stdout) == (3, "")
        assert f"the keys file {place} cannot be written" in done.stderr


@pytest.mark.parametrize("action", ["--add-key", "--remove-key"])
def test_a_place_that_can_be_no_file_is_refused(environment: dict[str, str], tmp_path: Path, action: str) -> None:
    for place in ("/", "/tmp/..", str(tmp_path), str(tmp_path / ("a" * 252))):
        done = slimserve({**environment, "SLIMSERVE_KEYS": place}, action, "alice")
        assert (done.returncode, done.stdout) in ((3, ""), (2, ""))
        assert "Traceback" not in done.stderr
        assert f"the keys file {place} cannot be " in done.stderr or f"{place} does not exist" in done.stderr


@pytest.mark.parametrize("length", [250, 300])
def test_a_name_that_is_too_long_is_refused(environment: dict[str, str], tmp_path: Path, length: int) -> None:
    """Of the name itself, or of those of the files that lie beside it for a moment."""
    place = str(tmp_path / ("a" * length))
    done = slimserve({**environment, "SLIMSERVE_KEYS": place}, "--add-key", "alice")
    assert (done.returncode, done.stdout) == (2 if length > 255 else 3, "")
    assert "File name too long" in done.stderr


def test_a_wrong_file_is_not_written_over(environment: dict[str, str], tmp_path: Path) -> None:
    file = write(tmp_path / "keys", "garbage\n")
    done = slimserve({**environment, "SLIMSERVE_KEYS": str(file)}, "--add-key", "alice")
    assert (done.returncode, done.stdout) == (3, "")
    assert f"{file}:1: the line holds no key" in done.stderr
    assert file.read_text() == "garbage\n"


def test_where_there_is_no_file_there_are_no_keys_yet(environment: dict[str, str], tmp_path: Path) -> None:
    for more in ({}, {"SLIMSERVE_KEYS": str(tmp_path / "named")}):
        done = slimserve(environment | more, "--list-keys")
        assert (done.returncode, done.stdout, done.stderr) == (0, "no keys yet: --add-key NAME makes one\n", "")


def test_the_commands_import_nothing_that_costs(environment: dict[str, str]) -> None:
    code = (
        "import sys\nfrom slimserve.cli import main\nmain(['--add-key', 'a']); main(['--list-keys'])\n"
        "sys.exit(str({'torch', 'vllm', 'starlette', 'uvicorn', 'httpx', 'numpy'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "{" not in done.stderr
