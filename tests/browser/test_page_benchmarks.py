"""Benchmarks on the page: a list, pictures that are really drawn, tables, and one result beside another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from emberkeep.bench.figures import series
from emberkeep.bench.kept_results import keep_result
from emberkeep.bench.report import BenchResult, Row, Table
from emberkeep.config.settings import Config
from helpers.page_view import open_view, who_is_shut_out
from helpers.scripted_server import ScriptedBackend, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

API_KEY = "open sesame"
HOSTILE = "<img src=x onerror='window.hacked = 1'>"
AROUND = {
    "emberkeep": "1.2",
    "command": ["bench", "turns", "--quick"],
    "model": {"file": "tiny.gguf", "bytes": 7_000_000},
    "machine": {"cpu": "Cray-1", "cores": 2, "ram_bytes": 8_000_000, "load_average": [0.5, 1]},
    "versions": {"python": "3.11"},
}


def turns(*medians: float) -> BenchResult:
    rows = (
        Row(f"turn {turn}", {"TTFT": series([value, value + 2], "ms"), "reused tokens": 1000 * turn})
        for turn, value in enumerate(medians, 1)
    )
    return BenchResult("turns", (Table("eight of them", tuple(rows)),), ("TTFT: until the first token.",))


def load(name: str = "load") -> BenchResult:
    row = Row(name, {"server": series([40.0], "tokens/s"), "share": series([0.5], "×"), "how": name})
    return BenchResult(name, (Table(f"clients of {name}", (row,)),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "benchmarks"


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    with running(ScriptedBackend(), Config(data_dir=folder.parent, api_key=API_KEY)) as server:
        yield server.url


@pytest.fixture
def page(browser: Browser, url: str, folder: Path) -> Iterator[Page]:
    for result in (turns(200.0, 100.0), load(), turns(100.0, 50.0)):
        keep_result(folder, result, AROUND)
    with open_view(browser, url, "benchmarks", API_KEY) as page:
        page.wait_for_selector("article img")
        yield page


def rows(page: Page) -> list[str]:
    return [" | ".join(row.split("\t")) for row in page.locator("tbody tr").all_inner_texts()]


def drawn(page: Page) -> list[tuple[str, bool]]:
    """What pictures are called, and whether the browser could draw them."""
    page.wait_for_function("() => [...document.querySelectorAll('article img')].every((one) => one.complete)")
    found = page.locator("article img")
    return [
        (str(found.nth(index).get_attribute("alt")), found.nth(index).evaluate("one => one.naturalWidth > 700"))
        for index in range(found.count())
    ]


def test_the_newest_is_shown_with_its_picture_and_its_table(page: Page) -> None:
    assert page.get_by_role("navigation", name="Results").get_by_role("button").count() == 3
    assert drawn(page) == [("turns: eight of them, TTFT: a picture of what the table says", True)]
    assert rows(page) == ["turn 1 | 101 ms (100–102) | 1,000", "turn 2 | 51.0 ms (50.0–52.0) | 2,000"]
    article = page.inner_text("article")
    for told in ("tiny.gguf", "Cray-1", "2 cores", "Emberkeep 1.2", "TTFT: until the first token."):
        assert told in article
    page.get_by_text("Where it was measured").click()
    assert "bench turns --quick" in page.inner_text("article dl") and "8.0 MB" in page.inner_text("article dl")


def test_another_one_is_chosen_by_keyboard(page: Page) -> None:
    button = page.get_by_role("button", name="load")
    button.focus()
    page.keyboard.press("Enter")
    page.locator("article h2", has_text="load").wait_for()
    page.wait_for_selector("article img")
    assert button.get_attribute("aria-current") == "true"
    assert rows(page) == ["load | 40.0 tokens/s | 0.500× | load"]
    assert page.get_by_label("Compare with").count() == 0  # there is only one


def test_two_of_the_same_are_compared(page: Page) -> None:
    choice = page.get_by_label("Compare with")
    assert choice.locator("option").count() == 2
    choice.select_option(index=1)
    page.wait_for_selector("article img >> nth=1")
    assert [is_drawn for _, is_drawn in drawn(page)] == [True, True]
    others = page.locator("tbody td .other").all_inner_texts()
    assert others == ["201 ms (200–202) (−50%)", "1,000", "101 ms (100–102) (−50%)", "2,000"]
    choice.select_option(index=0)
    page.locator(".other").first.wait_for(state="detached")


def test_pictures_follow_the_light(page: Page) -> None:
    picture, seen = page.locator("article img"), set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(100)
        seen.add(picture.screenshot())
    assert len(seen) == 2


def test_nothing_measured_says_what_to_do(browser: Browser, url: str) -> None:
    with open_view(browser, url, "benchmarks", API_KEY) as page:
        page.get_by_text("emberkeep bench all --quick").wait_for()
        assert who_is_shut_out(page) == []


def test_nobody_is_shut_out(page: Page) -> None:
    page.get_by_label("Compare with").select_option(index=1)
    page.wait_for_selector("article img >> nth=1")
    page.get_by_text("Where it was measured").click()
    assert who_is_shut_out(page) == []


def test_a_result_that_is_gone_says_so(page: Page, folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    page.get_by_role("button", name="load").click()
    page.get_by_role("alert").get_by_text("No such result is kept").wait_for()


def test_hostile_files_do_nothing(browser: Browser, url: str, folder: Path) -> None:
    path = keep_result(folder, load(HOSTILE), {**AROUND, "machine": {HOSTILE: HOSTILE}, "model": HOSTILE})
    told = json.loads(path.read_text())
    script = "<script>parent.hacked = 1; window.hacked = 1</script><image href='https://example.org/spy.png'/>"
    told["pictures"] = [
        {
            "title": HOSTILE,
            "svg": f'<svg xmlns="http://www.w3.org/2000/svg" onload="parent.hacked = 1">{script}</svg>',
        }
    ]
    path.write_text(json.dumps({**told, "notes": [HOSTILE], "when": HOSTILE, "emberkeep": {"a": HOSTILE}}))
    asked: list[str] = []
    with open_view(browser, url, "benchmarks", API_KEY) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.reload()
        page.wait_for_selector("article img")
        page.get_by_text("Where it was measured").click()
        page.wait_for_timeout(300)
        assert page.evaluate("window.hacked") is None
        assert page.locator(".view img").count() == 1 and HOSTILE in page.inner_text("article")
        assert all(one.startswith((url, f"blob:{url}")) for one in asked)
