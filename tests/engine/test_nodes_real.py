"""Two real nodes: `slimserve --serve --node` in two network namespaces, each with a replica of the CPU engine.

Requests and answers of the second replica, and what its coordinator counts, go over the cable.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest
from server_support import ROOT, Server
from waiting import until

from harness import slice as generated
from slimserve import paths
from slimserve.engine import endpoints, procfs
from slimserve.registry_files import load_registry
from slimserve.session import open_session

PROFILE = "hybrid-slice-cpu-nodes2"
REGISTRY = ROOT / "tests/nodes"
SECRET = "a-secret-of-the-tests-that-is-long-enough"
HEAD = namespaces.ADDRESSES[0]
SECONDS = 240.0
pytestmark = pytest.mark.timeout(900)  # starts of two engines each, on two cores


@pytest.fixture
def names() -> Iterator[tuple[str, str]]:
    reason = namespaces.missing()
    if reason is not None:
        pytest.skip(reason)
    with namespaces.two() as made:
        yield made


class Nodes:
    """The nodes of one endpoint, each in a namespace of its own and with folders of its own."""

    def __init__(self, names: tuple[str, str], home: Path) -> None:
        self.names, self.home = names, home
        self.started: list[Server] = []
        for rank in range(2):
            variables = {"SLIMSERVE_PROFILES": str(REGISTRY), "SLIMSERVE_CACHE": str(self.cache(rank))}
            session = open_session(variables)
            subject = session.registry.subject(session.registry.default)
            generated.write(subject.model, None, session.weights(subject).folder)

    def start(self, rank: int, *arguments: str, **variables: str) -> Server:
        """`--serve --node RANK` in the namespace of that node."""
        command = ["ip", "netns", "exec", self.names[rank], sys.executable, "-m", "slimserve", PROFILE, "--serve"]
        command += ["--node", str(rank), "--head", HEAD, *arguments]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "SLIMSERVE_CACHE": str(self.cache(rank)),
            "SLIMSERVE_STATE": str(self.state(rank)),
            "SLIMSERVE_PROFILES": str(REGISTRY),
            "SLIMSERVE_NODE_SECRET": SECRET,
            "PYTHONPATH": str(ROOT),
            **variables,
        }
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=self.home
        )
        server = Server(process, 8000, environment)
        threading.Thread(target=server._listen, daemon=True).start()
        self.started.append(server)
        return server

    def cache(self, rank: int) -> Path:
        return self.home / f"cache-{rank}"

    def state(self, rank: int) -> Path:
        return self.home / f"state-{rank}"

    def ready(self) -> tuple[Server, Server]:
        """Both nodes, when they are ready."""
        worker = self.start(1)
        head = self.start(0, "--page-port", "0")
        head.wait_for("ready http://", SECONDS)
        worker.wait_for("ready: computes", SECONDS)
        return head, worker

    def status(self, rank: int) -> endpoints.Endpoint:
        (one,) = endpoints.living(paths.runs_folder({"SLIMSERVE_STATE": str(self.state(rank))}))
        return one

    def processes(self) -> list[procfs.Process]:
        """Everything that lives and was started for these nodes, on either."""
        found = []
        for process in procfs.living():
            with contextlib.suppress(OSError):  # it is gone
                if str(self.home).encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                    found.append(process)
        return found

    def engines(self) -> list[procfs.Process]:
        return [
            process
            for process in self.processes()
            if "slimserve.engine.entry" in _words(process) or _is_engine(process)
        ]

    def ask(self, prompt: str, tokens: int = 8) -> dict[str, object]:
        """A completion, asked for in the namespace of node 0."""
        body = json.dumps({"model": PROFILE, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True})
        asked = f"""
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=120)
connection.request("POST", "/v1/completions", {body!r}, {{"Content-Type": "application/json"}})
response = connection.getresponse()
sys.stdout.write(str(response.status) + " " + response.read().decode())
"""
        command = ["ip", "netns", "exec", self.names[0], sys.executable, "-c", asked]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
        status, _, answer = done.stdout.partition(" ")
        return {"status": int(status), **json.loads(answer)}

    def served(self) -> dict[str, int]:
        """Requests that each replica has finished, by the engine's own metrics."""
        connection = _Unix(self.status(0).control)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        counts: dict[str, int] = {}
        for line in text.splitlines():
            if found := re.match(r'vllm:request_success_total\{.*engine="(\d+)".*\} ([\d.e+]+)', line):
                counts[found[1]] = counts.get(found[1], 0) + int(float(found[2]))
        return counts

    def end(self) -> None:
        for server in self.started:
            if server.process.poll() is None:
                server.process.kill()
            server.process.wait(30)
        until(lambda: not self.processes(), 30)


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def _words(process: procfs.Process) -> str:
    return procfs.command_line(process.pid)


