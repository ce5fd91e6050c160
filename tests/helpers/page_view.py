"""A real Chromium, a view of the page in a browser that was never here, and what must not be found in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Browser]:
    """While it is there, this thread has an event loop that runs. Skips the test where there is none."""
    api = pytest.importorskip("playwright.sync_api")
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("needs Chromium (apt install chromium)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def open_view(browser: Browser, url: str, name: str, key: str = "") -> Iterator[Page]:
    """Whatever the browser complains about fails the test; a status that the view tells about itself is none."""
    context = browser.new_context()
    page, complaints = context.new_page(), []

    def listen(said: ConsoleMessage) -> None:
        if said.type == "error" and not said.text.startswith("Failed to load resource"):
            complaints.append(said.text)

    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", listen)
    page.goto(f"{url}/#/{name}")
    if key:
        page.get_by_label("Key").fill(key)
        page.get_by_role("button", name="Continue").click()
    page.wait_for_selector(f".view.{name} h1")
    yield page
    context.close()
    assert complaints == []


def who_is_shut_out(page: Page) -> list[tuple[str, str]]:
    """What axe-core calls serious or critical: bright and dark, narrow and wide."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    bad: list[tuple[str, str]] = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            found = axe.run(page).response["violations"]
            bad += [
                (one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")
            ]
    return bad
