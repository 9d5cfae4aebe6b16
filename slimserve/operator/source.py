"""What the operator's page asks of whoever runs it: the supervisor, or a stand-in of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from slimserve.engine.state import Status
from slimserve.errors import Finding


class Source(Protocol):
    """Read-only facts about one endpoint.

    The page calls each method in a thread of its own, from several at once; a method may block for two seconds or so.
    None of them raises for what can go wrong with an engine: there is a value for that.
    """

    @property
    def started(self) -> float:
        """When the appliance began, in seconds since the epoch."""

    @property
    def url(self) -> str:
        """Where clients reach the endpoint, such as `http://127.0.0.1:8000/v1`."""

    @property
    def log_path(self) -> Path:
        """The engine's log; it need not exist yet."""

    @property
    def receipts_folder(self) -> Path:
        """Where the registry keeps its receipts (`profiles/receipts`); it need not exist."""

    def status(self) -> Status:
        """Where the endpoint stands now."""

    def metrics(self) -> str | None:
        """The engine's own `/metrics` in Prometheus' text form, or None while no engine answers."""

    def plan(self) -> Mapping[str, Any]:
        """What runs and why, as `slimserve.show.plan_json` says it."""

    def doctor(self) -> Sequence[Finding]:
        """What is wrong with the machine now."""
