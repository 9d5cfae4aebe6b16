"""The dashboard and the systemd unit that go with the page."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from slimserve import exposure, paths
from slimserve.admission.metrics import Metrics
from slimserve.engine.state import State, Status
from slimserve.engine.variables import OWNED
from slimserve.operator import exposition, history
from slimserve.registry_files import load_registry

DOCS = Path(__file__).resolve().parents[2] / "docs"
UNIT = DOCS / "slimserve.service"
RECORDED = (Path(__file__).resolve().parents[1] / "operator" / "metrics.txt").read_text(encoding="utf-8")
NAME = re.compile(r"\b(?:vllm:|slimserve_)\w+")


def known_metrics() -> set[str]:
    """What an endpoint exports: a real engine's recorded text, the door's own registry, the appliance's own text."""
    door = CollectorRegistry()
    Metrics(door)
    appliance = exposition.render(None, Status(State.READY, 1.0, "ready"), time.time())
    # The TYPE lines name metrics that have no series yet as well.
    text = "\n".join((RECORDED, generate_latest(door).decode(), appliance))
    families = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, flags=re.MULTILINE))
    histograms = {
        f"{name}{part}"
        for name, kind in families.items()
        if kind == "histogram"
        for part in ("_bucket", "_sum", "_count")
    }
    return set(families) | histograms


def expressions() -> list[str]:
    dashboard: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    variables = [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    return variables + [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_only_for_metrics_that_exist() -> None:
    named = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(named) > 15
    assert named - known_metrics() == set()


def test_the_dashboard_shows_every_metric_that_the_page_shows() -> None:
    source = Path(history.__file__).read_text(encoding="utf-8")
    shown = set(NAME.findall(source))
    asked = " ".join(expressions())
    assert len(shown) > 10
    assert {name for name in shown if name not in asked} == set()


def test_the_page_reads_only_metrics_that_exist() -> None:
    known = known_metrics()
    named = set(NAME.findall(Path(history.__file__).read_text(encoding="utf-8")))
    assert {name for name in named if name not in known} == set()


def test_panels_do_not_lie_on_each_other() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def unit() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser["Service"]


def test_the_unit_waits_longer_than_any_profile_takes_to_stop() -> None:
    service = unit()
    minutes = re.fullmatch(r"(\d+)min", service["TimeoutStopSec"])
    assert minutes is not None
    registry = load_registry(paths.profiles_folder(), OWNED)
    for profile in registry.profiles.values():
        needed = profile.serve.drain_seconds.value + profile.serve.stop_seconds.value
        assert int(minutes[1]) * 60 > needed, profile.id
    assert service["KillMode"] == "mixed"
    assert service["Restart"] == "on-failure"
    assert service["LimitMEMLOCK"] == "infinity"


def test_the_unit_makes_its_first_start_without_keys_and_its_head_names_its_folders(tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8")
    folders = re.compile(r"\b(SLIMSERVE_[A-Z]+)=(\S+)")
    lines = text.splitlines()
    own = dict(folders.findall("\n".join(line for line in lines if line.startswith("Environment="))))
    assert own.keys() == {"SLIMSERVE_CACHE", "SLIMSERVE_STATE", "SLIMSERVE_KEYS"}
    assert dict(folders.findall("\n".join(line for line in lines if line.startswith("#")))) == own
    environment = {name: f"{tmp_path}{folder}" for name, folder in own.items()}
    (tmp_path / "var/lib/slimserve").mkdir(parents=True)  # as systemd makes it: empty
    assert not exposure.keys(environment, "127.0.0.1").required


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = UNIT.read_text(encoding="utf-8")
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace("/opt/slimserve/.venv/bin/slimserve", sys.executable), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    # It looks at the system's other units too; only words about this one count.
    assert [line for line in (done.stdout + done.stderr).splitlines() if "slimserve" in line] == []
