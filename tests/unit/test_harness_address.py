"""Which URLs name a server, and what is said of the others."""

from __future__ import annotations

import pytest

from harness.address import Address, NoAddress


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000/v1", Address("127.0.0.1", 8000, False, "/v1", "127.0.0.1:8000")),
        ("https://my_box.example.:8443/a/v1/", Address("my_box.example.", 8443, True, "/a/v1", "my_box.example.:8443")),
        ("HTTPS://Box", Address("box", 443, True, "", "Box")),
        ("http://box:/v1", Address("box", 80, False, "/v1", "box:")),
        ("http://[::1]:9/v1", Address("::1", 9, False, "/v1", "[::1]:9")),
        ("http://[fe80::1%eth0]", Address("fe80::1%eth0", 80, False, "", "[fe80::1%eth0]")),
        ("http://box/@team/v1", Address("box", 80, False, "/@team/v1", "box")),
        (f"http://{'a' * 63}/v1", Address("a" * 63, 80, False, "/v1", "a" * 63)),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert Address.of(url) == address


HOST = "its host is neither a name nor an IP address"
PORT = "its port is no number from 1 to 65535"
CHARACTER = "it has a space or another character that no URL may have"
SCHEME = "it begins with neither http:// nor https://"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "it is empty"),
        *((url, SCHEME) for url in ("127.0.0.1:8000", "ftp://box/v1", "http:/box", "//box/v1", "u:secret@box/v1")),
        *((f"http://{host}/v1", CHARACTER) for host in ("a b", "a\x00b", "box\n", "b\u00f6x", "\udcff", "box/\udcff")),
        (" http://box/v1", CHARACTER),
        *(
            (f"http://{host}:9/v1", HOST)
            for host in (".", "", "a..b", ".a", "a" * 64, "a." * 200 + "a", "a%20b", "a\\b")
        ),
        *((f"http://{host}/v1", HOST) for host in ("[zz]", "[::1", "[::1]a", "[v1.x]", "[]", "a" * 400)),
        *((f"http://box:{port}/v1", PORT) for port in ("0", "99999", "-1", "x", "+80", "9" * 5000)),
        ("http://u:secret@box/v1", "it carries a user and a password"),
        ("http://:secret@box/v1", "it carries a user and a password"),
        ("http://u:secret/@box/v1", PORT),
        *((f"http://box/v1{rest}", "it has a query or a fragment") for rest in ("?", "?key=secret", "#", "#secret")),
    ],
)
def test_what_is_no_address_is_told_why_and_not_repeated(url: str, why: str) -> None:
    with pytest.raises(NoAddress) as caught:
        Address.of(url)
    assert str(caught.value).startswith(why)
    assert "secret" not in str(caught.value)


def test_every_host_that_passes_can_be_looked_up() -> None:
    """What `getaddrinfo` does to a name before it asks anybody."""
    longest = ".".join(["a" * 63, "b" * 63, "c" * 63, "d" * 61])
    for host in (longest, longest + ".", "xn--bx-fka", "-", "_"):
        assert Address.of(f"http://{host}/v1").host.encode("idna")
