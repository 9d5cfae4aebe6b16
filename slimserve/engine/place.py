"""What an endpoint holds from its first moment to its last: its folder, its port, the answers there, the page."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from slimserve.engine import endpoints, ports, procfs
from slimserve.engine.attempt import Launch
from slimserve.engine.endpoints import Endpoint
from slimserve.engine.record import RunFolder
from slimserve.engine.state import Board, Status
from slimserve.operator.source import Source


class Place:
    """The place of one endpoint, taken as it is made and given back by `close`.

    Args:
        launch: whose place it is.
        folder: of the run.
        board: what is answered while no engine serves.
        page: what the operator page shows, and its port; None: there is no page.
        report: called with one line for each thing worth telling.

    Raises:
        Refused: an engine without a supervisor is in the way, or the port, or the run folder; nothing is held then.
    """

    def __init__(
        self,
        launch: Launch,
        folder: RunFolder,
        board: Board,
        page: tuple[Source, int | None] | None,
        report: Callable[[str], None],
    ) -> None:
        from slimserve.engine.front import Front  # asyncio: 50 ms that a chat with a running endpoint need not pay

        self._launch, self._folder, self._report = launch, folder, report
        self._told = False
        self._own, self._boot = procfs.own(), procfs.boot()
        folder.end_leftovers(report)
        with contextlib.ExitStack() as undo:
            others = endpoints.living(folder.path.parent)
            self.listening = undo.enter_context(ports.listen(launch.host, launch.port, others))
            folder.prepare()
            undo.callback(folder.close)
            self.front = Front(self.listening, board)
            undo.callback(self.front.close)
            self.front.accept()
            report(str(launch.reach))
            self._page_url = None if page is None else self._serve(*page, others)
            undo.callback(endpoints.remove, folder.path)
            self._undo = undo.pop_all()

    def _serve(self, source: Source, port: int | None, others: Sequence[Endpoint]) -> str:
        """Serve the operator page; returns where."""

        def app() -> Any:
            from slimserve.operator.app import build  # a quarter of a second, in which the engine begins to load

            return build(source)

        listening, why = ports.listen_for_page(port, self._launch.port, others)
        self.front.serve(app, listening).add_done_callback(self._page_served)
        url = f"http://{ports.PAGE_HOST}:{listening.getsockname()[1]}/"
        if why:
            self._report(f"{why}: the page is elsewhere")
        self._report(f"page {url}")
        return url

    def _page_served(self, future: Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._page_url = None
            self._report(f"the page cannot be served: {type(error).__name__}: {error}")

    def write(self, status: Status) -> None:
        """Tell other programs where the endpoint stands."""
        launch = self._launch
        endpoint = endpoints.Endpoint(
            profile=launch.profile_id,
            pid=self._own.pid,
            start_ticks=self._own.start_ticks,
            boot=self._boot,
            port=launch.port,
            url=launch.url,
            reach=launch.reach,
            page=self._page_url,
            control=str(launch.control),
            log=str(self._folder.log_path),
            status=status,
            node=launch.node,
        )
        try:
            endpoints.write(self._folder.path, endpoint)
        except OSError as error:  # a full disk is no reason to stop serving
            if not self._told:
                self._report(f"the status cannot be written to {self._folder.path}: {error.strerror}")
            self._told = True

    def close(self) -> None:
        """Answer no more, and let go of the port."""
        self._undo.close()
