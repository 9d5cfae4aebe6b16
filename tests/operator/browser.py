"""The system's Chromium, driven by Playwright, with an eye on what a page must not do."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

WAIT_MS = 60_000


@contextlib.contextmanager
def chromium() -> Iterator["Browser"]:  # noqa: UP037  (its name is only known once Playwright is there)
    """The browser; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make setup-dev")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    # Chromium refuses its sandbox to root; the pages here are our own.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=[*flags, "--disable-dev-shm-usage"])
        try:
            yield Browser(started)
        finally:
            started.close()


class Browser:
    """Opens pages whose complaints and requests are kept."""

    def __init__(self, browser) -> None:  # type: ignore[no-untyped-def]
        self._browser = browser

    @contextlib.contextmanager
    def page(self, url: str, width: int = 1280, scheme: str = "light") -> Iterator:  # type: ignore[no-untyped-def,type-arg]
        """An open page of `url`, on which nothing goes wrong and which asks nobody else."""
        context = self._browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.faults, asked = [], []
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.on("console", lambda said: page.faults.append(said.text) if said.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        yield page
        context.close()
        assert page.faults == []
        assert {urlsplit(one).netloc for one in asked} == {urlsplit(url).netloc}


def wait_for_link(page, text: str) -> None:  # type: ignore[no-untyped-def]
    """Until the page says so about its connection."""
    wait_for_text(page, "#link-text", f"text => text.startsWith({text!r})")


def wait_for_text(page, selector: str, condition: str) -> str:  # type: ignore[no-untyped-def]
    """The text of an element, once it meets a condition, a JavaScript function of the text."""
    page.wait_for_function(
        f"selector => ({condition})(document.querySelector(selector).textContent.trim())", arg=selector
    )
    return str(page.text_content(selector)).strip()
