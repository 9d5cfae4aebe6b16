"""The recall battery with the real engine, through the door: a few questions, of which each has to come through."""

from __future__ import annotations

from dataclasses import replace

from server_support import KEY, PROFILE, Server

from harness.recall import SMALL, run_battery
from slimserve.client_faults import Endpoint


def test_the_battery_is_answered_and_compared_through_the_door(server: Server) -> None:
    few = replace(SMALL, shapes=SMALL.shapes[:1], pairs=1, known=1)
    report = run_battery(Endpoint(f"http://127.0.0.1:{server.port}/v1", PROFILE, KEY), few)
    # What so small a model answers is chance. That each answer comes, and the same numbers on each path, is not.
    assert len(report.probes) == 7
    assert [probe.reason for probe in report.probes if probe.outcome == "failed"] == []
    assert [compared.outcome for compared in report.comparisons] == ["same", "same"], report.table()
    asked = report.to_json()["paths"]
    assert asked["cold"]["cached_tokens"] == 0
    assert asked["hit"]["asked_with_cached_tokens"] >= 2
