"""The page in a real Chromium: live, killed, cut off, in both themes, on a phone, with no data.

The parts are real: `headrace run` supervises the page in a process of its own, the log is written
by the test. Caught: a page that does not follow the log, loses rows when its server is killed,
cannot be used by keyboard, is wider than a phone, or writes an error to the console; a foreign page
that can read data or kill a part through the browser. Not caught: whether it is beautiful; look at
the screenshots, which are left in the temporary folder of the run. R-B8, R-D2, R-D4, R-D5.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog
from headrace.runtime.project import find_project
from headrace.serving.server import bound
from tests.serving.kit import ask, commit_view, make_project, make_topics, order, served
from tools.system import CHROMIUM

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.skipif(not CHROMIUM.found(), reason=f"no Chromium: no {CHROMIUM.purpose}"),
]
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM.found())
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, EmbeddedLog]]:
    """A project under `headrace run`: its page, and its log."""
    folder = tmp_path_factory.mktemp("running")
    with bound("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    (folder / "headrace.toml").write_text(f'log = "data"\n[page]\nport = {port}\n')
    project = find_project(folder)
    with hr.connect(str(project.log)) as log:
        make_topics(log)
        log.append("src.public.orders", [order(number) for number in range(20)])
        commit_view(log, log.position, [(1, "de", "20.00"), (1, "fr", "10.00")])
        command = [sys.executable, "-m", "headrace", "run", "--project", str(folder)]
        with (
            open(folder / "out.txt", "wb") as out,
            subprocess.Popen(command, stdout=out, stderr=out) as supervisor,
        ):
            try:
                yield f"http://127.0.0.1:{port}", log
            finally:
                os.kill(supervisor.pid, signal.SIGTERM)


@contextmanager
def opened(browser: Any, url: str, **more: Any) -> Iterator[Any]:
    """A tab with the page, and with what its console said."""
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | more))
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.said = []
    page.on("console", lambda one: page.said.append(one.text) if one.type != "log" else None)
    page.on("pageerror", lambda error: page.said.append(str(error)))
    try:
        for _ in range(200):  # until the server is there
            try:
                page.goto(url)
                break
            except playwright.Error:
                page.said.clear()
                page.wait_for_timeout(200)
        yield page
    finally:
        context.close()


def cell(page: Any, country: str) -> Any:
    """The revenue of a country in the table of rows."""
    return page.locator(f"#rows tr:has(td:text-is('{country}')) td").nth(1)


def test_the_page_follows_the_log(
    browser: Any, running: tuple[str, EmbeddedLog], tmp_path: Path
) -> None:
    url, log = running
    with opened(browser, url) as page:
        playwright.expect(page.locator("#connection")).to_have_text("live", timeout=PATIENCE_MS)
        playwright.expect(cell(page, "de")).to_have_text("20.00")
        commit_view(
            log, log.position, [(-1, "de", "20.00"), (1, "de", "21.50"), (-1, "fr", "10.00")]
        )
        playwright.expect(cell(page, "de")).to_have_text("21.50")
        playwright.expect(page.locator("#rows tbody tr")).to_have_count(1)
        log.create_topic("brand.new", "a bigint", exist_ok=True)
        page.get_by_role("button", name="brand.new").wait_for()
        log.create_topic("src.public._t", "a bigint", exist_ok=True)
        page.get_by_role("button", name="src.public._t").wait_for()
        commit_view(
            log, log.position, [(-1, "de", "21.50"), (1, "de", "20.00"), (1, "fr", "10.00")]
        )
        playwright.expect(page.locator("#rows tbody tr")).to_have_count(2)
        page.screenshot(path=tmp_path / "light.png", full_page=True)
        assert page.said == []


def test_a_node_is_chosen_by_keyboard(browser: Any, running: tuple[str, EmbeddedLog]) -> None:
    url, _ = running
    with opened(browser, url) as page:
        node = page.get_by_role("button", name="src.public.orders")
        node.wait_for()
        node.focus()
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#choice")).to_have_value("src.public.orders")
        playwright.expect(page.locator("#rows tbody tr")).to_have_count(20)
        assert page.evaluate("document.activeElement.getAttribute('role')") == "button"
        reached = set()
        for _ in range(25):  # everything that can be pressed is reached by Tab
            page.keyboard.press("Tab")
            reached.add(
                page.evaluate("document.activeElement.id || document.activeElement.textContent")
            )
        assert {"theme", "choice", "rows", "code"} <= reached
        assert "Kill" in reached
        assert page.said == []


def test_both_themes_and_the_choice_stays(
    browser: Any, running: tuple[str, EmbeddedLog], tmp_path: Path
) -> None:
    url, _ = running
    brightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    with opened(browser, url, color_scheme="dark") as page:
        assert page.evaluate(brightness) < 60
        cell(page, "de").wait_for()
        page.screenshot(path=tmp_path / "dark.png", full_page=True)
        page.click("#theme")
        assert page.inner_text("#theme") == "Light"
        assert page.evaluate(brightness) > 200
        page.reload()
        assert page.evaluate(brightness) > 200
        assert page.said == []
    with opened(browser, url, color_scheme="light") as page:
        assert page.evaluate(brightness) > 200
        page.click("#theme")
        page.click("#theme")
        assert page.evaluate(brightness) < 60


@pytest.mark.parametrize("width", [360, 768])
def test_a_narrow_page_does_not_scroll_sideways(
    width: int, browser: Any, running: tuple[str, EmbeddedLog], tmp_path: Path
) -> None:
    url, _ = running
    with opened(browser, url, viewport={"width": width, "height": 780}) as page:
        cell(page, "de").wait_for()
        page.get_by_role("button", name="Kill page").wait_for()
        page.screenshot(path=tmp_path / f"narrow-{width}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.said == []


@pytest.mark.parametrize("width", [360, 1280])
def test_long_names_stay_in_their_card(
    width: int, browser: Any, running: tuple[str, EmbeddedLog]
) -> None:
    url, log = running
    log.create_topic("x" * 200, "id bigint", exist_ok=True)
    with opened(browser, url, viewport={"width": width, "height": 780}) as page:
        page.locator("#choice option", has_text="x" * 200).wait_for(state="attached")
        sides = page.evaluate(
            "[choice, choice.closest('.card')].map(one => one.getBoundingClientRect().right)"
        )
        assert sides[0] <= sides[1]
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_kill_button_kills_and_the_page_comes_back(
    browser: Any, running: tuple[str, EmbeddedLog], tmp_path: Path
) -> None:
    """The page kills its own server: the banner comes and goes, and no row is missed meanwhile."""
    url, log = running
    with opened(browser, url) as page:
        playwright.expect(cell(page, "de")).to_have_text("20.00")
        before = ask(url, "/v1/parts").json["parts"][0]
        page.get_by_role("button", name="Kill page").click()
        page.wait_for_selector("#connection.bad")
        assert "connection is lost" in page.inner_text("#banner")
        page.screenshot(path=tmp_path / "lost.png", full_page=True)
        commit_view(log, log.position, [(-1, "de", "20.00"), (1, "de", "33.00")])
        page.wait_for_selector("#connection.good")
        assert not page.is_visible("#banner")
        playwright.expect(cell(page, "de")).to_have_text("33.00")
        after = next(one for one in ask(url, "/v1/parts").json["parts"] if one["name"] == "page")
        assert after["pid"] != before["pid"]
        assert after["restarts"] == before["restarts"] + 1
        commit_view(log, log.position, [(-1, "de", "33.00"), (1, "de", "20.00")])
        playwright.expect(cell(page, "de")).to_have_text("20.00")
        lost = (
            "ERR_CONNECTION_REFUSED",
            "ERR_INCOMPLETE_CHUNKED",
            "ERR_CONNECTION_RESET",
            "ERR_EMPTY",
        )
        assert [text for text in page.said if not any(word in text for word in lost)] == []


def test_a_page_without_data(browser: Any, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    with served(project) as server, opened(browser, server.url) as page:
        page.wait_for_selector("#connection.good")
        for words in ("Nothing flows yet", "No transactions yet", "No parts run"):
            page.get_by_text(words).wait_for()
        page.screenshot(path=tmp_path / "empty.png", full_page=True)
        assert page.said == []
        with hr.connect(str(project.log)) as log:
            make_topics(log)
            log.append("clicks", [{"user": 7, "url": "/"}])
            page.get_by_role("button", name="clicks").wait_for()


# --- a foreign page -------------------------------------------------------------------------------

FOREIGN = """<!doctype html><title>foreign</title><script>
const target = location.hash.slice(1);
const kill = target + "/v1/parts/page/kill";
const make = (tag, more) => Object.assign(document.createElement(tag), more);
const tell = (what) => (document.title += " " + what);
Promise.allSettled([
  fetch(target + "/v1/status").then((a) => a.text()).then(() => tell("READ")),
  fetch(kill, {method: "POST", mode: "no-cors", body: "{}"}),
  fetch(kill, {method: "POST", headers: {"Content-Type": "application/json"}, body: "{}"})
    .then(() => tell("POSTED")),
  new Promise((done) => {
    const feed = new EventSource(target + "/v1/feed/src.public.orders");
    feed.onmessage = feed.onopen = () => (tell("HEARD"), done());
    feed.onerror = done;
  }),
  new Promise((done) => {
    const form = make("form", {action: kill, method: "POST", target: "f"});
    const frame = make("iframe", {name: "f", onload: done});
    document.documentElement.append(form, frame);
    form.submit();
    setTimeout(done, 2000);
  }),
]).then(() => tell("DONE"));
</script>"""


@contextmanager
def foreign_site() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(FOREIGN.encode())

        log_message: Callable[..., None] = lambda self, *words: None

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_foreign_page_can_neither_read_nor_kill(
    browser: Any, running: tuple[str, EmbeddedLog]
) -> None:
    url, _ = running
    with opened(browser, url) as page:
        page.get_by_role("button", name="Kill page").wait_for()
    before = ask(url, "/v1/parts").json["parts"][0]["pid"]
    with foreign_site() as site, opened(browser, f"{site}/#{url}") as page:
        page.wait_for_function("document.title.includes('DONE')")
        assert page.title() == "foreign DONE"
    assert ask(url, "/v1/parts").json["parts"][0]["pid"] == before
