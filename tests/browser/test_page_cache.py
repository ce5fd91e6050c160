"""The cache, live: what requests do to it is seen without a reload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from helpers.cache_server import SYSTEM, Served, user

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow


@pytest.fixture
def page(browser: Browser, sea: Served) -> Iterator[Page]:
    context = browser.new_context()
    page = context.new_page()
    page.goto(sea.server.url)
    page.get_by_role("button", name="Cache", exact=True).click()
    page.wait_for_selector(".gauge")
    yield page
    context.close()


def test_a_request_of_anyone_is_seen(page: Page, sea: Served) -> None:
    assert page.get_by_text("every request will show here").is_visible()
    sea.chat(SYSTEM, user("When is high tide?"), conversation_id="tides")
    page.wait_for_selector("figure svg rect.evaluated")
    page.wait_for_selector("tbody >> text=When is high tide?")
    sea.chat(SYSTEM, user("When is low tide?"), conversation_id="low")
    page.wait_for_selector("tbody >> text=When is low tide?")
    page.wait_for_function("() => !document.querySelector('.totals strong').textContent.startsWith('0')")
    assert "Disk" in page.inner_text(".gauges") and "tokens" in page.inner_text(".gauges")


def test_what_is_kept_can_be_pinned_and_removed(page: Page, sea: Served) -> None:
    sea.chat(SYSTEM, user("When is high tide?"), conversation_id="tides")
    row = page.locator("tbody tr", has_text="When is high tide?")
    row.get_by_role("button", name="Pin", exact=True).click()
    row.get_by_role("button", name="Pinned").wait_for()
    assert sea.entry_of("tides")["pinned"]
    row.get_by_role("button", name="Remove").click()
    row.wait_for(state="detached")
    assert "tides" not in [entry["conversation_id"] for entry in sea.entries()]


def test_nobody_is_shut_out_of_it(page: Page, sea: Served) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    sea.chat(SYSTEM, user("When is high tide?"), conversation_id="tides")
    page.wait_for_selector("tbody tr")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = axe.run(page).response["violations"]
        bad = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
        assert bad == []
