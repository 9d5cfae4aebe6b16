"""What of an endpoint is shown to whom: its host, the keys that it asks for, and the web pages that may call it."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimserve import paths
from slimserve.admission.config import Config
from slimserve.admission.keys import API_KEY_VARIABLE, ENVIRONMENT, digest, is_there, is_usable, load
from slimserve.errors import Finding, Refused, UsageError, raise_if_any
from slimserve.records import dataclass

Address = tuple[int, int, int, str, tuple[Any, ...]]
_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?P<port>:[1-9][0-9]{0,4})?"
)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


@dataclass(frozen=True)
class Keys:
    """The keys that an endpoint asks for.

    Args:
        file: the keys file; None: this user has no place for one.
        awaited: whether the file is not there yet, and counts from the moment in which it is.
        hashes: name -> SHA-256 of keys that are not in the file.
    """

    file: Path | None
    awaited: bool
    hashes: Mapping[str, str]

    @property
    def required(self) -> bool:
        """Whether a key is asked for from the start."""
        return bool(self.hashes) or (self.file is not None and not self.awaited)


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Where an endpoint is to be reached, and by whom.

    Args:
        host, port: where it listens.
        has_keys: whether a key is asked for in any case.
        keys_file: the file that will ask for one as soon as it is there; None: there is none.
        origins: of the web pages that may call.
    """

    host: str
    port: int
    has_keys: bool
    keys_file: str | None
    origins: tuple[str, ...]

    @property
    def listens(self) -> str:
        """The address, as `0.0.0.0:8000`."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host or '*'}:{self.port}"

    @property
    def asks_for_key(self) -> bool:
        """Whether a key is asked for now."""
        return self.has_keys or (self.keys_file is not None and is_there(Path(self.keys_file)))

    def __str__(self) -> str:
        keys = "asks for a key" if self.asks_for_key else "asks for no key"
        if not self.asks_for_key and self.keys_file is not None:
            keys += f" until there is {self.keys_file} (--add-key)"
        pages = f"web pages of {', '.join(self.origins)} may call" if self.origins else "no web page may call"
        return f"listens on {self.listens}, {keys}; {pages}"

    def to_json(self) -> dict[str, Any]:
        """The same as data."""
        return {"listens": self.listens, "asks_for_key": self.asks_for_key, "origins": list(self.origins)}


def reach(host: str, port: int, admission: Config) -> Reach:
    """Who can reach an endpoint at `host` and `port` whose door is told `admission`."""
    has_keys = bool(admission.key_hashes) or (admission.keys_file is not None and not admission.keys_file_awaited)
    file = admission.keys_file
    return Reach(host=host, port=port, has_keys=has_keys, keys_file=file, origins=admission.origins)


def environment_key(environment: Mapping[str, str]) -> str | None:
    """The key of SLIMSERVE_API_KEY; None when it is unset or empty.

    Raises:
        UsageError: it could not travel in an HTTP header.
    """
    key = environment.get(API_KEY_VARIABLE)
    if not key:
        return None
    if not is_usable(key):
        why = "it travels in an HTTP header"
        do = "use 1 to 512 printable ASCII characters without a space, or unset it"
        raise UsageError(Finding(f"{API_KEY_VARIABLE} is not a usable key", why, do))
    return key


def keys_file(environment: Mapping[str, str]) -> tuple[Path | None, bool]:
    """The keys file, and whether it is there: one that is not is waited for, be it named or the default."""
    try:
        file = paths.keys_file(environment)
    except UsageError:
        if environment.get("SLIMSERVE_KEYS"):
            raise
        return None, False  # a user without a home folder has no default file in it
    return file, is_there(file)


def keys(environment: Mapping[str, str], host: str) -> Keys:
    """The keys that an endpoint on `host` asks for: on one beyond loopback there is at least one from the start.

    Args:
        environment: the caller's variables.
        host: the address that it will listen on.

    Raises:
        UsageError: SLIMSERVE_API_KEY could not be sent.
        Refused: the file cannot be used, or the host is beyond loopback and there is no key at all.
    """
    key = environment_key(environment)
    hashes = {} if key is None else {ENVIRONMENT: digest(key)}
    file, counts = keys_file(environment)
    known = hashes | (load(file) if file is not None and counts else {})
    if not known and not is_loopback(host):
        raise Refused(
            Finding(
                f"--host {host} is not loopback, and there is no key",
                f"whoever reaches that address could use the endpoint, and {_lack(file, counts)}",
                "add one with slimserve --add-key NAME, or listen on 127.0.0.1",
            )
        )
    return Keys(file, not counts, hashes)


def shuts_out(keys: Keys) -> str | None:
    """That a key is asked for which nobody has, in a sentence; None where somebody has one, or none is asked for."""
    if not keys.required or keys.hashes or keys.file is None or load(keys.file):
        return None
    return f"a key is asked for, and {_lack(keys.file, True)}: nobody gets in before slimserve --add-key NAME"


def _lack(file: Path | None, is_there: bool) -> str:
    if file is None:
        return "SLIMSERVE_KEYS names no keys file"
    return f"the keys file {file} " + ("holds none" if is_there else "does not exist")


def addresses(host: str, port: int | None = None) -> Sequence[Address]:
    """The addresses of `host` for TCP, as `socket.getaddrinfo` gives them; of the empty host, every address.

    Args:
        host: an address, or a name, which is resolved.

    Raises:
        Refused: it has none.
    """
    try:
        return socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        do = "use 127.0.0.1, or an address that `ip address` shows"
        raise Refused(Finding(f"the host {host!r} has no address", why, do)) from None


def is_loopback(host: str) -> bool:
    """Whether every address of `host` is one that only this machine can reach.

    Raises:
        Refused: it has no address.
    """
    if not host:
        return False  # whoever binds to it binds to every address
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in addresses(host))


def check_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """The origins from which web pages may call, each once.

    Raises:
        UsageError: with all that no browser would send in that form. `*` is one of them: with it every page that a
            user of this machine opens could use the endpoint.
    """
    given = tuple(dict.fromkeys(origins))
    raise_if_any(UsageError, [finding for origin in given if (finding := _wrong(origin))])
    return given


def _wrong(origin: str) -> Finding | None:
    what = f"--origin {origin} is not the origin of a page"
    if origin == "*":
        return Finding(what, "it would let every page in that anybody here opens", "name each: --origin https://HOST")
    match = _ORIGIN.fullmatch(origin)
    if match is None or (match["port"] and int(match["port"][1:]) > 65535):
        why = "browsers send scheme://host[:port], in lower case and ASCII, without a path or a slash at the end"
        return Finding(what, why, "give it as the browser's developer tools show it, such as https://chat.example.org")
    if match["port"] and match["port"] == _DEFAULT_PORTS.get(match["scheme"]):
        why = f"browsers leave {match['port']} out for {match['scheme']}"
        return Finding(what, why, f"give {origin.removesuffix(match['port'])}")
    return None
