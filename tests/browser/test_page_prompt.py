"""The prompt of an answer as the cache saw it, over a real store and a real scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from helpers.cache_server import Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

FIELD = "textarea[aria-label='Your message']"


@pytest.fixture
def page(browser: Browser, sea: Served) -> Iterator[Page]:
    context = browser.new_context()
    page = context.new_page()
    page.goto(sea.server.url)
    page.wait_for_selector(FIELD)
    page.click("text=Settings")
    page.get_by_label("Longest answer, tokens").fill("5")
    page.get_by_label("Longest answer, tokens").blur()
    yield page
    context.close()


def ask(page: Page, text: str) -> None:
    before = page.locator(".cost").count()
    page.fill(FIELD, text)
    page.press(FIELD, "Enter")
    page.locator(".cost").nth(before).wait_for()


def parts(page: Page, answer: int) -> list[tuple[str, str]]:
    """What is shown of an answer's prompt, each part with where it came from."""
    page.get_by_text("show the prompt").nth(answer).click()
    page.wait_for_selector(".part")
    found = page.locator(".part")
    shown = [
        (str(found.nth(index).get_attribute("class")).removeprefix("part "), found.nth(index).inner_text())
        for index in range(found.count())
    ]
    page.click("dialog >> button[aria-label=Close]")
    page.wait_for_selector("dialog", state="detached")
    return shown


def test_a_prompt_is_coloured_as_it_was_when_it_was_answered(page: Page) -> None:
    ask(page, "When is high tide today?")
    ask(page, "And tomorrow?")
    for _ in range(2):  # and it stays so
        ((source, text),) = parts(page, 0)
        assert source == "evaluated" and "When is high tide today?" in text
        (reused, before), (source, new) = parts(page, 1)
        assert (reused, source) == ("hot", "evaluated")
        assert "When is high tide today?" in before and "And tomorrow?" in new
        page.reload()
        page.wait_for_selector(".cost")


def test_after_an_edit_it_says_where_the_text_left_what_is_stored(page: Page) -> None:
    ask(page, "The first question is about winds, and it is long enough to be worth keeping.")
    ask(page, "The second one is about tides and harbours, and it is long as well.")
    page.get_by_role("button", name="Edit").nth(1).click()
    page.fill("textarea[aria-label='Edit your message']", "The second one is about something else.")
    page.click("text=Send as a new branch")
    page.wait_for_selector("text=/goes on differently/")
    page.get_by_text("show the prompt").nth(1).click()
    page.wait_for_selector("dialog >> text=/Stored, from token/")
    assert "tides" in page.inner_text("dialog dl")
    assert "something" in page.inner_text("dialog dl")


def test_state_that_left_the_engine_is_told_by_its_tier(page: Page, sea: Served) -> None:
    ask(page, "When is high tide today? " * 12)
    sea.settle()
    sea.backend.scheduler.forget({""}).result(60)
    ask(page, "And tomorrow?")
    assert [source for source, _ in parts(page, 1)] == ["warm", "evaluated"]
    assert "from RAM" in page.locator(".cost").nth(1).inner_text()
