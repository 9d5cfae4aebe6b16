"""The real engine under the supervisor: it gets ready, it stops, and a killed supervisor takes it along."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import until

from slimserve.admission.config import Config
from slimserve.engine import procfs
from slimserve.engine.command import DOOR
from slimserve.engine.control import Control
from slimserve.engine.supervisor import Launch, Supervisor
from slimserve.shapes import plain

ROOT = Path(__file__).resolve().parents[2]
DRIVER = ROOT / "tests/unit/supervisor_driver.py"
GONE_SECONDS = 5.0
KERNEL = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


@pytest.fixture
def launch(smollm2_folder: Path, tmp_path: Path, engine_cache: Path) -> Iterator[Launch]:
    """A launch of the smallest engine that answers; afterwards nothing of it may live."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = int(server.getsockname()[1])
    options = {
        "model": str(smollm2_folder),
        "served-model-name": "smollm2",
        "uds": str(tmp_path / "runs/run/engine.sock"),
        "middleware": DOOR,
        "max-model-len": "512",
        "max-num-seqs": "4",
        "kv-cache-memory-bytes": "100000000",
    }
    argv = [sys.executable, "-m", "slimserve.engine.entry", "--enforce-eager"]
    argv += [word for name, value in options.items() for word in (f"--{name}", value)]
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "VLLM_CACHE_ROOT": str(engine_cache),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    yield Launch(
        argv=tuple(argv),
        env=env,
        host="127.0.0.1",
        port=port,
        admission=Config(max_in_flight=8, max_model_len=512),
        control=tmp_path / "runs/run/engine.sock",
        model_name="smollm2",
        run_folder=tmp_path / "runs/run",
        load_seconds=200.0,
        warmup_seconds=60.0,
        drain_seconds=60.0,
        stall_seconds=60.0,
        stop_seconds=20.0,
        profile_id="test",
    )
    left = living(tmp_path)
    for process in left:
        procfs.kill(process)
    assert left == []


def living(home: Path) -> list[procfs.Process]:
    """The processes whose working folder is the test's: every one that the supervisor's process started."""
    found = []
    for process in procfs.living():
        try:
            if process.pid != os.getpid() and os.readlink(f"/proc/{process.pid}/cwd") == str(home):
                found.append(process)
        except OSError:
            continue
    return found


