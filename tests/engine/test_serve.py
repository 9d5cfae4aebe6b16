"""The whole way with the real engine: serve, the official client, the chat, keys, and the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest
from server_support import KEY, PROFILE, Server, environment_of, free_port

from slimserve.engine import procfs


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0)


def test_the_official_client_lists_the_model(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names[0] == PROFILE
    assert "smollm2" in names


def test_the_official_client_streams_and_reads_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=PROFILE,
        messages=[{"role": "user", "content": "Explain what a hash table is in two sentences."}],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=32,
        seed=7,
    )
    pieces, usage = [], None
    for chunk in stream:
        if chunk.choices:
            pieces.append(chunk.choices[0].delta.content or "")
        usage = chunk.usage or usage
    assert "hash" in "".join(pieces)
    assert usage is not None
    assert 0 < usage.completion_tokens <= 32
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_the_weights_are_the_models(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=PROFILE, prompt="The capital of France is", max_tokens=4, seed=7)
    assert "Paris" in answer.choices[0].text


def test_a_repeated_prefix_comes_from_the_cache_and_usage_says_so(client: openai.OpenAI) -> None:
    question = "The river runs past the mill and the old bridge. " * 60
    cached = []
    for _ in range(2):
        answer = client.completions.create(model=PROFILE, prompt=question, max_tokens=1)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        cached.append(details.cached_tokens if details and details.cached_tokens else 0)
    assert cached[0] == 0
    assert cached[1] >= 128


@pytest.mark.parametrize("key", ["wrong", ""])
def test_another_key_is_turned_away(server: Server, key: str) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/models", headers={"Authorization": f"Bearer {key}"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert caught.value.code == 401


def test_no_origin_is_allowed(server: Server) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/models",
        headers={"Authorization": f"Bearer {KEY}", "Origin": "https://example.org"},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        assert response.headers.get("access-control-allow-origin") is None


def family(pid: int) -> list[int]:
    """`pid` and all its descendants."""
    living = list(procfs.living())
    found = [pid]
    for member in found:
        found += [process.pid for process in living if process.parent == member]
    return found


def test_the_key_is_in_no_command_line_and_no_file(server: Server) -> None:
    pids = family(server.process.pid)
    assert len(pids) >= 3  # supervisor, API server, engine core
    for pid in pids:
        assert KEY not in procfs.command_line(pid)
    files = [path for path in Path(server.environment["SLIMSERVE_STATE"]).rglob("*") if path.is_file()]
    assert any(path.name == "engine.log" for path in files)
    for path in files:
        assert KEY not in path.read_text(errors="replace")
    assert KEY not in "".join(server.words)


def test_everything_listens_on_loopback(server: Server) -> None:
    pids = family(server.process.pid)
    inodes = set()
    for pid in pids:
        for handle in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{handle}") if os.path.lexists(f"/proc/{pid}/fd/{handle}") else ""
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    exposed, seen = [], set()
    for table, loopback in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            seen.add(int(port, 16))
            if fields[3] == "0A" and fields[9] in inodes and address != loopback:
                exposed.append((table, address, int(port, 16)))
    assert exposed == []
    assert server.port in seen


def ask(server: Server, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slimserve", PROFILE, "--port", str(server.port), *arguments],
        env=server.environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_one_question_uses_the_endpoint_that_runs(server: Server) -> None:
    result = ask(server, "-p", "Say hello.")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "tokens/s" in result.stderr
    assert "loading" not in result.stderr


def test_a_piped_conversation_grows(server: Server) -> None:
    result = ask(server, stdin="Say hello.\nList three fruits.\n/stats\n")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 2
    assert "2 turns" in result.stderr


def test_a_second_server_is_refused_by_its_port(server: Server) -> None:
    result = ask(server, "--serve")
    assert result.returncode == 3
    taken = (
        f"port {server.port} on 127.0.0.1 is taken by the endpoint of {PROFILE} (process {server.process.pid}), ready"
    )
    assert taken in result.stderr


def test_status_names_the_endpoint(server: Server) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "slimserve", "--status", "--json"],
        env=server.environment,
        capture_output=True,
        text=True,
    )
    (endpoint,) = json.loads(shown.stdout)["endpoints"]
    assert (endpoint["profile"], endpoint["state"], endpoint["port"]) == (PROFILE, "ready", server.port)
    assert (endpoint["pid"], endpoint["restarts"], endpoint["door"]["in_flight"]) == (server.process.pid, 0, 0)


def test_one_question_starts_an_engine_and_leaves_none(smollm2_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    result = subprocess.run(
        [sys.executable, "-m", "slimserve", PROFILE, "--port", str(port), "-p", "Say hello."],
        env=environment_of(tmp_path),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "ready http://" in result.stderr
    assert procfs.listener(port) is None
    assert list((tmp_path / "state").rglob("engine.json")) == []


def test_kill_9_of_the_command_leaves_no_engine_process(smollm2_folder: Path, tmp_path: Path) -> None:
    started = Server.start(tmp_path, key=None)
    started.wait_for("ready http://")
    pids = family(started.process.pid)
    assert len(pids) >= 3
    started.process.kill()
    started.process.wait(10)
    deadline = time.monotonic() + 5
    while left := [process for pid in pids if (process := procfs.read(pid)) is not None and process.alive]:
        assert time.monotonic() < deadline, f"5 s later there still are {left}"
        time.sleep(0.05)


def get(server: Server, path: str) -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", headers={"Authorization": f"Bearer {KEY}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_killed_engine_comes_back_and_a_drain_lets_a_stream_finish(smollm2_folder: Path, tmp_path: Path) -> None:
    started = Server.start(tmp_path)
    try:
        started.wait_for("loading")
        assert get(started, "/v1/models") == 503
        started.wait_for("ready http://")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{started.port}/v1", api_key=KEY, max_retries=0)
        assert client.completions.create(model=PROFILE, prompt="One", max_tokens=1).usage is not None

        (record,) = (tmp_path / "state").rglob("engine.json")
        first = json.loads(record.read_text())["pid"]
        os.kill(first, signal.SIGKILL)
        started.wait_for("restarting in 0 s")
        assert get(started, "/v1/models") == 503  # answered by the front: neither refused nor left waiting
        deadline = time.monotonic() + 240
        while get(started, "/v1/models") != 200:
            assert time.monotonic() < deadline, "".join(started.words)
            time.sleep(0.1)
        assert json.loads(record.read_text())["pid"] != first

        stream = client.completions.create(
            model=PROFILE, prompt="Once upon a time", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        pids = family(started.process.pid)
        started.process.send_signal(signal.SIGTERM)
        started.wait_for("draining")
        deadline = time.monotonic() + 30
        while get(started, "/v1/models") != 503:
            assert time.monotonic() < deadline
        assert list(chunks)[-1].choices[0].finish_reason == "length"
        assert started.process.wait(60) == 0
        started.wait_for("every answer is complete")
        assert [process for pid in pids if (process := procfs.read(pid)) is not None and process.alive] == []
    finally:
        started.stop()


def test_a_stop_does_not_wait_for_streams_beyond_the_drain(smollm2_folder: Path, tmp_path: Path) -> None:
    started = Server.start(tmp_path, key=None)
    started.wait_for("ready http://")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{started.port}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model=PROFILE, prompt="Once upon a time", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    started.process.send_signal(signal.SIGTERM)
    started.wait_for("draining")
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(30) == 0  # the profile grants the drain 60 s, and the stop 20
    started.wait_for("told again: stopping now")
