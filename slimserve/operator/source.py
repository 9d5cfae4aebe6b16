"""What the operator's page shows, and whom it asks: the supervisor, or a stand-in of the tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimserve.engine.state import Status
from slimserve.errors import Finding
from slimserve.exposure import Reach


@dataclass(frozen=True, kw_only=True)
class Source:
    """One endpoint, read-only.

    The page makes each call in a thread of its own, several at once; one may block for two seconds or so. None of them
    raises for what can go wrong with an engine: there is a value for that.

    Args:
        url: where clients of this machine reach it, such as `http://127.0.0.1:8000/v1`.
        reach: where it listens, and for whom.
        log_path: the engine's log; it need not exist yet.
        receipts_folder: where the registry keeps its receipts (`profiles/receipts`); it need not exist.
        plan: what runs and why, as `slimserve.show.plan_json` says it.
        status: where the endpoint stands now.
        metrics: the engine's own `/metrics` in Prometheus' text form; None while no engine answers.
        doctor: what is wrong with the machine now.
        started: when the appliance began, in seconds since the epoch.
    """

    url: str
    reach: Reach
    log_path: Path
    receipts_folder: Path
    plan: Callable[[], Mapping[str, Any]]
    status: Callable[[], Status]
    metrics: Callable[[], str | None]
    doctor: Callable[[], Sequence[Finding]]
    started: float = field(default_factory=time.time)
