"""Chat in a real browser: what people do first, and what a hostile model may try."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from emberkeep.config.settings import Config
from helpers.scripted_server import HANG, Running, ScriptedBackend, running, says

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

FIELD = "textarea[aria-label='Your message']"
ANSWERS = "[data-testid=assistant]"
QUESTIONS = "[data-testid=user]"


KEPT = """() => new Promise((resolve) => {
  indexedDB.open("emberkeep").onsuccess = ({ target: { result: database } }) => {
    database.transaction("conversations").objectStore("conversations").getAll().onsuccess = ({ target }) => {
      resolve(JSON.stringify(target.result));
      database.close();
    };
  };
})"""


def send(page: Page, text: str) -> None:
    page.fill(FIELD, text)
    page.press(FIELD, "Enter")


def ask(page: Page, text: str) -> None:
    """And wait for the whole answer."""
    before = page.locator(".cost").count()
    send(page, text)
    page.locator(".cost").nth(before).wait_for()


def test_an_answer_comes_and_says_what_it_cost(page: Page, backend: ScriptedBackend) -> None:
    ask(page, "Hello?")
    assert page.inner_text(f"{ANSWERS} .markdown") == "Hello world"
    cost = page.inner_text(".cost")
    assert "67% reused" in cost and "1 from the engine, 2 from RAM, 5 from disk, 4 evaluated" in cost
    assert "first token 21 ms" in cost
    assert [message.content for message in backend.last.messages] == ["Hello?"]


def test_text_is_there_before_the_answer_ends_and_stop_stops_it(page: Page, backend: ScriptedBackend) -> None:
    backend.script = [says("Once upon")[0], HANG, *says(" a time")]
    send(page, "A story")
    page.wait_for_selector(f"{ANSWERS} :text('Once upon')")
    page.click("text=Stop")
    page.wait_for_selector("text=Stopped.")
    assert backend.stopped_early.wait(20)
    backend.reset()
    ask(page, "Go on")
    assert [message.content for message in backend.last.messages] == ["A story", "Once upon", "Go on"]


def test_an_edit_is_a_branch_and_the_other_one_stays(page: Page, backend: ScriptedBackend) -> None:
    ask(page, "First")
    ask(page, "Second")
    backend.reset(*says("Another"))
    page.locator(QUESTIONS).nth(0).get_by_text("Edit").click()
    page.fill("textarea[aria-label='Edit your message']", "Changed")
    page.click("text=Send as a new branch")
    page.wait_for_selector(f"{ANSWERS} :text('Another')")
    assert [message.content for message in backend.last.messages] == ["Changed"]
    assert "Changed" in page.inner_text(QUESTIONS) and "2 / 2" in page.inner_text(QUESTIONS)
    page.click("button[aria-label='Previous version']")
    page.wait_for_selector(f"{QUESTIONS} :text('Second')")
    assert page.locator(ANSWERS).count() == 2


def test_to_ask_again_is_a_branch_of_the_answer(page: Page, backend: ScriptedBackend) -> None:
    ask(page, "Hello?")
    backend.reset(*says("Once more"))
    page.click("text=Ask again")
    page.wait_for_selector(f"{ANSWERS} :text('Once more')")
    page.wait_for_selector(f"{ANSWERS} >> text=2 / 2")
    assert [message.content for message in backend.last.messages] == ["Hello?"]


def test_a_conversation_survives_a_reload_and_goes_on(page: Page, backend: ScriptedBackend) -> None:
    ask(page, "Remember the number 7.")
    page.reload()
    page.wait_for_selector(f"{ANSWERS} :text('Hello world')")
    ask(page, "Which one?")
    assert [message.content for message in backend.last.messages] == [
        "Remember the number 7.",
        "Hello world",
        "Which one?",
    ]
    page.click("text=New conversation")
    assert page.locator(QUESTIONS).count() == 0
    page.fill("input[aria-label='Search conversations']", "number 7")
    page.click("nav >> text=Remember the number 7.")
    assert page.locator(QUESTIONS).count() == 2


def test_an_answer_that_a_reload_interrupts_is_not_lost_and_not_running(
    page: Page, backend: ScriptedBackend
) -> None:
    backend.script = [says("Once upon")[0], HANG, *says(" a time")]
    send(page, "A story")
    page.wait_for_selector(f"{ANSWERS} :text('Once upon')")
    while "Once upon" not in page.evaluate(KEPT):  # which happens every few seconds
        page.wait_for_timeout(100)
    page.reload()
    page.wait_for_selector("text=Stopped.")
    assert page.locator(".running").count() == 0
    backend.release.set()
    backend.reset()
    page.click("text=Ask again")
    page.wait_for_selector(f"{ANSWERS} :text('Hello world')")


def test_a_conversation_that_is_removed_while_it_is_answered_stays_away(
    page: Page, backend: ScriptedBackend
) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    backend.script = [says("Once upon")[0], HANG, *says(" a time")]
    send(page, "A story")
    page.wait_for_selector(f"{ANSWERS} :text('Once upon')")
    page.click("button[aria-label='Remove A story']")
    assert backend.stopped_early.wait(20)
    page.wait_for_timeout(300)
    page.reload()
    page.wait_for_selector(FIELD)
    page.wait_for_timeout(300)
    assert page.locator("nav li").count() == 0


MISSING = {
    "what plain http lacks": "delete Crypto.prototype.randomUUID; delete Navigator.prototype.clipboard",
    "a place to keep anything": "IDBFactory.prototype.open = () => { throw new Error('no room') }",
}


@pytest.mark.parametrize("missing", MISSING)
def test_it_works_without(browser: Browser, server: Running, backend: ScriptedBackend, missing: str) -> None:
    page = browser.new_page()
    page.add_init_script(MISSING[missing])
    page.goto(server.url)
    page.wait_for_selector(FIELD)
    for number in range(2):
        send(page, f"Question {number}")
        page.locator(".cost").nth(number).wait_for()
    assert page.locator("text=does not keep conversations now").count() == ("keep" in missing)
    page.close()


def test_settings_reach_the_model(page: Page, backend: ScriptedBackend) -> None:
    page.click("text=Settings")
    for label, value in (("System prompt", "Be brief."), ("Temperature", "0.3"), ("Longest answer, tokens", "77")):
        page.get_by_label(label).fill(value)
        page.get_by_label(label).blur()
    ask(page, "Hello?")
    system = backend.last.messages[0]
    assert (system.role, system.content) == ("system", "Be brief.")
    assert (backend.last.sampling.temperature, backend.last.max_tokens) == (0.3, 77)


def test_an_error_is_told_and_the_conversation_goes_on(page: Page, backend: ScriptedBackend) -> None:
    from emberkeep.errors import Overloaded

    backend.script = [Overloaded("The queue is full: try again in a moment.", 1.0)]
    send(page, "Hello?")
    page.wait_for_selector("[role=alert]:has-text('The queue is full')")
    backend.reset()
    page.click("text=Ask again")
    page.wait_for_selector(f"{ANSWERS} :text('Hello world')")


HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">
<iframe src="https://example.org"></iframe><svg onload="window.hacked = 3"></svg>

[a link](javascript:window.hacked=4) [another](data:text/html,<script>window.hacked=5</script>)
![a picture](https://example.org/spy.png) <a href="javascript:window.hacked=6" onclick="window.hacked=7">x</a>

[fine](https://example.org/page "title") `<b>`

```html
<script>window.hacked = 8</script>
```
"""


