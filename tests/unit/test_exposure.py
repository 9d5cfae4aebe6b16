"""What a launch asks of whom: keys, hosts, origins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from keys_support import ALICE, line, write

from slimserve import paths
from slimserve.admission.config import Config
from slimserve.admission.keys import digest
from slimserve.errors import Refused, UsageError
from slimserve.exposure import Keys, check_origins, keys, reach, shuts_out

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def test_what_a_launch_asks_for(environment: dict[str, str], tmp_path: Path) -> None:
    default = paths.keys_file(environment)
    file = write(tmp_path / "keys", line("alice", ALICE))
    with_key = {**environment, "SLIMSERVE_API_KEY": "sk-env"}
    with_file = {**environment, "SLIMSERVE_KEYS": str(file)}
    from_environment = {"environment": digest("sk-env")}
    none, one = Keys(default, True, {}), Keys(default, True, from_environment)
    assert (none.required, one.required) == (False, True)
    assert keys(environment, "127.0.0.1") == none
    assert keys({**environment, "SLIMSERVE_API_KEY": ""}, "::1") == none
    assert keys(with_key, "127.0.0.1") == keys(with_key, "0.0.0.0") == one
    assert keys(with_file, "::") == keys(with_file, "::1") == Keys(file, False, {})
    assert keys(with_file, "::").required
    assert keys(with_file | with_key | {"SLIMSERVE_KEYS": str(file)}, "::") == Keys(file, False, from_environment)
    default.parent.mkdir(parents=True)
    write(default, line("alice", ALICE))
    assert keys(environment, "127.0.0.1") == Keys(default, False, {})


def test_a_folder_that_cannot_be_looked_into_hides_no_keys(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "lstat", refuse)
    with pytest.raises(Refused, match="cannot be read"):
        keys(environment, "127.0.0.1")


def test_a_key_that_is_asked_for_and_that_nobody_has_is_told(environment: dict[str, str], tmp_path: Path) -> None:
    empty = {"SLIMSERVE_KEYS": str(write(tmp_path / "empty", "# nobody\n"))}
    told = shuts_out(keys(environment | empty, "127.0.0.1"))
    assert told is not None
    assert f"{tmp_path / 'empty'} holds none" in told
    assert "--add-key" in told
    some = {"SLIMSERVE_KEYS": str(write(tmp_path / "some", line("alice", ALICE)))}
    for more in ({}, some, empty | {"SLIMSERVE_API_KEY": "sk-env"}):
        assert shuts_out(keys(environment | more, "127.0.0.1")) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "0", "fe80::1", "2001:db8::1"])
def test_beyond_loopback_takes_a_key(environment: dict[str, str], tmp_path: Path, host: str) -> None:  # C9
    for more in ({}, {"SLIMSERVE_KEYS": str(write(tmp_path / "empty", "# nobody\n"))}):
        with pytest.raises(Refused, match=r"is not loopback, and there is no key(.|\n)*--add-key"):
            keys(environment | more, host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "127.1"])
def test_loopback_takes_none(environment: dict[str, str], host: str) -> None:
    assert not keys(environment, host).required


def test_a_host_without_an_address_is_refused(environment: dict[str, str]) -> None:
    for host in ("nowhere.invalid", "a" * 300, "1.2.3.4.5"):
        with pytest.raises(Refused, match="has no address"):
            keys(environment, host)


def test_a_file_that_is_named_and_not_there_is_waited_for_as_the_default_is(
    environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "none"
    named = {**environment, "SLIMSERVE_KEYS": str(file)}
    assert keys(named, "127.0.0.1") == Keys(file, True, {})
    with pytest.raises(Refused, match=rf"there is no key(.|\n)*{file} does not exist(.|\n)*--add-key NAME"):
        keys(named, "0.0.0.0")


def test_a_launch_says_where_it_listens_and_for_whom(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    awaited = Config(
        max_in_flight=1,
        max_model_len=1,
        keys_file=str(file),
        keys_file_awaited=True,
        origins=("https://a", "https://b"),
    )
    open_to_all = reach("127.0.0.1", 8000, awaited)
    assert str(open_to_all) == (
        f"listens on 127.0.0.1:8000, asks for no key until there is {file} (--add-key); "
        "web pages of https://a, https://b may call"
    )
    write(file, line("alice", ALICE))
    assert open_to_all.to_json() == {
        "listens": "127.0.0.1:8000",
        "asks_for_key": True,
        "origins": ["https://a", "https://b"],
    }
    keyed = Config(max_in_flight=1, max_model_len=1, key_hashes={"environment": digest("sk-env")})
    assert str(reach("::", 1, keyed)) == "listens on [::]:1, asks for a key; no web page may call"
    assert str(reach("", 1, keyed)).startswith("listens on *:1, ")
    assert str(reach("::1", 1, Config(max_in_flight=1, max_model_len=1))).startswith(
        "listens on [::1]:1, asks for no key;"
    )


def test_a_link_into_nowhere_is_no_file_to_wait_for(environment: dict[str, str], tmp_path: Path) -> None:
    default = paths.keys_file(environment)
    default.parent.mkdir(parents=True)
    default.symlink_to(tmp_path / "none")
    with pytest.raises(Refused, match="cannot be read"):
        keys(environment, "127.0.0.1")


def test_a_user_without_a_home_has_no_default_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_001)
    assert keys({}, "127.0.0.1") == Keys(None, True, {})


@pytest.mark.parametrize("key", [" ", "secret words", "line\nbreak", "\u00fcber", "a" * 513, "\x7f", "\udcff"])
def test_a_key_of_the_environment_that_cannot_travel_is_refused(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        keys({"SLIMSERVE_API_KEY": key}, "127.0.0.1")
    assert "SLIMSERVE_API_KEY is not a usable key" in str(caught.value)
    assert not key.strip() or key not in str(caught.value)


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "https://chat.example.org", "http://[::1]:8080", "app://obsidian.md", "http://10.0.0.1"],
)
def test_origins_as_browsers_send_them(origin: str) -> None:
    assert check_origins([origin, origin]) == (origin,)


@pytest.mark.parametrize(
    ("origin", "says"),
    [
        ("*", "it would let every page in"),
        ("null", "browsers send scheme://host"),
        ("", "browsers send scheme://host"),
        ("example.org", "browsers send scheme://host"),
        ("https://*.example.org", "browsers send scheme://host"),
        ("https://example.org/", "browsers send scheme://host"),
        ("https://Example.org", "browsers send scheme://host"),
        ("https://me@example.org", "browsers send scheme://host"),
        ("https://example.org:99999", "browsers send scheme://host"),
        ("https://example.org\n", "browsers send scheme://host"),
        ("https://\u00fcber.example", "browsers send scheme://host"),
        ("https://example.org:443", "do:  give https://example.org"),
        ("http://example.org:80", "do:  give http://example.org"),
    ],
)
def test_what_no_browser_sends_is_refused(origin: str, says: str) -> None:  # C9
    with pytest.raises(UsageError) as caught:
        check_origins(["https://fine.example", origin])
    assert says in str(caught.value)
    assert len(caught.value.findings) == 1


def test_a_chat_that_starts_its_endpoint_beside_a_keys_file_makes_itself_a_key(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slimserve import chat, run
    from slimserve.session import open_session

    seen: dict[str, Any] = {}

    class Engine:
        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

        def check(self) -> None: ...

    def launch(session: Any, *arguments: object) -> Engine:
        seen["hashes"] = keys(session.environment, "127.0.0.1").hashes
        return Engine()

    def ask(endpoint: Any, *arguments: object, **options: object) -> int:
        seen["key"] = endpoint.api_key
        return 0

    monkeypatch.setattr(run, "launch", launch)
    monkeypatch.setattr(chat, "ask", ask)
    monkeypatch.setattr(chat, "find", lambda endpoint: ("nobody", endpoint))
    for file, made in ((None, False), (write(tmp_path / "keys", line("alice", ALICE)), True)):
        variables = environment | ({} if file is None else {"SLIMSERVE_KEYS": str(file)})
        session = open_session(variables, platform="cpu-x86-64")
        assert run.chat(session, session.registry.default, "127.0.0.1", 8999, None, "hello") == 0
        assert (seen["key"] is not None) == made
        assert seen["hashes"] == ({"environment": digest(seen["key"])} if made else {})
