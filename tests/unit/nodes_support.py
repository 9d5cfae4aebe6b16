"""Shared by the tests of several nodes: claims, links over real sockets, and nodes as processes with fake engines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from supervisor_support import DRIVERS, Driver, Fake, free_port, to_order

from slimserve.engine.attempt import Launch
from slimserve.nodes import wire
from slimserve.nodes.agreement import MUST_AGREE, Claim
from slimserve.nodes.seat import Seat
from slimserve.shapes import plain

SECRET = b"a-secret-of-the-tests-that-is-long-enough"
DRIVER = Path(__file__).with_name("nodes_driver.py")


def claim(rank: int = 1, *, nodes: int = 2, profile: str = "fake-profile", **values: str) -> Claim:
    """What a node says of itself, in agreement with all others but for `values`."""
    same = dict.fromkeys(MUST_AGREE, "the same")
    changed = {name.replace("_", " "): value for name, value in values.items()}
    return Claim(profile=profile, rank=rank, nodes=nodes, values=same | changed)


def seat(rank: int, port: int, nodes: int = 2) -> Seat:
    return Seat(rank, nodes, "127.0.0.1", port, "127.0.0.1", "lo")


def sockets() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def pair(secret: bytes = SECRET, other: bytes = SECRET) -> tuple[wire.Link | str, wire.Link | str]:
    """Both ends of a link, node's and head's; of one that does not come to be the words of its end."""
    ours, theirs = sockets()
    found: list[wire.Link | str] = []

    def accept() -> None:
        try:
            found.append(wire.accept(theirs, other, time.monotonic() + wire.HELLO_SECONDS))
        except wire.Broken as error:
            found.append(str(error))

    thread = threading.Thread(target=accept)
    thread.start()
    node: wire.Link | str
    try:
        node = wire.offer(ours, secret)
    except wire.Broken as error:
        node = str(error)
    thread.join(20)
    return node, found[0]


def links() -> tuple[wire.Link, wire.Link]:
    """Both ends of a link that came to be."""
    node, head = pair()
    assert isinstance(node, wire.Link)
    assert isinstance(head, wire.Link)
    return node, head


class Group:
    """An endpoint of several nodes on this machine, each a process with a fake engine."""

    def __init__(self, fake: Fake, nodes: int = 2, **seconds: float) -> None:
        self.fake, self.nodes, self.seconds = fake, nodes, seconds
        self.port = free_port()
        self.number = 0

    def head(self, *switches: str, **claims: str) -> Driver:
        """Node 0, with switches of the fake engine."""
        return self._node(0, self._launch("--armed", *switches), claims)

    def worker(self, rank: int = 1, *switches: str, **claims: str) -> Driver:
        """Another node."""
        launch = replace(self._launch("--armed", *switches), host="", port=0)
        argv = [part for part in launch.argv if part not in ("--uds", str(launch.control))]
        return self._node(rank, replace(launch, argv=tuple(argv)), claims)

    def _launch(self, *switches: str) -> Launch:
        self.number += 1
        return self.fake.launch(*switches, run=f"run-{self.number}", **self.seconds)  # type: ignore[arg-type]

    def _node(self, rank: int, launch: Launch, claims: dict[str, Any]) -> Driver:
        return NodeDriver(rank, self.port, claim(rank, nodes=claims.pop("nodes", self.nodes), **claims), launch)


class NodeDriver(Driver):
    """A process that runs one node in the foreground."""

    def __init__(self, rank: int, port: int, said: Claim, launch: Launch) -> None:
        order = {"rank": rank, "port": port, "claim": plain(said), "launch": json.loads(to_order(launch))}
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": launch.env["PYTHONPATH"]},
            text=True,
        )
        DRIVERS.append(self.process)
        self.lines = []
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order))
        self.process.stdin.close()
