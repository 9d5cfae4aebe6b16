"""The operator's page over HTTP: a real uvicorn, a source whose numbers move."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from receipts_support import facts_of, make, rewrite

from slimserve import paths
from slimserve.engine.state import Crash, State, Status
from slimserve.errors import Finding
from slimserve.operator import app
from slimserve.operator.app import FILES, HEADERS, LOG_LINES, STATIC
from slimserve.operator.prometheus import parse
from slimserve.registry_files import load_registry
from slimserve.shapes import plain

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "operator"))

from live import Live
from serving import DEADLINE_SECONDS, page_of

DATA = ("/status.json", "/history.json", "/profile.json", "/doctor.json", "/receipts.json", "/log", "/metrics")
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in STATIC.glob("*.js")}


@pytest.fixture
def live(tmp_path: Path) -> Live:
    return Live(tmp_path / "engine.log", tmp_path / "receipts")


@pytest.fixture
def client(live: Live) -> Iterator[httpx.Client]:
    with page_of(live.source) as url, httpx.Client(base_url=url, timeout=DEADLINE_SECONDS) as client:
        yield client


def wait_for_point(client: httpx.Client, column: str) -> float:
    """The newest known value of a column of the history."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        known = [value for value in client.get("/history.json").json()["columns"][column] if value is not None]
        if known:
            return float(known[-1])
        time.sleep(0.05)
    raise AssertionError(f"no {column} within {DEADLINE_SECONDS} s")


def next_event(lines: Iterator[str]) -> dict[str, object]:
    data = next(line for line in lines if line.startswith("data: "))
    event: dict[str, object] = json.loads(data.removeprefix("data: "))
    return event


def test_every_route_answers_with_the_headers_that_keep_others_out(client: httpx.Client) -> None:
    for path in (*FILES, *DATA, "/no-such-page"):
        answer = client.get(path)
        assert answer.status_code == (404 if path == "/no-such-page" else 200), path
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        assert "set-cookie" not in answer.headers
        assert "server" not in answer.headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8001", "127.0.0.1.evil.example", "10.0.0.1", "", "localhost."]
)
def test_a_name_that_is_not_loopback_is_refused(client: httpx.Client, host: str) -> None:
    for path in (*FILES, *DATA, "/events"):
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code == 400, path
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:8001", "[::1]", "[::1]:8001", "LOCALHOST"])
def test_the_names_of_loopback_are_answered_at_any_port(client: httpx.Client, host: str) -> None:
    assert client.get("/status.json", headers={"Host": host}).status_code == 200


def test_nothing_can_be_done_here(client: httpx.Client) -> None:
    for path in (*FILES, *DATA, "/events"):
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            assert client.request(method, path).status_code == 405, (method, path)


def test_the_status_says_where_the_endpoint_stands(client: httpx.Client, live: Live) -> None:
    live.current = Status(State.FAILED, 12.5, "three crashes in a row", 600.0, 3, Crash(9.5, "a", "b", ("<b>",), "c"))
    data = client.get("/status.json").json()
    assert data["status"] == plain(live.current)
    assert data["url"] == live.url
    assert data["reach"] == live.reach.to_json()
    assert data["started"] == live.started


def test_history_moves(client: httpx.Client) -> None:
    assert wait_for_point(client, "generated_per_s") > 0
    assert wait_for_point(client, "cap") == 24
    assert client.get("/status.json").json()["point"]["state"] == "ready"