def _is_engine(process: procfs.Process) -> bool:
    return process.name.startswith("VLLM::") or "multiprocessing" in _words(process)


@pytest.fixture
def nodes(names: tuple[str, str], tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(names, tmp_path)
    try:
        yield made
    finally:
        made.end()


def test_two_nodes_serve_together_and_drain_together(nodes: Nodes) -> None:
    assert "default" not in namespaces.routes(nodes.names[0]) + namespaces.routes(nodes.names[1])
    head, worker = nodes.ready()
    assert head.wait_for("gate: node 1 is as planned")
    # The engine's ports, its collectives' among them, are bound to what faces the other node, and to nothing else.
    for name, address in zip(nodes.names, namespaces.ADDRESSES, strict=True):
        assert {where for where in namespaces.listening(name) if where != "127.0.0.1"} == {address}
    for process in nodes.engines():
        assert SECRET.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert worker.wait_for("gate: 2 processes are as planned")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(nodes.ask, [f"question {number}" for number in range(8)]))
    assert [answer["status"] for answer in answers] == [200] * 8
    served = nodes.served()
    assert served.keys() == {"0", "1"}
    assert all(served.values()), served
    assert "node 0 of 2" in nodes.status(0).node
    assert (nodes.status(1).status.state, nodes.status(1).port) == ("ready", 0)
    # One that is under way when the head is told to stop is answered to its end.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        last = pool.submit(nodes.ask, "the last one", 120)
        until(lambda: _running(nodes) > 0, 30)
        head.process.send_signal(signal.SIGTERM)
        answer = last.result(120)
    assert answer["status"] == 200
    assert answer["usage"]["completion_tokens"] == 120  # type: ignore[index]
    assert (head.process.wait(60), worker.process.wait(60)) == (0, 0)
    head.wait_for("every answer is complete")
    worker.wait_for("node 0 has ended all")
    until(lambda: not nodes.processes(), 20)


def _running(nodes: Nodes) -> int:
    connection = _Unix(nodes.status(0).control)
    connection.request("GET", "/slimserve/state")
    return int(json.loads(connection.getresponse().read())["in_flight"])


def test_nodes_that_differ_refuse_before_an_engine_is_started(nodes: Nodes, tmp_path: Path) -> None:
    other = tmp_path / "registry"
    other.mkdir()
    for path in REGISTRY.rglob("*"):
        if path.is_file():
            target = other / path.relative_to(REGISTRY)
            target.parent.mkdir(exist_ok=True)
            target.write_text(path.read_text().replace("max_num_seqs:\n    value: 4", "max_num_seqs:\n    value: 3"))
    assert load_registry(other).default.engine.max_num_seqs.value == 3
    worker = nodes.start(1, SLIMSERVE_PROFILES=str(other))
    head = nodes.start(0, "--page-port", "0")
    for server in (head, worker):
        assert server.process.wait(60) == 3
        assert "the nodes differ in profile hash: node 0 has" in server.wait_for("the nodes differ in")
        assert not any(line.startswith("slimserve: loading") for line in server.words)


def test_they_come_together_again_after_a_death_and_part_when_the_cable_is_pulled(nodes: Nodes) -> None:
    head, worker = nodes.ready()
    supervisor = nodes.status(1).pid
    os.kill(supervisor, signal.SIGKILL)
    head.wait_for("node 1 at 10.77.0.2 is lost", 30)
    until(lambda: not nodes.engines(), 30)  # neither its own, nor the head's
    until(lambda: "node 1 has not come" in nodes.status(0).status.reason, 30)
    assert nodes.status(0).status.state == "restarting"
    another = nodes.start(1)
    another.wait_for("ready: computes", SECONDS)
    assert nodes.ask("again")["status"] == 200
    namespaces.unplug(nodes.names[1])
    until(lambda: sum("node 1 at 10.77.0.2 is lost" in line for line in head.words) == 2, 60)
    another.wait_for("the link to node 0 is lost", 60)
    until(lambda: not nodes.engines(), 60)
    assert worker.process.wait(10) != 0
    another.process.send_signal(signal.SIGTERM)
    head.process.send_signal(signal.SIGTERM)
    assert (another.process.wait(60), head.process.wait(60)) == (1, 1)
