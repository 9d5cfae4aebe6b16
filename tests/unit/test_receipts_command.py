"""`slimserve --receipts`, as an operator types it, and the page that it draws."""

from __future__ import annotations

import html.parser
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from receipts_support import FACTS, Pace, facts_of, make, measure, rewrite

from harness import charts, tables
from harness.recall.scoring import Outcome, Probe
from harness.receipt import Battery, BatteryVerdict, Rate, Receipt, ServerCounts, Setup, all_in, find
from harness.recording import Recording
from harness.report import STYLE
from harness.report import html as report
from harness.verify import verify
from slimserve import paths
from slimserve.registry_files import load_registry

HOSTILE = "<script>alert(1)</script>\"'&"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the registry with receipts: of the default, of a slower server, aborted, and what is none."""
    folder = tmp_path_factory.mktemp("registry") / "profiles"
    shutil.copytree(Path(__file__).parents[1] / "registry", folder)
    loaded = load_registry(folder)
    facts = facts_of(loaded.subject(loaded.default))
    receipts = folder / "receipts"
    make(receipts, "fast", facts=facts, concurrencies=(1, 8))
    make(receipts, "slow", seed=90, facts=replace(FACTS), pace=Pace().slower(0.3), concurrencies=(1, 8))
    make(receipts, "cut", facts=facts, outcome="aborted", reasons=["it was interrupted"])
    return folder


def slimserve(registry: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slimserve", *words]
    environment = {**os.environ, "SLIMSERVE_PROFILES": str(registry)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_they_are_listed_all_or_of_a_profile(registry: Path) -> None:
    lines = slimserve(registry, "--receipts").stdout.splitlines()
    assert sorted(line.split()[0] for line in lines) == ["cut", "fast", "slow"]
    assert "slow" not in slimserve(registry, "--receipts", "list", "tiny").stdout
    data = json.loads(slimserve(registry, "--receipts", "--json").stdout)
    assert {one["id"]: one["outcome"] for one in data["receipts"]} == {
        "fast": "whole",
        "slow": "whole",
        "cut": "aborted",
    }
    assert data["unusable"] == []


def test_one_is_shown_with_everything_that_a_reader_needs(registry: Path) -> None:
    text = slimserve(registry, "--receipts", "show", "fast").stdout
    for words in ("c8: 8 at once, 3 rounds", "96 sent: 96 ok", "to first    p20", "noise       throughput", "p99"):
        assert words in text
    assert json.loads(slimserve(registry, "--receipts", "show", "fast", "--json").stdout)["id"] == "fast"
    assert "because   it was interrupted" in slimserve(registry, "--receipts", "show", "cut").stdout


def test_they_are_compared_and_verified(registry: Path) -> None:
    assert "verdict: fast (A) wins" in slimserve(registry, "--receipts", "compare", "fast", "slow").stdout
    data = json.loads(slimserve(registry, "--receipts", "compare", "slow", "fast", "--json").stdout)
    assert (data["verdict"], data["b"]) == ("b", "fast")
    result = slimserve(registry, "--receipts", "compare", "fast", "cut")
    assert (result.returncode, "cut is aborted" in result.stderr) == (3, True)
    result = slimserve(registry, "--receipts", "verify")
    assert (result.returncode, len(result.stdout.splitlines())) == (0, 3)


def test_one_that_does_not_prove_what_it_says_fails_verification(registry: Path, tmp_path: Path) -> None:
    copy = tmp_path / "profiles"
    shutil.copytree(registry, copy)
    (copy / "receipts" / "fast.samples.gz").write_bytes(b"")
    (copy / "receipts" / "odd.json").write_text("{")
    result = slimserve(copy, "--receipts", "verify")
    assert result.returncode == 1
    assert "the raw samples of fast cannot be used" in result.stderr
    assert "odd.json: is no receipt" in result.stderr
    assert "odd.json  is no receipt" in slimserve(copy, "--receipts").stdout


def test_one_elsewhere_is_verified_by_the_samples_beside_it(registry: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("fast.json", "fast.samples.gz"):
        shutil.copy(registry / "receipts" / name, elsewhere)
    path = str(elsewhere / "fast.json")
    assert slimserve(registry, "--receipts", "verify", path, "slow").returncode == 0
    (elsewhere / "fast.samples.gz").write_bytes(b"")
    result = slimserve(registry, "--receipts", "verify", path)
    assert result.returncode == 1
    assert "the raw samples of fast cannot be used" in result.stderr
    (elsewhere / "fast.samples.gz").unlink()
    assert slimserve(registry, "--receipts", "verify", path).returncode == 1
    assert slimserve(registry, "--receipts", "verify", "fast").returncode == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--receipts", "shwo"], "did you mean show?"),
        (["--receipts", "tiny"], "do:  slimserve --receipts list tiny\n"),
        (["smollm2", "--receipts"], "do:  slimserve --receipts list smollm2\n"),
        (["--receipts", "show"], "was given 0 names"),
        (["--receipts", "compare", "fast"], "was given 1 name\n"),
        (["--receipts", "show", "nothing"], "there is no receipt 'nothing'"),
        (["--receipts", "list", "nothing"], "there is no profile 'nothing'"),
        (["--receipts", "show", "/nowhere/x.json"], "there is no such file"),
        (["--receipts", "show", f"/tmp/{'a' * 300}.json"], "File name too long"),
        (["--receipts", "verify", f"/tmp/{'a' * 300}.json"], "File name too long"),
        (["--receipts", "show", "a" * 300], "there is no receipt"),
        (["smollm2", "--receipts"], "--receipts takes no profile"),
        (["--receipts", "list", "--port", "9"], "--port says nothing to --receipts"),
    ],
)
def test_words_that_are_not_understood(registry: Path, words: list[str], says: str) -> None:
    result = slimserve(registry, *words)
    assert result.returncode == 2
    assert says in result.stderr
    assert result.stdout == ""


class Page(html.parser.HTMLParser):
    """What a browser would make of it: tags that are open, texts, and everything that it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag not in ("meta", "br", "!doctype"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_receipts_of_the_registry_prove_what_they_say() -> None:
    folder = paths.profiles_folder() / "receipts"
    receipts, unusable = all_in(folder)
    assert unusable == []
    assert [finding for receipt in receipts for finding in verify(receipt, folder)] == []
    strays = {path.name for path in folder.iterdir() if not path.name.startswith(".")} - {"schema.json", "starts"}
    assert strays == {name for one in receipts for name in (f"{one.id}.json", one.samples.file)}


def test_a_report_is_one_whole_page_that_asks_nobody(registry: Path) -> None:
    result = slimserve(registry, "--receipts", "report")
    assert result.returncode == 0, result.stderr
    page = Page(result.stdout)
    assert page.open == []
    assert page.links == []
    assert page.tags.count("figure") == 4
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    assert not re.findall(r"url\(|@import|https?:(?!//127\.0\.0\.1)", result.stdout)
    for words in ("Throughput against interactivity", "Time to the first token", "Prompt tokens from the cache"):
        assert words in result.stdout
    assert "prefers-color-scheme: dark" in STYLE.read_text()
    assert "it was interrupted" not in result.stdout  # only whole ones, unless others are named
    assert "it was interrupted" in slimserve(registry, "--receipts", "report", "cut").stdout


def test_a_report_does_not_flood_a_terminal(registry: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "slimserve", "--receipts", "report"]
    environment = {**os.environ, "SLIMSERVE_PROFILES": str(registry)}
    result = subprocess.run(command, env=environment, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(theirs)
    os.close(ours)
    assert result.returncode == 2
    assert "slimserve --receipts report > report.html" in result.stderr


def test_what_a_receipt_says_is_text_and_never_markup(tmp_path: Path) -> None:
    def fill(recording: Recording) -> None:
        recording.recall["cold"] = Rate(right=9, asked=10, low=0.6, high=0.98)
        recording.battery = Battery(preset="small", seed=1, verdict="fail", findings=(HOSTILE,))
        recording.add_point(Setup(name="c1", concurrency=1))

    facts = replace(FACTS, command=(HOSTILE,), target=replace(FACTS.target, name=HOSTILE, model=HOSTILE))
    receipt = make(tmp_path, facts=facts, outcome="failed", reasons=[HOSTILE], fill=fill)
    text = report([receipt])
    assert "<script" not in text
    assert Page(text).open == []
    assert "&lt;script&gt;" in text
    assert "9 of 10" in text


def test_answers_that_are_wrong_are_said_wherever_a_receipt_is(registry: Path, tmp_path: Path) -> None:
    copy = tmp_path / "profiles"
    shutil.copytree(registry, copy, ignore=shutil.ignore_patterns("receipts"))

    def fill(recording: Recording, right: int) -> None:
        measure(recording, 1, Pace())
        outcomes: list[Outcome] = ["right" if number < right else "repeats" for number in range(40)]
        probes = [
            Probe("own-0a", "code", "cold", "own", 90, 0.5, False, 0, "1234567", outcome, "", 120, 0)
            for outcome in outcomes
        ]
        findings = () if right == 40 else ("path cold: 1 of 40 right",)
        verdict: BatteryVerdict = "fail" if findings else "pass"
        recording.add_battery(Battery(preset="small", seed=1, verdict=verdict, findings=findings), probes)

    receipts = copy / "receipts"
    wrong = make(receipts, "wrong", fill=lambda recording: fill(recording, 1))
    make(receipts, "right", fill=lambda recording: fill(recording, 40))
    make(receipts, "unasked")
    assert wrong.outcome == "whole"
    lines = {line.split()[0]: line for line in slimserve(copy, "--receipts").stdout.splitlines()}
    assert lines["wrong"].endswith("tokens/s  recall fail")
    assert lines["right"].endswith("tokens/s  recall pass")
    assert "recall" not in lines["unasked"]
    data = json.loads(slimserve(copy, "--receipts", "--json").stdout)
    assert {one["id"]: one["recall"] for one in data["receipts"]} == {"wrong": "fail", "right": "pass", "unasked": None}
    text = slimserve(copy, "--receipts", "show", "wrong").stdout
    assert "recall (small battery): FAIL, answers are proved wrong" in text
    assert "cold: 1 of 40 right (0% to 13%)" in text
    assert "recall: not asked" in slimserve(copy, "--receipts", "show", "unasked").stdout
    compared = slimserve(copy, "--receipts", "compare", "wrong", "right").stdout
    assert "wrong: recall fail, answers are proved wrong" in compared
    assert "right: recall" not in compared
    page = slimserve(copy, "--receipts", "report").stdout
    assert page.count('<b class="bad">recall fail</b>') == page.count("<details open>") == 1
    rows = tables.points(all_in(receipts)[0]).splitlines()
    assert sorted(row.split(" | ")[-2] for row in rows[2:]) == ["-", "fail", "pass"]
    assert verify(wrong, receipts) == []
    rewrite(receipts / "wrong.json", recall={"cold": {"right": 39, "asked": 40, "low": 0.9, "high": 1.0}})
    result = slimserve(copy, "--receipts", "verify", "wrong")
    assert (result.returncode, "recall, cold: it is not what the samples say" in result.stderr) == (1, True)


def test_a_report_of_nothing_is_refused(registry: Path, tmp_path: Path) -> None:
    copy = tmp_path / "profiles"
    shutil.copytree(registry, copy, ignore=shutil.ignore_patterns("receipts"))
    result = slimserve(copy, "--receipts", "report")
    assert result.returncode == 2
    assert "there is no receipt to draw" in result.stderr


def test_the_tables_of_the_documents_hold_what_profiles_cite(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receipts, _ = all_in(registry / "receipts")
    table = tables.points(receipts)
    assert table.count("\n") == 1 + sum(len(one.points) for one in receipts)
    assert "| `tiny-bf16-box` | chat-small | 8 at once |" in table
    assert tables.cited(load_registry(registry)) == "No receipt yet."
    assert tables.table(["a"], [["x|y\nz"]]).splitlines()[-1] == "| x\\|y z |"


def test_cache_hits_are_the_servers_metrics_and_else_its_answers(tmp_path: Path) -> None:
    receipt: Receipt = make(tmp_path)
    (point,) = receipt.points
    assert tables.hits(replace(point, server=ServerCounts(cache_queries=200.0, cache_hits=50.0))) == 0.25
    assert tables.hits(replace(point, server=ServerCounts(), cached_tokens=4800)) == 0.5
    assert tables.hits(replace(point, server=ServerCounts(), cached_tokens=None)) is None


def test_drafts_have_a_column_where_there_are_any(tmp_path: Path) -> None:
    def fill(recording: Recording) -> None:
        measure(recording, 1, Pace())
        recording.add_counts("c8", ServerCounts(drafts=40, accepted_tokens=50))
        server = ServerCounts(drafts=10, accepted_tokens=17)
        recording.add_battery(Battery(preset="small", seed=1, verdict="pass", findings=(), server=server), [])

    drafted, other = make(tmp_path, "drafted", fill=fill), make(tmp_path, "other")
    assert (drafted.outcome, verify(drafted, tmp_path)) == ("whole", [])
    head, _, *rows = tables.points([drafted, other]).splitlines()
    place = head.split(" | ").index("acceptance length")
    assert [row.split(" | ")[place] for row in rows] == ["2.25", "-"]
    assert "  acceptance length: 2.70" in tables.recall(drafted)
    page = report([drafted, other])
    assert '<th scope="col">acceptance length</th>' in page
    assert "<td>2.25</td>" in page
    assert "acceptance length: 2.70" in page
    for text in (tables.points([other]), report([other]), *tables.recall(other)):
        assert "acceptance length" not in text


def test_a_receipt_from_before_batteries_had_counts_is_read(tmp_path: Path) -> None:
    battery = Battery(preset="small", seed=1, verdict="pass", findings=())
    make(tmp_path, fill=lambda recording: (measure(recording, 1, Pace()), recording.add_battery(battery, []))[0])
    path = tmp_path / "one.json"
    told = json.loads(path.read_text())["battery"]
    del told["server"]
    rewrite(path, battery=told)
    assert find(tmp_path, "one").battery == battery


@pytest.mark.parametrize("highest", [0.0007, 0.3, 1, 9.99, 10, 42, 1367, 12345.6])
def test_axes_end_at_a_round_number_just_above_what_they_show(highest: float) -> None:
    found = charts.ticks(highest)
    assert found[0] == 0
    assert found[-2] < highest <= found[-1] * (1 + 1e-9)
    assert 3 <= len(found) <= 7
    assert charts.ticks(0) == [0.0, 1.0]


def test_each_series_has_a_mark_of_its_own() -> None:
    shapes = {re.sub(r"s\d", "", charts.mark(number, 10, 10)) for number in range(charts.SERIES)}
    assert len(shapes) == charts.SERIES
