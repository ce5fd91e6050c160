"""Memory on the page: searching, facts, conversations, taking it along and forgetting it, over a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emberkeep.config.settings import Config
from emberkeep.errors import MemoryFailed
from emberkeep.memory.memory import Memory
from emberkeep.types.lineage import private_namespace
from emberkeep.types.memory import ToolUse
from emberkeep.types.request import Json, Message
from helpers.page_view import open_view, who_is_shut_out
from helpers.remembering import turn
from helpers.scripted_server import ScriptedBackend, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

API_KEY = "open sesame"
HOSTILE = "<img src=x onerror='window.hacked = 1'>"
SECRET = "sk-proj-Abcd1234Efgh5678Ijkl9012Mnop3456Qrst7890Uvwx"


@pytest.fixture
def url(memory: Memory) -> Iterator[str]:
    memory.archive(
        "",
        [
            turn(
                "I put the spare key under the blue pot.",
                "Noted: the key is there, and no monkey will find it.",
                conversation="garden",
                days_ago=2,
                tool_uses=(ToolUse("look", "{}", "a blue pot"),),
            ),
            turn("The tide turns at noon.", "So it does.", conversation="harbour"),
        ],
    )
    memory.store_answer("", "When is high tide?", "At noon.")
    memory.set_fact("", "cat", "Kater Murr")
    memory.save_messages(
        "", "a/b c", [Message("user", "Name a colour."), Message("assistant", "Blue.")], model="m"
    )
    memory.set_fact(private_namespace("ann"), "moon", "full")
    backend = ScriptedBackend()
    backend.memory = memory
    with running(backend, Config(api_key=API_KEY)) as server:
        yield server.url


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with open_view(browser, url, "memory", API_KEY) as page:
        page.wait_for_selector(".figures")
        yield page


def search(page: Page, query: str) -> None:
    page.get_by_label("Search what is remembered").fill(query)
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_role("status").get_by_text("found").wait_for(state="attached")


def found(page: Page) -> list[str]:
    return page.locator(".found .passage").all_inner_texts()


def figures(page: Page) -> dict[str, str]:
    names, values = page.locator(".figures dt").all_inner_texts(), page.locator(".figures dd").all_inner_texts()
    return dict(zip(names, values, strict=True))


def test_it_says_how_much_is_remembered(page: Page) -> None:
    counted = figures(page)
    assert counted.pop("the latest turn") == "just now"
    assert counted == {
        "turns have left a conversation": "2",
        "facts": "1",
        "stored answers": "1",
        "saved conversations": "1",
    }


def test_what_was_said_is_found_with_its_words_marked(page: Page) -> None:
    search(page, "Where is the spare key?")
    assert found(page) == ["I put the spare key under the blue pot."]
    assert page.locator(".passage mark").all_inner_texts() == ["spare", "key"]
    assert "2 days ago" in page.inner_text(".found") and "garden" in page.inner_text(".found")
    page.get_by_text("The whole turn").click()
    whole = page.locator(".found dl")
    assert "no monkey will find it" in whole.inner_text() and "a blue pot" in whole.inner_text()
    assert whole.locator("mark").all_inner_texts() == ["spare", "key", "key"]
    search(page, "zebra")
    page.get_by_text("Nothing like that is remembered").wait_for()


def test_one_conversation_is_searched_and_forgotten(page: Page, memory: Memory) -> None:
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    search(page, "noon")
    assert sorted(found(page)) == ["At noon.", "The tide turns at noon."]
    page.get_by_role("button", name="search only there").click()
    page.wait_for_function("() => document.querySelectorAll('.found > li').length === 1")
    page.get_by_role("button", name="forget this conversation").click()
    page.wait_for_function("() => document.querySelector('.figures dd').textContent === '1'")
    assert "harbour" in asked[0]
    assert (memory.stats("")["turns"], memory.stats("")["facts"]) == (1, 1)


def test_facts_are_told_changed_and_removed(page: Page, memory: Memory) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    name, value = page.get_by_label("Name of the fact"), page.get_by_label("Value of the fact")
    name.fill("a/b?c#d")
    value.fill("Lyon")
    value.press("Enter")
    page.locator("tbody tr", has_text="Lyon").wait_for()
    page.get_by_role("button", name="Change cat").click()
    assert (name.input_value(), value.input_value()) == ("cat", "Kater Murr")
    value.fill("Tom")
    page.get_by_role("button", name="Remember").click()
    page.locator("tbody tr", has_text="Tom").wait_for()
    assert {fact.name: fact.value for fact in memory.facts("")} == {"a/b?c#d": "Lyon", "cat": "Tom"}
    page.get_by_role("button", name="Remove a/b?c#d").click()
    page.locator("tbody tr", has_text="Lyon").wait_for(state="detached")
    assert [fact.name for fact in memory.facts("")] == ["cat"]


def test_a_secret_is_refused_in_the_servers_words_and_stays_in_the_field(page: Page) -> None:
    page.get_by_label("Name of the fact").fill("key")
    page.get_by_label("Value of the fact").fill(SECRET)
    page.get_by_role("button", name="Remember").click()
    page.get_by_role("alert").get_by_text("memory does not keep secrets").wait_for()
    assert page.get_by_label("Value of the fact").input_value() == SECRET


def test_a_saved_conversation_is_read(page: Page) -> None:
    page.get_by_text("Name a colour.").click()
    page.locator(".conversation dd", has_text="Blue.").wait_for()
    assert "2 messages" in page.inner_text(".conversation summary")


def test_the_memory_of_a_named_user_is_another_one(page: Page) -> None:
    page.get_by_label("Whose").fill("ann")
    page.get_by_role("button", name="Show").click()
    page.locator("tbody tr", has_text="moon").wait_for()
    assert page.get_by_text("Kater Murr").count() == 0
    assert figures(page) == {"facts": "1"}
    page.get_by_label("Whose").fill("ann lee")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("alert").get_by_text("user_id").first.wait_for()
    assert page.locator("tbody tr").count() == 0


def test_nothing_of_one_user_is_shown_as_another_ones(page: Page) -> None:
    page.get_by_label("Whose").fill("ann")
    page.get_by_role("button", name="Show").click()
    page.locator("tbody tr", has_text="moon").wait_for()
    page.route("**/v1/memory/stats?user_id=ann+lee", lambda route: None)  # comes last, if ever
    page.get_by_label("Whose").fill("ann lee")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("alert").get_by_text("user_id").first.wait_for()
    assert page.locator("tbody tr").count() == 0


def test_everything_is_taken_along(page: Page, memory: Memory, tmp_path: Path) -> None:
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Export").click()
    assert downloading.value.suggested_filename == "emberkeep-memory.jsonl"
    rows = [json.loads(line) for line in Path(downloading.value.path()).read_text().splitlines()]
    other = Memory(tmp_path / "other.sqlite3", limit_bytes=1 << 30)
    other.import_(rows)
    counted = other.stats("")
    assert (counted["turns"], counted["facts"], counted["conversations"]) == (2, 1, 1)
    other.close()


def test_everything_is_forgotten_only_when_that_is_confirmed(page: Page, memory: Memory) -> None:
    asked: list[str] = []

    def refuse_first(dialog: Any) -> None:
        asked.append(dialog.message)
        dialog.accept() if len(asked) > 1 else dialog.dismiss()

    page.on("dialog", refuse_first)
    page.get_by_role("button", name="Forget everything").click()
    assert "facts too" in asked[0] and memory.stats("")["facts"] == 1
    page.get_by_role("button", name="Forget everything").click()
    page.get_by_text("Forgotten: 2 turns, 1 facts, 1 conversations.").wait_for()
    page.get_by_text("Nothing yet").wait_for()
    assert memory.stats("")["turns"] == 0 and memory.facts(private_namespace("ann"))


def test_hostile_texts_do_nothing(page: Page, memory: Memory) -> None:
    memory.archive("", [turn(f"{HOSTILE} **{HOSTILE}** zebra", HOSTILE, conversation=HOSTILE)])
    memory.set_fact("", HOSTILE, f"{HOSTILE}\n{'long' * 400}")
    memory.save_messages("", HOSTILE, [Message("user", HOSTILE)], model=HOSTILE)
    page.reload()
    page.wait_for_selector("tbody tr >> nth=1")
    search(page, "zebra")
    page.get_by_text("The whole turn").click()
    page.locator(".conversation summary", has_text=HOSTILE).click()
    page.locator(".conversation dd", has_text=HOSTILE).wait_for()
    assert page.evaluate("window.hacked") is None and page.locator(".view img").count() == 0
    assert page.locator(".passage mark", has_text="zebra").is_visible()
    assert who_is_shut_out(page) == []


def test_a_server_without_memory_says_how_to_switch_it_on(browser: Browser) -> None:
    with running(ScriptedBackend(), Config()) as server, open_view(browser, server.url, "memory") as page:
        page.get_by_role("alert").get_by_text("Nothing is remembered here: set memory = true").wait_for()
        assert page.get_by_text("EMBERKEEP_MEMORY=true").is_visible()
        assert who_is_shut_out(page) == []


class _Broken:
    """A disk that gives up while everything is read."""

    def stats(self, owner: str) -> dict[str, Json]:
        return {"turns": 1000, "facts": 0, "newest": None}

    def facts(self, owner: str) -> list[Json]:
        raise MemoryFailed("The disk is full: make room.")

    def conversations(self, owner: str, limit: int) -> list[Json]:
        return []

    def export(self, owner: str) -> Iterator[dict[str, Json]]:
        yield from ({"kind": "fact"} for _ in range(1000))
        raise MemoryFailed("The disk is gone: look for it.")


def test_half_of_an_export_is_not_taken_for_all_of_it(browser: Browser) -> None:
    backend = ScriptedBackend()
    backend.memory = _Broken()  # type: ignore[assignment]
    with running(backend, Config()) as server, open_view(browser, server.url, "memory") as page:
        page.on("download", lambda _: pytest.fail("a file was saved"))
        page.get_by_role("button", name="Export").click()
        page.get_by_role("alert").get_by_text("Not all of it could be read").wait_for()
        page.get_by_role("alert").get_by_text("The disk is full: make room.").wait_for()