def test_a_change_of_state_is_pushed(client: httpx.Client, live: Live) -> None:
    with client.stream("GET", "/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        assert next_event(lines)["status"]["state"] == "ready"  # type: ignore[index]
        live.current = Status(State.RESTARTING, time.time(), "the engine was killed by SIGKILL", None, 1)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            status = next_event(lines)["status"]
            if status == plain(live.current):
                return
    raise AssertionError("the change never came")


def test_a_point_of_another_state_is_not_shown_beside_this_one(live: Live) -> None:
    with page_of(live.source, 600.0) as url, httpx.Client(base_url=url, timeout=DEADLINE_SECONDS) as client:
        wait_for_point(client, "cap")
        live.current = Status(State.RESTARTING, time.time(), "the engine was killed by SIGKILL", None, 1)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:  # the next regular point would come in ten minutes
            data = client.get("/status.json").json()
            if data["point"] is not None:
                assert data["point"]["state"] == data["status"]["state"] == "restarting"
                return
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_streams_are_bounded_and_given_back(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_STREAMS", 2)
    with page_of(live.source) as url, httpx.Client(base_url=url, timeout=DEADLINE_SECONDS) as client:
        with client.stream("GET", "/events") as one, client.stream("GET", "/events") as two:
            lines = one.iter_lines(), two.iter_lines()  # a generator that is let go of closes its stream
            for each in lines:
                next_event(each)
            assert client.get("/events").status_code == 503
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            with client.stream("GET", "/events") as again:
                if again.status_code == 200:
                    next_event(again.iter_lines())
                    return
        raise AssertionError("a stream that was closed is still counted")


def test_the_server_ends_with_a_page_open(live: Live) -> None:
    with contextlib.ExitStack() as still_open:
        client = still_open.enter_context(httpx.Client(timeout=DEADLINE_SECONDS))
        with page_of(live.source) as url:
            lines = still_open.enter_context(client.stream("GET", f"{url}/events")).iter_lines()
            next_event(lines)
        with pytest.raises(httpx.ConnectError):  # page_of has seen it end
            httpx.get(url)


def test_metrics_of_engine_and_appliance_are_one_text(client: httpx.Client, live: Live) -> None:
    live.current = Status(State.READY, 100.0, "ready", None, 2)
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    reading = parse(answer.text, 1.0)
    assert reading.total("vllm:generation_tokens_total") is not None
    assert reading.total("slimserve_state", {"state": "ready"}) == 1.0
    assert reading.total("slimserve_state") == 1.0
    assert len(list(reading.values("slimserve_state"))) == len(State)
    assert reading.total("slimserve_engine_restarts_total") == 2.0
    assert reading.total("slimserve_state_since_seconds") == 100.0
    assert reading.total("slimserve_engine_answers") == 1.0
    families = re.findall(r"^# TYPE (\S+)", answer.text, flags=re.MULTILINE)
    assert len(families) == len(set(families))


def test_metrics_without_an_engine_are_the_appliances_own(client: httpx.Client, live: Live) -> None:
    live.engine_answers = False
    reading = parse(client.get("/metrics").text, 1.0)
    assert reading.total("slimserve_engine_answers") == 0.0
    assert {name.partition("_")[0] for name in reading.samples} == {"slimserve"}


def test_an_engine_whose_metrics_cannot_be_read_costs_the_numbers_alone(
    client: httpx.Client, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Live, "metrics", lambda self: "<html>")
    before = len(client.get("/history.json").json()["columns"]["time"])
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        columns = client.get("/history.json").json()["columns"]
        if len(columns["time"]) > before + 2:
            break
        assert time.monotonic() < deadline
    assert columns["in_flight"][-1] is None


def test_a_source_that_breaks_its_word_costs_one_point(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_point(client, "cap")
    broken = threading.Event()

    def metrics(self: Live) -> str:
        broken.set()
        raise RuntimeError("a source does not do that")

    with monkeypatch.context() as patch:
        patch.setattr(Live, "metrics", metrics)
        assert broken.wait(DEADLINE_SECONDS)
    count = len(client.get("/history.json").json()["columns"]["time"])
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(client.get("/history.json").json()["columns"]["time"]) <= count:
        assert time.monotonic() < deadline


def test_the_log_is_its_end_without_what_could_steer(client: httpx.Client, live: Live) -> None:
    assert client.get("/log").text == ""
    lines = [f"line {number}" for number in range(2000)]
    live.log_path.write_bytes("\n".join(lines).encode() + b"\n\x1b]0;title\x07\xff\xfe<script>\n")
    answer = client.get("/log")
    assert answer.headers["content-type"].startswith("text/plain")
    shown = answer.text.splitlines()
    assert len(shown) == LOG_LINES
    assert shown[-2] == "line 1999"
    assert shown[-1].endswith("<script>")
    assert "\x1b" not in answer.text


def test_a_log_that_cannot_be_read_is_named(client: httpx.Client, live: Live) -> None:
    live.log_path.mkdir()
    answer = client.get("/log")
    assert answer.status_code == 503
    assert str(live.log_path) in answer.text


def test_the_doctor_is_not_asked_for_every_page(
    client: httpx.Client, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    finding = Finding("the fact", "the reason", "the remedy")
    monkeypatch.setattr(Live, "doctor", lambda self: asked.append(1) or [finding])
    first, second = client.get("/doctor.json").json(), client.get("/doctor.json").json()
    assert first == second
    assert first["findings"] == [finding.to_json()]
    assert asked == [1]


def test_receipts_are_those_of_the_profile_newest_first_and_broken_ones_are_named(
    client: httpx.Client, live: Live
) -> None:
    assert client.get("/receipts.json").json() == {"profile": "smollm2-135m-bf16-cpu", "receipts": []}
    registry = load_registry(paths.profiles_folder())
    facts, folder = facts_of(registry.subject(registry.default)), live.receipts_folder
    for name in ("newer", "older"):
        make(folder, name, facts=facts)
    rewrite(folder / "older.json", written="2026-01-01T00:00:00Z")
    make(folder, "other")
    (folder / "schema.json").write_text("{}")
    (folder / "broken.json").write_text("{")
    (folder / "list.json").write_text("[]")
    found = client.get("/receipts.json").json()["receipts"]
    assert [one["file"] for one in found] == ["newer.json", "older.json", "list.json", "broken.json"]
    assert found[0]["workload"]["name"] == "chat-small"
    assert found[2]["problem"] == "no JSON object"
    assert found[3]["problem"]


def test_one_odd_file_hides_no_receipt(client: httpx.Client, live: Live) -> None:
    registry = load_registry(paths.profiles_folder())
    folder = live.receipts_folder
    make(folder, "good", facts=facts_of(registry.subject(registry.default)))
    for name, changes in {
        "half": {"commit": "\ud800"},
        "inf": {"extra": 1e400},
        "deep": {"extra": nested(900)},
    }.items():
        shutil.copy(folder / "good.json", folder / f"{name}.json")
        rewrite(folder / f"{name}.json", **changes)
    (folder / "inf.json").write_text((folder / "inf.json").read_text().replace("Infinity", "1e999"))
    (folder / os.fsdecode(b"\xff.json")).write_text("{}")
    found = client.get("/receipts.json").json()["receipts"]
    problems = {one["file"]: one.get("problem") for one in found}
    assert set(problems) == {"good.json", "half.json", "inf.json", "deep.json", r"\udcff.json"}
    assert [name for name, problem in problems.items() if not problem] == ["good.json"]


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def test_the_page_refers_to_nothing_but_itself() -> None:
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8")
        addresses = re.findall(r"[a-z]+://[^\s\"'`)]+", text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, path.name
    assert {name for name, _ in FILES.values()} == {path.name for path in STATIC.iterdir()}


def test_what_the_scripts_write_is_text_never_markup() -> None:
    for name, text in SCRIPTS.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            name
        )
    page = (STATIC / "page.html").read_text(encoding="utf-8")
    # The policy of the page forbids both, so that they would be dead letters.
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)", page)


def test_every_element_that_the_script_names_is_in_the_page() -> None:
    page = (STATIC / "page.html").read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    named = set(re.findall(r'\b(?:at|put|big)\("([a-z0-9-]+)"', SCRIPTS["page.js"]))
    assert len(named) > 20
    assert named <= set(ids)
    labels = set(re.findall(r'aria-labelledby="([^"]+)"', page))
    assert labels <= set(ids)


def test_the_charts_name_columns_that_the_history_has(client: httpx.Client) -> None:
    columns = client.get("/history.json").json()["columns"]
    named = set(re.findall(r'key: "(\w+)"', SCRIPTS["page.js"]))
    assert len(named) > 8
    assert named <= columns.keys()


def test_the_protocol_costs_nothing_to_import() -> None:
    costly = ("starlette", "uvicorn", "prometheus_client")
    code = f"import sys, slimserve.operator.source; print([name for name in {costly} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
