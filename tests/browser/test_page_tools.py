"""Tools in the chat: what they were called with and gave, and the person who allows them; pictures for models that
can see."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from emberkeep.types.request import Image
from helpers.conversing import ScriptedEngine, asking_server
from helpers.scripted_server import Running, ScriptedBackend, says

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

FIELD = "textarea[aria-label='Your message']"
WRITE = (
    '<tool_call>\n{"name": "write_file", "arguments": {"path": "log.txt", "content": "<b>noon</b>"}}\n</tool_call>'
)
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(context=4096)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (root := tmp_path / "root").mkdir()
    return root


@pytest.fixture
def harbour(engine: ScriptedEngine, root: Path) -> Iterator[Running]:
    """Opened and closed by another thread: Playwright has an event loop running in this one."""
    opening = asking_server(engine, root)
    with ThreadPoolExecutor(1) as other:
        yield other.submit(opening.__enter__).result()
        other.submit(opening.__exit__, None, None, None).result()


@pytest.fixture
def talk(browser: Browser, harbour: Running) -> Iterator[Page]:
    context = browser.new_context()
    page = context.new_page()
    page.goto(harbour.url)
    page.wait_for_selector(FIELD)
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0")
    yield page
    context.close()


def ask(page: Page, text: str) -> None:
    page.fill(FIELD, text)
    page.press(FIELD, "Enter")


def test_a_dangerous_tool_waits_for_a_yes(talk: Page, engine: ScriptedEngine, root: Path) -> None:
    engine.will_say(f"Let me write. {WRITE}", "It is written.")
    ask(talk, "Write it down.")
    question = talk.get_by_role("group", name="May the model run write_file?")
    question.wait_for()
    assert '"content": "<b>noon</b>"' in question.inner_text()
    assert not (root / "log.txt").exists()
    question.get_by_role("button", name="Allow", exact=True).click()
    talk.wait_for_selector("text=It is written.")
    question.wait_for(state="detached")
    assert (root / "log.txt").read_text() == "<b>noon</b>"
    talk.locator("details.tool summary").click()
    assert "log.txt" in talk.get_by_label("Arguments").inner_text()
    assert talk.get_by_label("Result").inner_text()


def test_a_no_is_a_no_and_the_model_goes_on(talk: Page, engine: ScriptedEngine, root: Path) -> None:
    engine.will_say(WRITE, "Then not.")
    ask(talk, "Write it down.")
    talk.get_by_role("button", name="Don’t allow").click()
    talk.wait_for_selector("text=Then not.")
    assert "failed" in talk.locator("details.tool summary").inner_text()
    assert not (root / "log.txt").exists()


def test_always_is_asked_once(talk: Page, engine: ScriptedEngine, root: Path) -> None:
    engine.will_say(WRITE, "Once.", WRITE, "Twice.")
    ask(talk, "Write it down.")
    talk.get_by_role("button", name="Always in this conversation").click()
    talk.wait_for_selector("text=Once.")
    ask(talk, "And again.")
    talk.wait_for_selector("text=Twice.")
    assert talk.locator(".question").count() == 0


def test_what_is_decided_on_is_what_runs(talk: Page, engine: ScriptedEngine) -> None:
    """No letter turns others around, and no number is rounded."""
    call = '{"name": "write_file", "arguments": {"path": "a\u202eb", "n": 12345678901234567890}}'
    engine.will_say(f"<tool_call>\n{call}\n</tool_call>", "Then not.")
    ask(talk, "Write it down.")
    shown = talk.get_by_label("Arguments")
    shown.wait_for()
    assert "202e" in shown.inner_text() and "\u202e" not in shown.inner_text()
    assert "12345678901234567890" in shown.inner_text()
    talk.get_by_role("button", name="Don’t allow").click()
    talk.wait_for_selector("text=Then not.")


def test_questions_are_asked_one_after_the_other(talk: Page, engine: ScriptedEngine, root: Path) -> None:
    delete = '<tool_call>\n{"name": "delete_file", "arguments": {"path": "old.txt"}}\n</tool_call>'
    (root / "old.txt").write_text("dusk")
    engine.will_say(f"{WRITE}\n{delete}", "Done.")
    ask(talk, "Write it down.")
    first = talk.get_by_role("group", name="May the model run write_file?")
    first.get_by_role("button", name="Allow", exact=True).click()
    second = talk.get_by_role("group", name="May the model run delete_file?")
    second.wait_for()
    assert "may run delete_file" in talk.locator(".chat > [role=status]").inner_text()
    assert first.get_by_role("button", name="Allow", exact=True).is_disabled()
    second.get_by_role("button", name="Don’t allow").click()
    talk.wait_for_selector("text=Done.")
    assert (root / "log.txt").exists() and (root / "old.txt").exists()


def test_stop_ends_the_question_and_nothing_runs(talk: Page, engine: ScriptedEngine, root: Path) -> None:
    engine.will_say(WRITE, "Written.")
    ask(talk, "Write it down.")
    talk.wait_for_selector(".question")
    talk.get_by_role("button", name="Stop").click()
    talk.wait_for_selector("text=Stopped.")
    assert talk.locator(".question").count() == 0
    assert "did not run" in talk.locator("details.tool summary").inner_text()
    assert not (root / "log.txt").exists()


def test_the_tools_and_what_happens_when_they_are_called(talk: Page, engine: ScriptedEngine) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    engine.will_say(WRITE)
    ask(talk, "Write it down.")
    talk.wait_for_selector(".question")
    found = axe.run(talk).response["violations"]
    assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
    talk.get_by_role("button", name="Stop").click()
    talk.get_by_role("button", name="Tools", exact=True).click()
    talk.wait_for_selector("dl.tools")
    rows = talk.locator("dl.tools > div")
    assert "asks you first" in rows.filter(has_text="write_file").first.inner_text()
    talk.get_by_label("Search tools").fill("write_file")
    assert rows.count() == 1
    for scheme in ("light", "dark"):
        talk.emulate_media(color_scheme=scheme)
        found = axe.run(talk).response["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []


def test_a_server_without_tools_says_how_to_get_them(page: Page) -> None:
    page.get_by_role("button", name="Tools", exact=True).click()
    page.wait_for_selector("text=--server-tools")


def test_pictures_go_to_the_model_and_stay_in_the_conversation(page: Page, backend: ScriptedBackend) -> None:
    backend.reset(*says("A pixel."))
    picture = {"name": "dot.png", "mimeType": "image/png", "buffer": PIXEL}
    page.set_input_files("input[type=file]", picture)  # type: ignore[arg-type]
    page.wait_for_selector(".composer img")
    page.fill(FIELD, "What is it?")
    page.press(FIELD, "Enter")
    page.wait_for_selector("text=A pixel.")
    (message,) = backend.last.messages
    assert message.images == (Image(f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"),)
    assert message.content == "What is it?"
    assert page.locator(".composer img").count() == 0
    page.wait_for_function("() => document.querySelector('.message img').naturalWidth === 1")
    page.reload()
    page.wait_for_function("() => document.querySelector('.message img')?.naturalWidth === 1")


@pytest.mark.parametrize(
    ("kind", "size", "told"),
    [("image/svg+xml", 10, "no picture that models read"), ("image/png", 10 << 20, "9 MiB together")],
)
def test_what_no_model_reads_is_not_taken(page: Page, kind: str, size: int, told: str) -> None:
    page.set_input_files("input[type=file]", {"name": "x", "mimeType": kind, "buffer": b"x" * size})
    page.wait_for_selector(f".composer [role=alert] >> text={told}")
    assert page.locator(".composer img").count() == 0