def test_hostile_output_does_nothing(page: Page, backend: ScriptedBackend, server: Running) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: pytest.fail("a dialog opened"))
    table = "|" + "a|" * 200 + "\n|" + "-|" * 200 + "\n" + ("|" + "b|" * 200 + "\n") * 60
    backend.reset(*says(HOSTILE, "\n\n", table))
    ask(page, "Be evil.")
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    inside = page.locator(f"{ANSWERS} .markdown")
    for selector in (
        "script",
        "iframe",
        "img",
        "svg",
        "[onclick]",
        "[onerror]",
        "[style]",
        "a[href^=java]",
        "a[href^=data]",
    ):
        assert inside.locator(selector).count() == 0, selector
    link = inside.locator("a")
    assert link.count() == 1
    assert re.search("noopener", link.get_attribute("rel") or "")
    assert all(url.startswith((server.url, "blob:")) for url in asked)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_code_is_coloured(page: Page, backend: ScriptedBackend) -> None:
    backend.reset(*says("```python\ndef add(a, b):\n    return a + b\n```"))
    ask(page, "Code")
    page.wait_for_selector(".hljs-keyword")
    assert page.inner_text(f"{ANSWERS} pre").startswith("def add(a, b):")


def test_a_server_with_a_key_asks_for_it(browser: Browser) -> None:
    with running(ScriptedBackend(), Config(api_key="open sesame")) as server:
        page = browser.new_page()
        page.goto(server.url)
        page.fill("input[type=password]", "odd\u200bkey")
        page.click("text=Continue")
        page.wait_for_selector("[role=alert]:has-text('That cannot be a key')")
        page.fill("input[type=password]", "wrong")
        page.click("text=Continue")
        page.wait_for_selector("text=That key was not accepted.")
        page.fill("input[type=password]", "open sesame")
        page.click("text=Continue")
        page.wait_for_selector(FIELD)
        ask(page, "Hello?")
        page.close()


def test_nobody_is_shut_out(page: Page, backend: ScriptedBackend) -> None:
    """By what axe-core calls serious or critical: empty and not, bright and dark, narrow and wide."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    backend.reset(
        *says("A [link](https://example.org), `code`.\n\n```python\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |")
    )
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            if width == 1280:
                ask(page, "Hello?")
            found = axe.run(page).response["violations"]
            bad = [
                (one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")
            ]
            assert bad == []


def test_it_works_by_keyboard(page: Page, backend: ScriptedBackend) -> None:
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Your message"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.wait_for_selector(".cost")
    assert backend.last.messages[0].content == "one\ntwo"
