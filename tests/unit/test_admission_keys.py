"""Keys: the file, who holds what, and the commands; no key where it does not belong."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimserve import keys_command, paths
from slimserve.admission.keys import Keyring, digest, is_usable, load
from slimserve.admission.rejection import Rejected
from slimserve.errors import Refused, UsageError

ROOT = Path(__file__).resolve().parents[2]
ALICE, BOB = "sk-slim-alice", "sk-slim-bob"


def line(name: str, key: str) -> str:
    return f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}\n"


def write(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", b"Bearer " + key.encode())]


def admits(ring: Keyring, key: str) -> bool:
    try:
        return ring.holder(bearer(key)) is not None
    except Rejected:
        return False


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "keys", line("alice", ALICE) + line("bob", BOB))


# The file.


def test_a_file_of_keys(tmp_path: Path) -> None:
    text = f"# who may come in\n\n{line('alice', ALICE).strip()}  # her laptop\r\n  {line('bob-2.x', BOB)}"
    assert load(write(tmp_path / "keys", text)) == {"alice": digest(ALICE), "bob-2.x": digest(BOB)}
    assert load(write(tmp_path / "none", "")) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("alice\n", "keys:1: the line holds no key"),
        (f"\n\nalice {digest(ALICE)}\n", "keys:3: the line holds no key"),
        (f"Alice sha256:{digest(ALICE)}\n", "keys:1: the line holds no key"),
        (f"alice sha256:{digest(ALICE).upper()}\n", "keys:1: the line holds no key"),
        (f"alice sha256:{digest(ALICE)[1:]}\n", "keys:1: the line holds no key"),
        (f"alice sha256:{digest(ALICE)} bob\n", "keys:1: the line holds no key"),
        (f"alice sha256:{digest(ALICE)}# comment\n", "keys:1: the line holds no key"),
        ("\ufeff" + line("alice", ALICE), "keys:1: the line holds no key"),
        (line("alice", ALICE) + line("alice", BOB), "keys:2: there are two keys named alice"),
        (line("alice", ALICE) + line("bob", ALICE), "keys:2: bob is a key that has a name already"),
        (line("environment", ALICE), "keys:1: a key is named environment"),
    ],
)
def test_a_line_that_is_wrong_is_named_and_not_quoted(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(Refused) as caught:
        load(write(tmp_path / "keys", text))
    assert says in str(caught.value)
    assert digest(ALICE)[1:] not in str(caught.value)


def test_all_lines_that_are_wrong_are_named(tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        load(write(tmp_path / "keys", f"{ALICE}\n{line('bob', BOB)}{ALICE}\n"))
    assert [finding.where[-2:] for finding in caught.value.findings] == [":1", ":3"]
    assert ALICE not in str(caught.value)


def test_a_file_that_others_can_touch_is_refused_with_the_remedy(file: Path) -> None:
    for mode in (0o640, 0o604, 0o620, 0o601):
        file.chmod(mode)
        with pytest.raises(Refused, match=f"its mode is {mode:o}(.|\n)*do: +run: chmod 600 {file}"):
            load(file)


def test_what_is_no_file_of_text_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    write(tmp_path / "bytes", b"\xff\xfe")
    write(tmp_path / "huge", b"#" * ((1 << 20) + 1))
    for name, says in (
        ("pipe", "is no file"),
        ("link", "cannot be read"),
        ("bytes", "is no text"),
        ("huge", "is larger than 1 MiB"),
        (".", "cannot be read"),
    ):
        with pytest.raises(Refused, match=says):
            load(tmp_path / name)


# Who holds what.


def test_a_key_has_one_holder_in_either_header(file: Path) -> None:
    ring = Keyring(file, {"environment": digest("sk-env")})
    assert ring.required
    assert ring.holder(bearer(ALICE)) == "alice"
    assert ring.holder([(b"authorization", b"bearer  " + BOB.encode())]) == "bob"
    assert ring.holder([(b"x-api-key", BOB.encode())]) == "bob"
    assert ring.holder([(b"x-api-key", BOB.encode()), *bearer(BOB)]) == "bob"
    assert ring.holder(bearer("sk-env")) == "environment"


def test_no_key_is_asked_for_where_there_is_none() -> None:
    ring = Keyring(None, {})
    assert not ring.required
    assert ring.holder([]) is None
    assert ring.holder(bearer("anything")) is None


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Basic " + ALICE.encode())],
        [(b"authorization", ALICE.encode())],
        [(b"x-api-key", b"Bearer " + ALICE.encode())],
        [(b"x-api-key", b"")],
        [*bearer(ALICE), (b"x-api-key", b"")],
        [*bearer(ALICE), (b"x-api-key", BOB.encode())],
        [*bearer(ALICE), *bearer(ALICE)],
        [(b"x-api-key", ALICE.encode())] * 2,
        [(b"authorization", b"Bearer " + ALICE.encode() + b"\xc3\xbc")],
        [(b"authorization", b"Bearer " + ALICE.encode() + b" x")],
        [(b"authorization", b"Bearer " + ALICE.encode() + b"\0")],
        [(b"authorization", b"Bearer " + b"a" * 100_000)],
        bearer(ALICE.upper()),
        bearer(ALICE[:-1]),
        bearer(digest(ALICE)),
        bearer("alice"),
        [(b"cookie", b"key=" + ALICE.encode())],
    ],
)
def test_anything_else_is_401_and_not_quoted(file: Path, headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(Rejected) as caught:
        Keyring(file, {}).holder(headers)
    assert caught.value.status == 401
    assert caught.value.kind == "authentication_error"
    assert caught.value.headers == {"WWW-Authenticate": "Bearer"}
    assert "x-api-key: KEY" in caught.value.message
    assert ALICE.lower() not in caught.value.message.lower()


@given(value=st.binary(max_size=600), header=st.sampled_from([b"authorization", b"x-api-key"]))
def test_no_header_breaks_the_ring(value: bytes, header: bytes) -> None:
    with pytest.raises(Rejected):
        Keyring(None, {"alice": digest(ALICE)}).holder([(header, value)])


def test_all_hashes_are_compared(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    real, compared = hmac.compare_digest, []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: (compared.append(b), real(a, b))[1])
    ring = Keyring(file, {})
    for key in (ALICE, BOB, "sk-nobody"):
        compared.clear()
        admits(ring, key)
        assert compared == [digest(ALICE).encode(), digest(BOB).encode()]


# A file that changes under a running door.


def test_keys_come_and_go_without_a_restart(file: Path) -> None:
    clock = Clock()
    ring = Keyring(file, {}, clock)
    write(file, line("bob", BOB) + line("carol", "sk-carol"))
    assert admits(ring, ALICE)  # looked at no more than once a second
    clock.now += 1
    assert not admits(ring, ALICE)
    assert ring.holder(bearer("sk-carol")) == "carol"


def test_a_change_that_keeps_size_and_time_is_seen(file: Path) -> None:
    clock = Clock()
    ring = Keyring(file, {}, clock)
    before = file.stat()
    write(file, line("alice", "sk-other") + line("bob", BOB))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_ino) == (before.st_size, before.st_ino)
    clock.now += 1
    assert not admits(ring, ALICE)


def test_an_emptied_file_admits_nobody(file: Path) -> None:
    clock = Clock()
    ring = Keyring(file, {}, clock)
    write(file, "")
    clock.now += 1
    assert ring.required
    assert not admits(ring, ALICE)


@pytest.mark.parametrize("harm", ["gone", "garbage", "open", "locked folder"])
def test_a_file_that_goes_wrong_keeps_the_last_good_keys_and_is_logged_once(
    file: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    clock = Clock()
    ring = Keyring(file, {}, clock)
    text = file.read_text()
    if harm == "gone":
        file.unlink()
    elif harm == "garbage":
        write(file, text + ALICE)
    elif harm == "open":
        file.chmod(0o644)
    else:
        file.unlink()
        file.mkdir()
    with caplog.at_level(logging.INFO, "slimserve.admission"):
        for _ in range(3):
            clock.now += 1
            assert admits(ring, ALICE)
            assert not admits(ring, "sk-nobody")
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "the keys stay as they were" in caplog.text
        if harm == "locked folder":
            file.rmdir()
        write(file, line("bob", BOB))
        clock.now += 1
        assert not admits(ring, ALICE)
        assert admits(ring, BOB)
    assert ALICE not in caplog.text


def test_a_door_that_starts_beside_a_wrong_file_admits_nobody_until_it_is_mended(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    file.chmod(0o644)
    ring = Keyring(file, {"environment": digest("sk-env")}, clock)
    assert "is open to other users" in caplog.text
    assert not admits(ring, ALICE)
    assert admits(ring, "sk-env")
    file.chmod(0o600)
    clock.now += 1
    assert admits(ring, ALICE)


# The commands.


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
    assert all(key not in path.read_text() for path in file.parent.iterdir())
    assert key not in listed.stdout + listed.stderr + done.stderr


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


def test_a_wrong_file_is_not_written_over(environment: dict[str, str], tmp_path: Path) -> None:
    file = write(tmp_path / "keys", "garbage\n")
    done = slimserve({**environment, "SLIMSERVE_KEYS": str(file)}, "--add-key", "alice")
    assert (done.returncode, done.stdout) == (3, "")
    assert f"{file}:1: the line holds no key" in done.stderr
    assert file.read_text() == "garbage\n"


def test_the_commands_import_nothing_that_costs(environment: dict[str, str]) -> None:
    code = (
        "import sys\nfrom slimserve.cli import main\nmain(['--add-key', 'a']); main(['--list-keys'])\n"
        "sys.exit(str({'torch', 'vllm', 'starlette', 'uvicorn', 'httpx', 'numpy'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "{" not in done.stderr


# What a launch makes of them.


def test_what_a_launch_asks_for(environment: dict[str, str], tmp_path: Path) -> None:
    settings = keys_command.key_settings
    file = write(tmp_path / "keys", line("alice", ALICE))
    with_key = {**environment, "SLIMSERVE_API_KEY": "sk-env"}
    with_file = {**environment, "SLIMSERVE_KEYS": str(file)}
    assert settings(environment, "127.0.0.1") == (None, {})
    assert settings({**environment, "SLIMSERVE_API_KEY": ""}, "::1") == (None, {})
    assert settings(with_key, "127.0.0.1") == (None, {"environment": digest("sk-env")})
    assert settings(with_key, "0.0.0.0") == (None, {"environment": digest("sk-env")})
    assert settings(with_file, "::") == (file, {})
    assert settings(with_file | with_key | {"SLIMSERVE_KEYS": str(file)}, "::")[0] == file


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "0", "fe80::1", "2001:db8::1"])
def test_beyond_loopback_takes_a_key(environment: dict[str, str], tmp_path: Path, host: str) -> None:  # C9
    for more in ({}, {"SLIMSERVE_KEYS": str(write(tmp_path / "empty", "# nobody\n"))}):
        with pytest.raises(Refused, match=r"is not loopback, and there is no key(.|\n)*--add-key"):
            keys_command.key_settings(environment | more, host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "127.1"])
def test_loopback_takes_none(environment: dict[str, str], host: str) -> None:
    assert keys_command.key_settings(environment, host) == (None, {})


def test_a_host_without_an_address_is_refused(environment: dict[str, str]) -> None:
    for host in ("nowhere.invalid", "a" * 300, "1.2.3.4.5"):
        with pytest.raises(Refused, match="has no address"):
            keys_command.key_settings(environment, host)


def test_a_file_that_was_named_has_to_be_there(environment: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read"):
        keys_command.key_settings({**environment, "SLIMSERVE_KEYS": str(tmp_path / "none")}, "127.0.0.1")
    default = paths.keys_file(environment)
    default.parent.mkdir(parents=True)
    default.symlink_to(tmp_path / "none")
    with pytest.raises(Refused, match="cannot be read"):
        keys_command.key_settings(environment, "127.0.0.1")


def test_a_user_without_a_home_has_no_default_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_001)
    assert keys_command.key_settings({}, "127.0.0.1") == (None, {})


@pytest.mark.parametrize("key", [" ", "secret words", "line\nbreak", "\u00fcber", "a" * 513, "\x7f", "\udcff"])
def test_a_key_of_the_environment_that_cannot_travel_is_refused(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        keys_command.key_settings({"SLIMSERVE_API_KEY": key}, "127.0.0.1")
    assert "SLIMSERVE_API_KEY is not a usable key" in str(caught.value)
    assert not key.strip() or key not in str(caught.value)
