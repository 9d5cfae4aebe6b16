"""Keys: the file, who holds what, and the commands; no key where it does not belong."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from keys_support import ALICE, BOB, line, write

from slimserve.admission import keys
from slimserve.admission.keys import Keyring, digest, load, parse
from slimserve.admission.rejection import Rejected
from slimserve.errors import Refused

ROOT = Path(__file__).resolve().parents[2]


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


def test_a_file_of_nothing_but_wrong_lines_is_told_by_the_first_and_read_once(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    parsed: list[str] = []
    ring = Keyring(file, {}, clock=clock)
    good = file.read_text()
    write(file, "x\n" * 500_000)
    with pytest.raises(Refused) as caught:
        load(file)
    assert len(caught.value.findings) == keys.MAX_FINDINGS

    def counted(text: str, where: Path) -> dict[str, str]:
        parsed.append(text)
        return parse(text, where)

    monkeypatch.setattr(keys, "parse", counted)
    for _ in range(3):
        clock.now += 1
        assert admits(ring, ALICE)
    assert len(parsed) == 1
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert len(caplog.text) < 20_000
    write(file, good)
    clock.now += 1
    assert admits(ring, ALICE)
    assert len(parsed) == 2


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
    assert caught.value.code == "invalid_api_key"
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
    ring = Keyring(file, {}, clock=clock)
    write(file, line("bob", BOB) + line("carol", "sk-carol"))
    assert admits(ring, ALICE)  # looked at no more than once a second
    clock.now += 1
    assert not admits(ring, ALICE)
    assert ring.holder(bearer("sk-carol")) == "carol"


def test_a_change_that_keeps_size_and_time_is_seen(file: Path) -> None:
    clock = Clock()
    ring = Keyring(file, {}, clock=clock)
    before = file.stat()
    write(file, line("alice", "sk-other") + line("bob", BOB))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_ino) == (before.st_size, before.st_ino)
    clock.now += 1
    assert not admits(ring, ALICE)


def test_an_emptied_file_admits_nobody(file: Path) -> None:
    clock = Clock()
    ring = Keyring(file, {}, clock=clock)
    write(file, "")
    clock.now += 1
    assert ring.required
    assert not admits(ring, ALICE)


@pytest.mark.parametrize("harm", ["gone", "garbage", "open", "locked folder"])
def test_a_file_that_goes_wrong_keeps_the_last_good_keys_and_is_logged_once(
    file: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    clock = Clock()
    ring = Keyring(file, {}, clock=clock)
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
    ring = Keyring(file, {"environment": digest("sk-env")}, clock=clock)
    assert "is open to other users" in caplog.text
    assert not admits(ring, ALICE)
    assert admits(ring, "sk-env")
    file.chmod(0o600)
    clock.now += 1
    assert admits(ring, ALICE)


# A file that was not there at the launch.


def test_the_first_key_counts_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, file = Clock(), tmp_path / "config" / "keys"
    ring = Keyring(file, {}, awaited=True, clock=clock)
    assert not ring.required
    assert ring.holder([]) is None
    assert caplog.text == ""
    file.parent.mkdir()
    write(file, line("alice", ALICE))
    clock.now += 1
    with pytest.raises(Rejected):
        ring.holder([])
    assert ring.required
    assert ring.holder(bearer(ALICE)) == "alice"
    file.unlink()
    clock.now += 1
    assert admits(ring, ALICE)
    assert not admits(ring, BOB)
    with pytest.raises(Rejected):
        ring.holder([])


def test_the_key_of_the_environment_stands_alone_until_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, file = Clock(), tmp_path / "keys"
    ring = Keyring(file, {"environment": digest("sk-env")}, awaited=True, clock=clock)
    assert ring.required
    assert admits(ring, "sk-env")
    assert not admits(ring, ALICE)
    assert caplog.text == ""
    write(file, line("alice", ALICE))
    clock.now += 1
    assert admits(ring, ALICE)
    assert admits(ring, "sk-env")


@pytest.mark.parametrize("harm", ["garbage", "open", "a link into nowhere"])
def test_a_first_file_that_is_wrong_admits_nobody(tmp_path: Path, harm: str) -> None:
    clock, file = Clock(), tmp_path / "keys"
    ring = Keyring(file, {}, awaited=True, clock=clock)
    if harm == "a link into nowhere":
        file.symlink_to(tmp_path / "nowhere")
    else:
        write(file, "garbage" if harm == "garbage" else line("alice", ALICE), 0o644 if harm == "open" else 0o600)
    clock.now += 1
    assert not admits(ring, ALICE)
    with pytest.raises(Rejected):
        ring.holder([])


def test_a_file_that_was_there_at_the_launch_and_is_gone_as_the_engine_starts_again_opens_nothing(
    tmp_path: Path,
) -> None:
    ring = Keyring(tmp_path / "keys", {})
    assert ring.required
    with pytest.raises(Rejected):
        ring.holder([])
