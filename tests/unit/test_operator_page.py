"""The operator's page in a browser, over a source whose numbers move."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimserve.engine.state import Crash, State, Status
from slimserve.errors import Finding
from slimserve.exposure import Reach
from slimserve.operator import app

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "operator"))

from browser import Browser, chromium, wait_for_link, wait_for_text
from live import Live
from serving import page_of

HOSTILE = "<img src=x onerror=\"document.title='taken'\"> & <script>document.title='taken'</script>"
DASH = "\N{EN DASH}"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def live(tmp_path: Path) -> Live:
    pages = ("https://a.example", "https://b.example")
    reach = Reach(host="0.0.0.0", port=8000, has_keys=True, keys_file=None, origins=pages)
    return Live(tmp_path / "engine.log", tmp_path / "receipts", reach=reach)


@pytest.fixture
def url(live: Live) -> Iterator[str]:
    with page_of(live.source, 0.3) as address:
        yield address


def test_the_page_shows_the_state_and_numbers_that_move(browser: Browser, live: Live, url: str) -> None:
    with browser.page(url) as page:
        wait_for_link(page, "live")
        assert page.text_content("#state-name") == "ready"
        assert page.text_content("#reason") == live.current.reason
        assert page.text_content("#listens") == "0.0.0.0:8000"
        assert page.text_content("#asks-for-key") == "asked for"
        assert page.text_content("#origins") == "https://a.example, https://b.example"
        wait_for_text(page, "#in-flight", "text => text === '5'")
        assert page.text_content("#cap") == "24"
        wait_for_text(page, "#generated", "text => /^1[78][0-9] tok.s$/.test(text)")
        wait_for_text(page, "#ttft", "text => /^[0-9.]+ m?s$/.test(text)")
        drawn = page.get_attribute(".chart .line", "d")
        live.in_flight, live.waiting, live.too_many = 24, 7, 3
        wait_for_text(page, "#in-flight", "text => text === '24'")
        wait_for_text(page, "#waiting", "text => text === '7'")
        assert page.get_attribute("#in-flight-meter", "aria-valuenow") == "24"
        page.wait_for_function("old => document.querySelector('.chart .line').getAttribute('d') !== old", arg=drawn)
        assert "ready" in page.title()


def test_an_end_is_shown_with_its_reason_and_last_words(browser: Browser, live: Live, url: str) -> None:
    with browser.page(url) as page:
        wait_for_link(page, "live")
        live.current = Status(State.RESTARTING, time.time(), HOSTILE, 300.0, 1)
        wait_for_text(page, "#state-name", "text => text === 'restarting'")
        assert page.text_content("#reason") == HOSTILE
        wait_for_text(page, "#deadline", "text => text.startsWith('at most 5 min 0 s')")
        live.current = Status(
            State.FAILED,
            time.time(),
            "three crashes in a row",
            None,
            3,
            Crash(time.time(), HOSTILE, HOSTILE, (HOSTILE, "Killed"), "/tmp/engine.log"),
        )
        wait_for_text(page, "#state-name", "text => text === 'failed'")
        assert page.text_content("#last-words-text") == f"{HOSTILE}\nKilled"
        assert page.text_content("#crash-what") == HOSTILE
        assert page.text_content("#crash-log") == "/tmp/engine.log"
        assert page.text_content("#restarts") == "3"
        assert "taken" not in page.title()


def test_whatever_the_data_holds_is_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    setting = {"key": HOSTILE, "value": HOSTILE, "argv": [], "why": HOSTILE, "evidence": HOSTILE}
    plan = {
        "profile": HOSTILE,
        "status": HOSTILE,
        "settings": [setting],
        "not_carried": [{"what": HOSTILE, "why": HOSTILE}],
        "notes": [HOSTILE],
    }
    receipts = tmp_path / "receipts"
    receipts.mkdir()
    (receipts / "broken.json").write_text("{")
    log = tmp_path / "engine.log"
    log.write_text(HOSTILE)
    live = Live(log, receipts, HOSTILE, plan=plan, findings=[Finding(HOSTILE, HOSTILE, HOSTILE)])
    with page_of(live.source, 0.3) as url, browser.page(url) as page:
        wait_for_link(page, "live")
        page.locator("#log").scroll_into_view_if_needed()
        wait_for_text(page, "#log-text", "text => text.includes('onerror')")
        wait_for_text(page, "#findings h3", "text => text.includes('onerror')")
        assert page.text_content("#url") == HOSTILE
        assert HOSTILE in page.text_content("#settings-rows")
        wait_for_text(page, "#receipts-list", "text => text.includes('broken.json')")
        assert page.locator("img, main script").count() == 0


def test_the_legend_of_an_engine_that_is_away_has_no_values(browser: Browser, live: Live, url: str) -> None:
    with browser.page(url) as page:
        legend = "#charts figure:nth-child(2) .key"
        wait_for_text(page, legend, "text => text === 'in flight 5'")
        live.engine_answers = False
        live.current = Status(State.LOADING, time.time(), "the engine loads", 300.0)
        wait_for_text(page, legend, f"text => text === 'in flight {DASH}'")


def test_the_time_shown_fits_the_age_until_somebody_chooses(browser: Browser, tmp_path: Path) -> None:
    pressed = "[data-minutes][aria-pressed=true]"
    for age, minutes in ((0, "5"), (600, "15"), (90_000, "60")):
        live = Live(tmp_path / "engine.log", tmp_path / "receipts", started=time.time() - age)
        with page_of(live.source, 0.3) as url, browser.page(url) as page:
            wait_for_link(page, "live")
            page.wait_for_selector(f"[data-minutes='{minutes}'][aria-pressed=true]")
            assert page.locator(pressed).count() == 1
            page.click("[data-minutes='15']")
            live.in_flight = 9
            wait_for_text(page, "#in-flight", "text => text === '9'")
            assert page.get_attribute(pressed, "data-minutes") == "15"


def test_labels_of_an_axis_are_whole(browser: Browser, live: Live, url: str) -> None:
    widest = "Math.min(...[...document.querySelectorAll('.chart text[text-anchor=end]')].map(text => text.getBBox().x))"
    with browser.page(url) as page:
        wait_for_link(page, "live")
        for more in (6, 5000):  # in 0.3 s: about 1,200 and a million a minute
            live.too_many += more
            wait_for_text(page, "#too-many", "text => /^[1-9]/.test(text)")
            page.wait_for_function("document.querySelector('#charts figure:last-child text[text-anchor=end]')")
            assert page.evaluate(widest) >= 0
            wait_for_text(page, "#too-many", "text => /^0/.test(text)")


def test_a_lost_connection_is_said_and_found_again(browser: Browser, live: Live) -> None:
    with page_of(live.source, 0.3) as url:
        manager = browser.page(url)
        page = manager.__enter__()
        wait_for_link(page, "live")
    wait_for_link(page, "stale since ")
    assert page.evaluate("document.documentElement.classList.contains('stale')")
    with page_of(live.source, 0.3, port=int(url.rpartition(":")[2])):
        wait_for_link(page, "live")
        assert not page.evaluate("document.documentElement.classList.contains('stale')")
        page.faults.clear()  # the browser itself reports each refused connection
        manager.__exit__(None, None, None)


def test_without_a_stream_the_page_asks(
    browser: Browser, live: Live, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_STREAMS", 0)
    with browser.page(url) as page:
        wait_for_link(page, "asking every")
        live.in_flight = 11
        wait_for_text(page, "#in-flight", "text => text === '11'")
        assert any("503" in fault for fault in page.faults)
        page.faults.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_sticks_out_at_any_width(browser: Browser, url: str, width: int, scheme: str) -> None:
    with browser.page(url, width, scheme) as page:
        wait_for_link(page, "live")
        wait_for_text(page, "#settings-count", "text => text.includes('settings')")
        assert page.evaluate(OVERFLOW) == 0
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(14, 20, 25)") == (scheme == "dark")


def test_the_theme_is_chosen_and_kept(browser: Browser, url: str) -> None:
    with browser.page(url) as page:
        wait_for_link(page, "live")
        paper = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(paper)
        page.click("#theme")
        page.click("#theme")
        assert page.text_content("#theme") == "theme: dark"
        assert page.evaluate(paper) != light
        page.reload()
        wait_for_text(page, "#theme", "text => text === 'theme: dark'")
        assert page.evaluate(paper) != light


def test_settings_are_filtered_by_any_word_of_theirs(browser: Browser, url: str) -> None:
    with browser.page(url) as page:
        wait_for_text(page, "#settings-count", "text => text.startsWith('2 settings')")
        page.fill("#filter", "EXACT-KV")
        assert page.text_content("#settings-count") == "1 of 2 settings"
        assert page.locator("#settings-rows tr:visible").count() == 1
        page.fill("#filter", "nowhere")
        assert page.text_content("#settings-count").startswith("none of 2 settings")


def test_a_chart_is_read_with_the_keyboard(browser: Browser, url: str) -> None:
    with browser.page(url) as page:
        wait_for_link(page, "live")
        chart = page.locator("svg.chart").first
        wait_for_text(page, ".key", "text => text.includes('tok/s')")
        assert "latest" in chart.get_attribute("aria-label")
        chart.focus()
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector(".chart .cursor", state="attached")
        assert "latest" not in chart.get_attribute("aria-label")


def test_an_engine_that_is_not_there_is_said_to_be_why_there_are_no_numbers(browser: Browser, tmp_path: Path) -> None:
    live = Live(tmp_path / "engine.log", tmp_path / "receipts", engine_answers=False)
    live.current = Status(State.LOADING, time.time(), "the engine loads", 300.0)
    with page_of(live.source, 0.3) as url, browser.page(url) as page:
        wait_for_link(page, "live")
        assert page.text_content("#in-flight") == DASH
        assert page.locator("#life [aria-current]").text_content() == "loading"
        assert "no engine" in page.text_content("#charts")
        page.locator("#log").scroll_into_view_if_needed()
        wait_for_text(page, "#log-text", "text => text.startsWith('Empty: no engine')")
