"""The operator page as the supervisor gives it: what the page asks for, answered from the endpoint at hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimserve.engine.control import Control
from slimserve.engine.state import Board, Status
from slimserve.errors import Finding


@dataclass(frozen=True)
class Page:
    """What the page shows that the supervisor does not know.

    Args:
        port: TCP port on loopback; None: 8001 when that is free, else any.
        plan: what runs and why, as `show.plan_json` says it.
        receipts_folder: where the registry keeps its receipts.
        doctor: what is wrong with the machine now.
    """

    port: int | None
    plan: Mapping[str, Any]
    receipts_folder: Path
    doctor: Callable[[], Sequence[Finding]]

    def app(self, board: Board, control: Control, url: str, log_path: Path) -> Any:
        """The page of one endpoint as an ASGI application."""
        from slimserve.operator.app import build

        return build(EndpointSource(self, board, control, url, log_path))


class EndpointSource:
    """`slimserve.operator.source.Source` over a running supervisor; its methods are called from many threads."""

    def __init__(self, page: Page, board: Board, control: Control, url: str, log_path: Path) -> None:
        self._page, self._board, self._control = page, board, control
        self.url, self.log_path, self.receipts_folder = url, log_path, page.receipts_folder
        self.started = time.time()

    def status(self) -> Status:
        """Where the endpoint stands now."""
        return self._board.status

    def metrics(self) -> str | None:
        """The engine's `/metrics`; None while no engine answers."""
        return self._control.metrics()

    def plan(self) -> Mapping[str, Any]:
        """What runs and why."""
        return self._page.plan

    def doctor(self) -> Sequence[Finding]:
        """What is wrong with the machine now."""
        return self._page.doctor()
