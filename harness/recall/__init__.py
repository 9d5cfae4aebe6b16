"""The recall battery: whether an engine that is fast also says what is right. See docs/recall.md."""

from __future__ import annotations

from harness.recall.battery import run_battery
from harness.recall.report import Report
from harness.recall.settings import MEDIUM, PRESETS, SMALL, Settings

__all__ = ["MEDIUM", "PRESETS", "SMALL", "Report", "Settings", "run_battery"]
