"""Two machines for a test: network namespaces of this one, joined by a cable that leads nowhere else."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)


def missing() -> str | None:
    """Why namespaces cannot be had here; None when they can."""
    if shutil.which("ip") is None:
        return "`ip` is not installed: apt-get install iproute2"
    if os.geteuid() != 0:
        return "network namespaces take root, which this user is not"
    name = f"slimserve-{secrets.token_hex(4)}"
    made = ip("netns", "add", name)
    if made.returncode == 0:
        joined = ip("-n", name, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
        ip("netns", "del", name)
        made = joined
    if made.returncode != 0:
        return f"network namespaces are not permitted here: {made.stderr.strip() or made.returncode}"
    return None


@contextlib.contextmanager
def two() -> Iterator[tuple[str, str]]:
    """Names of two namespaces; each has loopback, one address of ADDRESSES, and no route beyond that network."""
    tag = secrets.token_hex(3)
    names = (f"slimserve-a-{tag}", f"slimserve-b-{tag}")
    try:
        for name in names:
            _do("netns", "add", name)
            _do("-n", name, "link", "set", "lo", "up")
        _do("link", "add", f"sa{tag}", "netns", names[0], "type", "veth", "peer", f"sb{tag}", "netns", names[1])
        for name, cable, address in zip(names, (f"sa{tag}", f"sb{tag}"), ADDRESSES, strict=True):
            _do("-n", name, "address", "add", f"{address}/24", "dev", cable)
            _do("-n", name, "link", "set", cable, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def unplug(name: str) -> None:
    """Take the cable out at one end: the link is down, and nobody hangs up."""
    (cable,) = [line.split(":")[1].split("@")[0].strip() for line in _do("-n", name, "-o", "link").splitlines()[1:]]
    _do("-n", name, "link", "set", cable, "down")


def listening(name: str) -> set[str]:
    """The addresses on which somebody there listens for TCP."""
    command = ["ip", "netns", "exec", name, "ss", "-Htln"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return {line.split()[3].rpartition(":")[0] for line in done.stdout.splitlines()}


def routes(name: str) -> str:
    """Its routing table, a line each."""
    return _do("-n", name, "route")


def _do(*arguments: str) -> str:
    done = ip(*arguments)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout
