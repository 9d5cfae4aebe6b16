"""What of an endpoint is shown to whom: the host that it listens on, and the web pages that may call it."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from slimserve.errors import Finding, Refused, UsageError, raise_if_any

_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?P<port>:[1-9][0-9]{0,4})?"
)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def is_loopback(host: str) -> bool:
    """Whether every address of `host` is one that only this machine can reach.

    Args:
        host: an address, or a name, which is resolved.

    Raises:
        Refused: it has no address.
    """
    if not host:
        return False  # whoever binds to it binds to every address
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        do = "use 127.0.0.1, or an address that `ip address` shows"
        raise Refused(Finding(f"the host {host!r} has no address", why, do)) from None
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in found)


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
