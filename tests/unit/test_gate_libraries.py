"""The engine's own metadata says which libraries it asks for."""

from __future__ import annotations

from importlib import metadata

import pytest

from slimserve.engine.gate import observed

ASKED = [
    "torch==2.13.0",
    "transformers<5.20.0,>=5.16.1",
    "numpy",
    "only-elsewhere==1; platform_machine == 'riscv64'",
    "only-with==1; extra == 'audio'",
    "not-there==3",
]
INSTALLED = {"vllm": "0.32.0", "torch": "2.13.0+cu130", "transformers": "5.19.0", "numpy": "2.1", "only-with": "9"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = dict(INSTALLED)

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "requires", lambda name: ASKED if name == "vllm" else None)
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(observed, "sys", type("Sys", (), {"modules": {}}))
    monkeypatch.delenv("SLIMSERVE_ACCEPT_LIBRARIES", raising=False)
    return found


def test_what_the_engine_asks_for_is_no_difference(installed: dict[str, str]) -> None:
    assert observed._unmet() == []


def test_another_version_is_named_with_the_one_that_is_asked_for(installed: dict[str, str]) -> None:
    installed.update(torch="2.11.0", transformers="5.24.0")
    assert observed._unmet() == ["torch 2.11.0 and not ==2.13.0", "transformers 5.24.0 and not <5.20.0,>=5.16.1"]


def test_what_the_user_vouches_for_passes_and_is_recorded(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.update(torch="2.11.0", transformers="5.24.0")
    monkeypatch.setenv("SLIMSERVE_ACCEPT_LIBRARIES", " torch,")
    assert observed._unmet() == ["transformers 5.24.0 and not <5.20.0,>=5.16.1"]
    assert observed._accepted() == {"torch"}
