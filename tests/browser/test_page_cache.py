"""The cache, live: what requests do to it is seen without a reload."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers import serve_fake
from helpers.cache_server import SYSTEM, Served, user
from helpers.server_process import ServerProcess
from helpers.valkey_server import running_valkey
from helpers.waiting import eventually

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
    page.on("dialog", lambda dialog: dialog.accept())
    sea.chat(SYSTEM, user("When is high tide?"), conversation_id="tides")
    row = page.locator("tbody tr", has_text="When is high tide?")
    row.get_by_role("button", name="Pin", exact=True).click()
    row.get_by_role("button", name="Pinned").wait_for()
    assert sea.entry_of("tides")["pinned"]
    row.get_by_role("button", name="Remove").click()
    row.wait_for(state="detached")
    assert "tides" not in [entry["conversation_id"] for entry in sea.entries()]


def test_what_came_from_other_hosts_is_told_and_that_their_server_is_gone(
    browser: Browser, tmp_path: Path
) -> None:
    messages = [{"role": "system", "content": "You know the tides. " * 30}, user("When is high tide?")]
    with ExitStack() as stack:
        valkey = stack.enter_context(running_valkey(tmp_path))
        here, there = (
            stack.enter_context(
                ServerProcess(serve_fake.__file__, "--data-dir", str(tmp_path / name), "--remote", valkey.url)
            )
            for name in ("here", "there")
        )
        there.chat(messages, max_tokens=4)
        assert eventually(lambda: there.stats()["store"]["remote"]["written_chunks"] > 2)
        context = stack.enter_context(browser.new_context())
        page = context.new_page()
        page.goto(f"{here.url}/#/cache")
        page.wait_for_selector(".shared >> text=0 of 0 prompts")
        here.chat(messages, max_tokens=4)
        page.wait_for_selector(".shared >> text=/1 of 1 prompts found state of other hosts: [1-9].* came/")
        valkey.kill()
        here.chat([*messages, user("And low tide, at the other end of the bay?")], max_tokens=4)
        page.wait_for_selector(".shared >> text=The shared server does not answer")


def test_what_moves_is_told_while_it_moves(page: Page, sea: Served) -> None:
    page.wait_for_selector(".moves >> text=Nothing is being read, written or evicted.")
    sea.chat(SYSTEM, user("When is high tide?"))
    page.wait_for_selector(".moves .busy >> text=/writing .*B\\/s/")
    page.wait_for_selector(".moves >> text=/In all 0 B read from disk, [1-9].* written/")
    page.wait_for_selector(".moves >> text=Nothing is being read, written or evicted.")


def test_what_reuse_has_saved_is_told(page: Page, sea: Served) -> None:
    assert page.get_by_text("of prefill").count() == 0
    sea.backend.scheduler.counters.saved_s = 192.2
    sea.chat(SYSTEM, user("When is high tide?"))
    page.wait_for_selector(".totals >> text=/saved 3 min 1[0-9] s of prefill/")


def test_a_system_prompt_is_warmed_before_someone_waits_for_it(page: Page, sea: Served) -> None:
    page.get_by_label("The text to warm").fill("You know every harbour of this coast.")
    page.get_by_role("button", name="Evaluate it now").click()
    page.wait_for_selector("text=/[1-9][0-9]* of [1-9][0-9]* tokens evaluated in/")
    explained = sea.explain({"role": "system", "content": "You know every harbour of this coast."}, user("Hello?"))
    assert sum(explained["reused"].values()) > 30
    page.wait_for_selector("tbody >> text=You know every harbour")
    page.get_by_role("button", name="Evaluate it now").click()
    page.wait_for_selector("text=/All [1-9][0-9]* tokens were there already/")


def test_a_text_is_warmed_as_completions_get_it(page: Page, sea: Served) -> None:
    page.get_by_label("What prompts will begin with").select_option("text")
    page.get_by_label("The text to warm").fill("Once upon a time there was a boat.")
    page.get_by_role("button", name="Evaluate it now").click()
    page.wait_for_selector("text=/tokens evaluated in/")
    explained = sea.post("/v1/cache/explain", prompt="Once upon a time there was a boat. It")
    assert sum(explained["reused"].values()) > 20


def test_what_cannot_be_warmed_is_told(page: Page, sea: Served) -> None:
    page.get_by_label("The text to warm").fill("sea " * 200_000)
    page.get_by_role("button", name="Evaluate it now").click()
    page.wait_for_selector("[role=alert] >> text=/context/")


def test_a_question_is_explained_with_its_prompt_in_colours(page: Page, sea: Served) -> None:
    sea.chat(user("When is high tide in the old harbour?"))
    page.get_by_label("A question, as the first message of a chat").fill("When is high tide in the new harbour?")
    page.get_by_role("button", name="What would be reused?").click()
    page.wait_for_selector("text=/tokens can be reused. Message 1 .user. goes on differently/")
    reused, evaluated = page.locator(".ask .part").all()
    assert "When is high tide in the" in reused.inner_text() and "new harbour?" in evaluated.inner_text()
    assert page.locator(".ask dl").inner_text().count("harbour") == 2


def test_nobody_is_shut_out_of_it(page: Page, sea: Served) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    sea.chat(SYSTEM, user("When is high tide?"), conversation_id="tides")
    page.wait_for_selector("tbody tr")
    page.get_by_label("A question, as the first message of a chat").fill("When is low tide?")
    page.get_by_role("button", name="What would be reused?").click()
    page.wait_for_selector(".ask .part")
    page.focus(".picture")
    page.keyboard.press("ArrowRight")
    for scheme, width in itertools.product(("light", "dark"), (390, 1280)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        found = axe.run(page).response["violations"]
        bad = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
        assert bad == []
