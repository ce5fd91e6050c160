"""The page of a server that still loads its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers.scripted_server import Running, ScriptedBackend

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

pytestmark = pytest.mark.slow


def test_it_says_how_far_the_model_is_until_it_is_there(
    browser: Browser, server: Running, backend: ScriptedBackend
) -> None:
    told = [
        {"status": "loading", "step": "Loading tiny", "progress": 0.415},
        {"status": "loading", "step": "Trying out tiny, once", "progress": None},
    ]
    page = browser.new_page()

    def health(route: Route) -> None:
        if told:
            route.fulfill(status=503, json=told[0])
        else:
            route.continue_()

    page.route("**/health", health)
    page.goto(server.url)
    line = page.locator(".starting")
    line.wait_for()
    assert line.inner_text().startswith("Loading tiny 41%. What you ask waits for it.")
    assert page.locator(".starting progress").get_attribute("value") == "0.415"
    told.pop(0)
    page.get_by_text("Trying out tiny, once. What you ask waits for it.").wait_for()
    told.pop(0)
    line.wait_for(state="detached")
    page.fill("textarea[aria-label='Your message']", "hello")
    page.keyboard.press("Enter")
    page.locator(".cost").wait_for()
    page.close()
