"""Marks tests by their folder, and skips what this machine cannot run, with the reason."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says nothing about whether it is right, on a machine that does other things besides.
settings.register_profile("slimserve", deadline=None)
settings.load_profile("slimserve")

TESTS = Path(__file__).resolve().parent
MARKED_FOLDERS = ("engine", "gpu")


def missing_for(marker: str) -> str | None:
    """Why tests with this marker cannot run here; None when they can."""
    if marker == "gpu" and not os.path.exists("/dev/nvidiactl"):
        return "no NVIDIA GPU here: /dev/nvidiactl is missing"
    if marker == "engine" and importlib.util.find_spec("vllm") is None:
        return "the engine is not installed: make setup"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
        for marker in MARKED_FOLDERS:
            reason = missing_for(marker) if item.get_closest_marker(marker) else None
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
