"""The operator's page over a real engine that works: its numbers are read while requests run, and move.

SLIMSERVE_IMAGES=docs/images makes the pictures of the documents anew from what this test sees.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_support import KEY, PROFILE, Server

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "operator"))

from browser import Browser, chromium, wait_for_link, wait_for_text

pytestmark = pytest.mark.engine

STREAMS = 5
# Readings, one every 5 s, until a picture is taken; those of the documents want a longer past.
POINTS = 45 if "SLIMSERVE_IMAGES" in os.environ else 3


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def page_url(browser: Browser, server: Server) -> Iterator[str]:
    """The page of an endpoint to which several clients talk without a pause."""
    over = threading.Event()
    clients = [threading.Thread(target=talk, args=(server.port, number, over)) for number in range(STREAMS)]
    for client in clients:
        client.start()
    try:
        yield server.wait_for("page http://").split()[-1]
    finally:
        over.set()
        for client in clients:
            client.join(120)


def talk(port: int, number: int, over: threading.Event) -> None:
    """One streamed answer after another; they share the beginning of their prompts, so that the cache has hits."""
    rules = "You answer in whole sentences, name your reasons, and say when you do not know. " * 12
    turn = 0
    while not over.is_set():
        turn += 1
        question = f"What is special about the number {turn * STREAMS + number}?"
        messages = [{"role": "system", "content": rules}, {"role": "user", "content": question}]
        body = {"model": PROFILE, "messages": messages, "max_tokens": 120 + 20 * number, "stream": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            for _ in answer:
                if over.is_set():
                    return


def test_the_page_follows_a_working_engine(browser: Browser, page_url: str) -> None:
    with browser.page(page_url) as page:
        wait_for_link(page, "live")
        wait_for_text(page, "#state-name", "text => text === 'ready'")
        for figure in ("#generated", "#prompt", "#ttft", "#itl", "#kv"):
            wait_for_text(page, figure, "text => /[0-9]/.test(text) && !/^0 /.test(text)")
        wait_for_text(page, "#in-flight", f"text => Number(text) > 0 && Number(text) <= {STREAMS}")
        wait_for_text(page, "#hits", "text => text.includes('%')")
        assert page.text_content("#cap") == "24"
        first = page.text_content("#generated")
        wait_for_text(page, "#generated", f"text => text !== {first!r} && /[0-9]/.test(text)")
        wait_for_text(page, "#settings-count", "text => /^[0-9]+ settings/.test(text)")
        page.locator("#log").scroll_into_view_if_needed()
        wait_for_text(page, "#log-text", "text => text.includes('APIServer')")


def test_pictures_in_both_themes_and_on_a_phone(browser: Browser, page_url: str, tmp_path: Path) -> None:
    folder = Path(os.environ.get("SLIMSERVE_IMAGES", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    for name, width, scheme in (
        ("page-light", 1280, "light"),
        ("page-dark", 1280, "dark"),
        ("page-phone", 360, "light"),
    ):
        with browser.page(page_url, width, scheme) as page:
            wait_for_link(page, "live")
            page.click("[data-minutes='5']")
            page.wait_for_function(
                """letters => [...document.querySelectorAll(".chart .line")]
                    .some(line => line.getAttribute("d").length > letters)""",
                arg=POINTS * 12,  # a point of a line takes some 12
                timeout=300_000,
            )
            picture = page.screenshot(path=folder / f"{name}.png")
            assert len(picture) > 20_000


def test_metrics_of_door_engine_and_appliance_are_in_one_place(page_url: str) -> None:
    with urllib.request.urlopen(f"{page_url}metrics", timeout=60) as answer:
        names = {line.partition("{")[0].partition(" ")[0] for line in answer.read().decode().splitlines()}
    assert {"vllm:generation_tokens_total", "slimserve_in_flight", "slimserve_cap", "slimserve_state"} <= names