def drive(launch: Launch, home: Path) -> subprocess.Popen[str]:
    """A supervisor in a process of its own, in the foreground."""
    fields = {name: getattr(launch, name) for name in Launch.__dataclass_fields__}
    driver = subprocess.Popen(
        [sys.executable, str(DRIVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(launch.env),
        cwd=home,
        text=True,
    )
    assert driver.stdin is not None
    paths = {name: str(fields[name]) for name in ("run_folder", "control")}
    admission = plain(launch.admission, nulls=False)
    json.dump({**fields, **paths, "env": dict(launch.env), "admission": admission}, driver.stdin)
    driver.stdin.close()
    return driver


def on_the_way(launch: Launch, home: Path, moment: str) -> Launch:
    """A launch that comes past `moment`: an engine whose cache knows the model's class does not inspect it."""
    if moment != "inspecting":
        return launch
    return replace(launch, env={**launch.env, "VLLM_CACHE_ROOT": str(home / "cache")})


def await_moment(driver: subprocess.Popen[str], launch: Launch, home: Path, moment: str) -> None:
    """Wait until the engine has come so far: imports, inspects the model, loads (its core lives), or serves."""
    assert driver.stdout is not None
    report = "ready" if moment == "serving" else "loading"
    assert any(line.startswith(report) for line in driver.stdout), "the supervisor ended too early"
    signs = {
        "importing": lambda: len(living(home)) >= 3,  # supervisor, leader, guard
        "inspecting": lambda: any("inspection" in procfs.command_line(one.pid) for one in living(home)),
        "loading": lambda: any(one.name.startswith("VLLM::Worker") for one in living(home)),
        "serving": lambda: True,
    }

    def reached() -> bool:
        assert driver.poll() is None, (launch.run_folder / "engine.log").read_text()[-3000:]
        return signs[moment]()

    until(reached, launch.load_seconds)


def await_nothing(home: Path, seconds: float) -> None:
    with contextlib.suppress(AssertionError):  # the next line says what is left
        until(lambda: not living(home), seconds)
    assert living(home) == []


@pytest.mark.parametrize("moment", ["importing", "inspecting", "loading", "serving"])
def test_kill_9_of_the_supervisor_leaves_no_engine(launch: Launch, tmp_path: Path, moment: str) -> None:  # B1
    driver = drive(on_the_way(launch, tmp_path, moment), tmp_path)
    try:
        await_moment(driver, launch, tmp_path, moment)
        before = set(os.listdir("/dev/shm"))
    finally:
        driver.kill()
        driver.wait(10.0)
    await_nothing(tmp_path, GONE_SECONDS)
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("moment", ["importing", "inspecting", "loading"])
def test_sigterm_before_ready_leaves_nothing(launch: Launch, tmp_path: Path, moment: str) -> None:  # B2
    driver = drive(on_the_way(launch, tmp_path, moment), tmp_path)
    try:
        await_moment(driver, launch, tmp_path, moment)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(launch.stop_seconds + 10.0) == 1
    finally:
        driver.kill()
    await_nothing(tmp_path, 0.0)


def test_a_core_that_stands_still_is_replaced(launch: Launch, tmp_path: Path) -> None:  # B6
    driver = drive(replace(launch, stall_seconds=10.0), tmp_path)
    assert driver.stdout is not None
    try:
        assert any(line.startswith("ready") for line in driver.stdout), "it never was ready"
        (core,) = [one for one in living(tmp_path) if one.name == "VLLM::EngineCor"]
        os.kill(core.pid, signal.SIGSTOP)
        with socket.create_connection(("127.0.0.1", launch.port)) as client:
            body = json.dumps({"model": "smollm2", "prompt": "Hello", "max_tokens": 8})
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            frozen = "the engine is frozen: 1 sequences are under way"
            assert any(line.startswith(frozen) for line in driver.stdout), "the freeze was not seen"
        assert any(line.startswith("ready") for line in driver.stdout), "it did not come back"
        assert core.pid not in [one.pid for one in living(tmp_path)]
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(launch.stop_seconds + 10.0) == 0
    finally:
        driver.kill()
        driver.wait(10.0)


def test_a_killed_process_is_named_and_the_end_of_the_core_is_in_the_last_words(launch: Launch, tmp_path: Path) -> None:
    driver = drive(launch, tmp_path)
    assert driver.stdout is not None
    try:
        assert any(line.startswith("ready") for line in driver.stdout), "it never was ready"
        (core,) = [one for one in living(tmp_path) if one.name == "VLLM::EngineCor"]
        os.kill(core.pid, signal.SIGKILL)
        told = ""
        for line in driver.stdout:
            told += line
            if line.startswith("ready"):
                break
        assert f"its process {core.pid} (VLLM::EngineCore) died first" in told
        if KERNEL >= (6, 15):  # an older one does not tell the status of what its parent has fetched
            assert "died first: signal 9 (SIGKILL)" in told
        assert " ERROR " in told
        (api_server,) = [one for one in living(tmp_path) if one.session == one.pid]
        os.kill(api_server.pid, signal.SIGKILL)
        told = ""
        for line in driver.stdout:
            told += line
            if line.startswith("ready"):
                break
        assert f"its process {api_server.pid} (the API server) died first: signal 9 (SIGKILL)" in told
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(launch.stop_seconds + 10.0) == 0
    finally:
        driver.kill()
        driver.wait(10.0)


def test_it_serves_listens_on_loopback_alone_and_stops(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []
    folder = Path.cwd()
    os.chdir(tmp_path)
    own = Path(tempfile.mkdtemp(prefix="own-", dir="/tmp"))  # pytest's is too long for a socket
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    try:
        with Supervisor(launch, reports.append) as supervisor:
            engine = living(tmp_path)
            (scratch,) = own.iterdir()
            assert any(path.is_socket() for path in scratch.iterdir())
            assert {"VLLM::EngineCor", "VLLM::Worker"} <= {one.name for one in engine}
            addresses = {address for one in engine for address in listening(one.pid)}
            assert addresses
            assert not [address for address in addresses if not is_loopback(address)]
            # The public socket went to the API server and to nobody that it started.
            holders = [one for one in engine if public_socket(launch.port) & set(descriptors(one.pid))]
            assert [(one.pid, one.parent) for one in holders] == [(holders[0].session, os.getpid())]
            assert Control(launch.control).door().accepting
            metrics = Control(launch.control).metrics()
            assert metrics is not None
            assert "vllm:num_requests_running" in metrics
            assert "slimserve_" in metrics
    finally:
        os.chdir(folder)
    assert supervisor.log_path.exists()
    assert "stopped" in reports[-1]
    await_nothing(tmp_path, 2.0)
    own.rmdir()  # for which it has to be empty


def descriptors(pid: int) -> list[str]:
    """What the descriptors of a process stand for."""
    found = []
    for handle in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{handle}"))
        except OSError:
            continue
    return found


def public_socket(port: int) -> set[str]:
    """The listening socket at `port`, as a descriptor shows it."""
    return {f"socket:[{inode}]" for state, inode in procfs.sockets(port) if state == "0A"}


def listening(pid: int) -> set[str]:
    """The addresses, as /proc/net writes them, of the TCP sockets that a process listens on."""
    inodes = set(descriptors(pid))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def is_loopback(address: str) -> bool:
    """Whether an address of /proc/net (hexadecimal, each 32 bits in host order) is 127.0.0.0/8 or ::1."""
    words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
    raw = b"".join(words)
    return raw[0] == 127 if len(raw) == 4 else raw == bytes(15) + b"\1" or raw[:13] == bytes(10) + b"\xff\xff\x7f"
