"""The default model on disk, one endpoint of it for every test that only asks questions, and what engines found out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_support import Server

from slimserve.preparing import prepare_weights
from slimserve.session import open_session


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The embedded default's weights, in the user's own cache: fetched and converted once."""
    session = open_session(os.environ)
    return prepare_weights(session, session.plan(session.registry.default), lambda done, total, name: None)


@pytest.fixture(scope="session")
def engine_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one engine leaves what it found in a model's class, so that the next need not import it all to look."""
    return tmp_path_factory.mktemp("engine_cache")


@pytest.fixture(scope="session")
def server(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running endpoint that asks for KEY."""
    started = Server.start(tmp_path_factory.mktemp("server"))
    try:
        started.wait_for("ready http://")
        yield started
    finally:
        started.stop()
