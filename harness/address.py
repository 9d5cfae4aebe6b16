"""Where a server is, from the URL of its API."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

# As the Internet's names are made; an underscore is found in those of containers.
_LABEL = r"[A-Za-z0-9_-]{1,63}"
_NAME = re.compile(rf"(?=.{{1,253}}\.?\Z){_LABEL}(?:\.{_LABEL})*\.?")


class NoAddress(ValueError):
    """A URL that names no server; the text is why, and repeats nothing of the URL: a password may stand in it."""


@dataclass(frozen=True)
class Address:
    """Where a server is.

    Args:
        host, port, tls: of its socket.
        path: what stands before every path.
        authority: how requests call it.
    """

    host: str
    port: int
    tls: bool
    path: str
    authority: str

    @classmethod
    def of(cls, url: str) -> Address:
        """The address in a URL.

        Raises:
            NoAddress: not `http://HOST[:PORT][/PATH]` or the like with https, or of no host that can be looked up.
        """
        if not url:
            raise NoAddress("it is empty")
        if not re.fullmatch(r"[!-~]+", url):
            raise NoAddress("it has a space or another character that no URL may have")
        if not url.lower().startswith(("http://", "https://")):
            raise NoAddress("it begins with neither http:// nor https://")
        try:
            parts = urlsplit(url)
            host, at = parts.hostname or "", parts.netloc.rpartition("@")[1]
        except ValueError:  # brackets around what is no IPv6 address
            raise NoAddress("its host is neither a name nor an IP address") from None
        if at:
            raise NoAddress("it carries a user and a password, which nobody who reads a receipt should see")
        if "?" in url or "#" in url:
            raise NoAddress("it has a query or a fragment, and the paths of requests go behind it")
        if not _is_host(host, parts.netloc):
            raise NoAddress("its host is neither a name nor an IP address")
        tls = parts.scheme == "https"
        try:
            port = parts.port
        except ValueError:
            port = 0
        if port == 0:
            raise NoAddress("its port is no number from 1 to 65535")
        return cls(host, port or (443 if tls else 80), tls, parts.path.rstrip("/"), parts.netloc)


def _is_host(host: str, authority: str) -> bool:
    if not authority.startswith("["):
        return _NAME.fullmatch(host) is not None
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return re.fullmatch(r"\[[^]]*\](?::.*)?", authority) is not None
