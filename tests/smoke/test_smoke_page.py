"""The page in a real browser, where there is one."""

from __future__ import annotations

from helpers.page_view import chromium
from helpers.server_process import ServerProcess


def test_the_page_opens_and_a_question_is_answered(server: ServerProcess) -> None:
    with chromium() as browser:
        page = browser.new_page()
        page.goto(server.url)
        page.fill("textarea[aria-label='Your message']", "What is the sea?")
        page.keyboard.press("Enter")
        # Not for its end: a small model may go on for minutes.
        page.wait_for_function("() => document.querySelector('[data-testid=assistant] .markdown')?.innerText")
