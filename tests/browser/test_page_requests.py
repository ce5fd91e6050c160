"""Requests as a timeline: who is answered in which slot, and why it took that long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from helpers.cache_server import SYSTEM, Served, user
from helpers.scheduling import Gate

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow


@pytest.fixture
def page(browser: Browser, sea: Served) -> Iterator[Page]:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{sea.server.url}/#/requests")
    page.wait_for_selector("h1 >> text=Requests")
    yield page
    context.close()


def test_a_request_appears_in_its_slot_and_tells_what_it_reused(page: Page, sea: Served) -> None:
    page.wait_for_selector("text=every request will show here")
    sea.chat(SYSTEM, user("When is high tide?"), conversation_id="tides")
    page.wait_for_selector(".lanes rect.decode")
    sea.chat(SYSTEM, user("When is low tide?"), conversation_id="low")
    page.get_by_role("button", name="low", exact=True).click()
    details = page.get_by_role("dialog")
    assert "from the engine" in details.inner_text() and "finished" in details.inner_text()
    assert details.locator(".strip .tier.hot").count() == 1
    details.get_by_role("button", name="Close").click()
    page.locator(".lanes g").first.click()
    page.get_by_role("dialog").wait_for()


def test_nobody_is_shut_out_of_it(page: Page, sea: Served) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    sea.chat(SYSTEM, user("When is high tide?"), conversation_id="tides")
    page.wait_for_selector("tbody tr")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = axe.run(page).response["violations"]
        bad = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
        assert bad == []


def test_an_answer_that_was_stopped_tells_what_it_reused(page: Page, sea: Served) -> None:
    sea.chat(SYSTEM, user("When is high tide?"))
    page.get_by_role("button", name="Chat", exact=True).click()
    page.locator("summary", has_text="Settings").click()
    page.get_by_label("Temperature").fill("0")  # else some answers are over before they can be stopped
    gate = Gate(sea.engine, holds=lambda step: step == 3)
    page.fill("textarea[aria-label='Your message']", "When is low tide?")
    page.press("textarea[aria-label='Your message']", "Enter")
    gate.reached()
    page.get_by_role("button", name="Stop").click()
    page.wait_for_selector("text=Stopped.")
    assert "reused" in page.inner_text(".cost")
    gate.open()
