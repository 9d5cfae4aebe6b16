"""Shared by the supervisor's tests: launches of the fake engine, and the proof that nothing of it is left."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from waiting import until

from slimserve.admission.config import Config
from slimserve.engine import procfs
from slimserve.engine.record import control_path, leftovers
from slimserve.engine.supervisor import Launch
from slimserve.shapes import plain

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests/fakes/engine.py"
DRIVER = Path(__file__).with_name("supervisor_driver.py")
MARK = "SLIMSERVE_TEST_MARK"
KEY = "sk-a-key-that-must-not-be-seen"
# Every driver that a test has started.
DRIVERS: list[subprocess.Popen[str]] = []


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def ask(port: int, path: str, body: object = None, key: str = "") -> tuple[int, dict[str, str], bytes]:
    """One request to the public port: status, headers in lower case, body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request("GET" if body is None else "POST", path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


class Fake:
    """Launches of the fake engine whose processes all carry one mark in their environment."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self.mark = secrets.token_hex(8)

    def launch(
        self,
        *switches: str,
        load_seconds: float = 20.0,
        warmup_seconds: float = 20.0,
        stop_seconds: float = 5.0,
        drain_seconds: float = 20.0,
        stall_seconds: float = 20.0,
        api_key: str | None = None,
        model_name: str = "fake",
        port: int | None = None,
        run: str = "run",
    ) -> Launch:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        control = control_path(self.runs / run)
        hashes = {} if api_key is None else {"test": hashlib.sha256(api_key.encode()).hexdigest()}
        return Launch(
            argv=(sys.executable, str(FAKE), "--uds", str(control), *switches),
            env={MARK: self.mark, "PATH": os.environ["PATH"], "PYTHONPATH": path},
            admission=Config(max_in_flight=8, max_model_len=4096, key_hashes=hashes),
            control=control,
            host="127.0.0.1",
            port=port or free_port(),
            model_name=model_name,
            run_folder=self.runs / run,
            load_seconds=load_seconds,
            warmup_seconds=warmup_seconds,
            drain_seconds=drain_seconds,
            stall_seconds=stall_seconds,
            stop_seconds=stop_seconds,
            profile_id="fake-profile",
        )

    def processes(self) -> list[procfs.Process]:
        """Every living process that was started by one of these launches, in whatever session."""
        entry = f"{MARK}={self.mark}".encode()
        found = []
        for process in procfs.living():
            try:
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            except OSError:
                continue
            if entry in environ.split(b"\0"):
                found.append(process)
        return found

    def await_all(self, count: int, sessions: int = 1) -> None:
        """Wait until so many processes live, in so many sessions: a daemon is away from its parents only then."""

        def complete() -> bool:
            found = self.processes()
            return len(found) == count and len({process.session for process in found}) == sessions

        until(complete, 10.0)

    def require_none(self, seconds: float = 0.0) -> None:
        with contextlib.suppress(AssertionError):  # the next line says which
            until(lambda: not self.processes(), seconds)
        assert self.processes() == []

    def kill_all(self) -> None:
        for process in self.processes():
            procfs.kill(process)


def fake_fixture(folder: Path) -> Iterator[Fake]:
    """The body of a fixture: whatever the test did, afterwards no process may live, the guard's moment granted."""
    fake = Fake(folder)
    try:
        yield fake
        fake.require_none(2.0)
    finally:
        for process in DRIVERS:  # first, or they would start anew what is ended here
            process.kill()
            process.wait()
        DRIVERS.clear()
        fake.kill_all()
        leftovers(fake.runs)  # removes what a driver that was killed has left, its engine's temporary folder too


def to_order(launch: Launch) -> str:
    """A launch as the driver reads it."""
    fields = {name: getattr(launch, name) for name in Launch.__dataclass_fields__}
    paths = {name: str(fields[name]) for name in ("run_folder", "control")}
    return json.dumps({**fields, **paths, "env": dict(launch.env), "admission": plain(launch.admission, nulls=False)})


class Driver:
    """A process that runs `Supervisor.run` in the foreground; its reports are read one by one."""

    def __init__(self, launch: Launch, *switches: str) -> None:
        order = to_order(launch)
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), *switches],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": launch.env["PYTHONPATH"]},
            text=True,
        )
        DRIVERS.append(self.process)
        self.lines: list[str] = []
        assert self.process.stdin is not None
        self.process.stdin.write(order)
        self.process.stdin.close()

    def until_report(self, start: str) -> str:
        """Read reports until one begins with `start`; the end of the process fails the test."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(start):
                return line
        assert self.process.stderr is not None
        raise AssertionError(f"ended without {start!r}: {self.lines} {self.process.stderr.read()}")

    def finish(self, seconds: float) -> tuple[int, str]:
        """Wait for the end; returns the exit code and stderr."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the supervisor did not end within {seconds:g} s: {self.lines}") from None
        self.lines += self.process.stdout.read().splitlines()
        return self.process.returncode, self.process.stderr.read()
