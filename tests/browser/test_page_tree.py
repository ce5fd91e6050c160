"""The cache as a tree: what requests leave in it is seen, and looked at closer, by mouse and by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from emberkeep.kv.store import KvStore
from emberkeep.types.cache import EntryKind, Label
from emberkeep.types.lineage import Lineage, private_namespace
from emberkeep.types.request import Json
from helpers.cache_server import SYSTEM, Served, served, user

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

PICTURE = ".picture"
CANVAS = ".picture canvas"
CHUNKS = 100_000
DRAWN = """
    const clear = CanvasRenderingContext2D.prototype.clearRect;
    window.drawn = 0;
    CanvasRenderingContext2D.prototype.clearRect = function (...at) {
        window.drawn += 1;
        return clear.apply(this, at);
    };
"""
"""Counts the pictures."""
FRAMES = """(count) => new Promise((resolve) => {
    const drawn = window.drawn;
    let frames = 0;
    const next = () => {
        frames += 1;
        if (window.drawn - drawn < count) requestAnimationFrame(next);
        else resolve({ frames, drawn: window.drawn - drawn });
    };
    requestAnimationFrame(next);
})"""
"""How many frames the browser has shown when so many pictures are drawn."""
RESTLESS = """() => {
    const canvas = document.querySelector(".picture canvas");
    let count = 0;
    window.restless = setInterval(() => {
        const { left, top, width, height } = canvas.getBoundingClientRect();
        const at = { clientX: left + (count * 37) % width, clientY: top + 20 + (count * 13) % (height - 20) };
        canvas.dispatchEvent(new PointerEvent("pointermove", at));
        const turned = { ...at, deltaY: count % 120 < 60 ? -30 : 30, ctrlKey: true, cancelable: true };
        if (count % 3 === 0) canvas.dispatchEvent(new WheelEvent("wheel", turned));
        count += 1;
    }, 15);
}"""
"""A pointer that moves all the time, and looks closer and away again."""


@pytest.fixture
def page(browser: Browser, sea: Served) -> Iterator[Page]:
    yield from opened(browser, sea)


def opened(browser: Browser, sea: Served) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 1100})
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.add_init_script(DRAWN)
    page.goto(f"{sea.server.url}/#/cache")
    page.wait_for_selector(".gauge")
    yield page
    context.close()
    assert complaints == []


def two_branches(sea: Served) -> None:
    for name in ("high", "low"):
        sea.chat(SYSTEM, user(f"When is {name} tide?"), conversation_id=name)


def item(page: Page) -> Json:
    """The node that is chosen, as a screen reader gets it."""
    active = page.get_attribute("[role=tree]", "aria-activedescendant")
    found = page.locator(f"[id='{active}'][role=treeitem]")
    words, level, of, place = (
        found.get_attribute(f"aria-{name}") or "" for name in ("label", "level", "setsize", "posinset")
    )
    return {"words": words, "level": int(level), "of": int(of), "place": int(place)}


def press(page: Page, *keys: str) -> Json:
    page.focus(PICTURE)
    for key in keys:
        page.keyboard.press(key)
    return item(page)


def click(page: Page, across: float, down: float) -> None:
    """At a place of the picture, from 0 to 1."""
    box = page.locator(CANVAS).bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + across * box["width"], box["y"] + 20 + down * (box["height"] - 20))


def colours(page: Page) -> set[tuple[int, int, int]]:
    """Every colour that is somewhere in the picture."""
    pixels = page.evaluate(
        """() => {
            const canvas = document.querySelector(".picture canvas");
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const found = new Set();
            for (let at = 0; at < data.length; at += 4) if (data[at + 3]) found.add(data.slice(at, at + 3).join());
            return [...found];
        }"""
    )
    return {tuple(map(int, pixel.split(","))) for pixel in pixels}


def wait_for_branches(page: Page, count: int) -> None:
    """At the second level."""
    press(page, "Home", "ArrowRight")
    page.wait_for_function(
        f"() => document.querySelector('[role=treeitem]').getAttribute('aria-setsize') === '{count}'"
    )


def test_a_new_branch_is_seen_after_a_request(page: Page, sea: Served) -> None:
    page.wait_for_selector("text=Nothing yet: ask something")
    two_branches(sea)
    page.wait_for_selector(CANVAS)
    wait_for_branches(page, 2)
    before = page.evaluate("document.querySelector('.picture canvas').toDataURL()")
    sea.chat(SYSTEM, user("When is neap tide?"))
    wait_for_branches(page, 3)
    page.wait_for_function("(before) => document.querySelector('canvas').toDataURL() !== before", arg=before)


def test_what_is_new_shines_for_a_moment(page: Page, sea: Served) -> None:
    two_branches(sea)
    page.wait_for_selector(CANVAS)
    page.wait_for_timeout(500)
    quiet = colours(page)
    sea.chat(SYSTEM, user("When is neap tide?"))
    page.wait_for_function("(before) => window.drawn > before + 20", arg=page.evaluate("window.drawn"))
    assert colours(page) - quiet
    page.wait_for_timeout(2500)
    settled = page.evaluate("window.drawn")
    page.wait_for_timeout(500)
    assert page.evaluate("window.drawn") == settled  # nothing is drawn while nothing happens


def test_who_wants_no_motion_gets_none(browser: Browser, sea: Served) -> None:
    context = browser.new_context(reduced_motion="reduce")
    page = context.new_page()
    page.add_init_script(DRAWN)
    two_branches(sea)
    page.goto(f"{sea.server.url}/#/cache")
    page.wait_for_selector(CANVAS)
    page.wait_for_timeout(500)
    before = page.evaluate("window.drawn")
    sea.chat(SYSTEM, user("When is neap tide?"))
    wait_for_branches(page, 3)
    assert page.evaluate("window.drawn") - before < 10
    context.close()


def test_the_tree_is_walked_by_keyboard(page: Page, sea: Served) -> None:
    two_branches(sea)
    page.wait_for_selector(CANVAS)
    stem = press(page, "Home")
    assert (stem["level"], stem["of"]) == (1, 1) and "2 branches follow" in stem["words"]
    first = press(page, "ArrowRight")
    assert (first["level"], first["place"], first["of"]) == (2, 1, 2) and "high tide" in first["words"]
    assert "low tide" in press(page, "ArrowDown")["words"]
    assert press(page, "ArrowDown")["place"] == 2  # there is no other
    assert "high tide" in press(page, "ArrowUp")["words"]
    assert press(page, "ArrowLeft") == stem
    assert "2 branches follow" in page.inner_text(".under")


def test_closer_and_back_by_keyboard(page: Page, sea: Served) -> None:
    two_branches(sea)
    sea.chat(user("Something else"), user_id="other")
    page.wait_for_selector(CANVAS)
    assert press(page, "Home")["of"] == 2
    press(page, "Enter")
    page.wait_for_selector(".trail >> text=You know the tides")
    page.wait_for_function("() => document.querySelector('[role=treeitem]').getAttribute('aria-setsize') === '1'")
    assert "You know the tides" in item(page)["words"]
    press(page, "Escape")
    page.wait_for_selector(".trail", state="detached")
    page.wait_for_function("() => document.querySelector('[role=treeitem]').getAttribute('aria-setsize') === '2'")


def test_closer_and_back_by_mouse(page: Page, sea: Served) -> None:
    two_branches(sea)
    page.wait_for_selector(CANVAS)
    page.hover(CANVAS, position={"x": 30, "y": 60})
    page.wait_for_selector(".under >> text=/Tokens 0 to .* 2 branches follow/")
    click(page, 0.02, 0.5)
    page.wait_for_selector(".trail [aria-current]")
    click(page, 0.99, 0.02)
    page.wait_for_selector(".ends >> text=When is high tide?")
    assert page.locator(".trail li").count() == 2  # nothing goes on from there
    page.get_by_role("button", name="Everything").click()
    page.wait_for_selector(".trail", state="detached")


def test_an_entry_is_pinned_shown_and_explained_from_the_tree(page: Page, sea: Served) -> None:
    two_branches(sea)
    page.wait_for_selector(CANVAS)
    press(page, "Home", "ArrowRight")
    page.get_by_role("button", name="Pin When is high tide?").click()
    page.get_by_role("button", name="Unpin When is high tide?").wait_for()
    assert sea.entry_of("high")["pinned"]
    assert "pinned" in page.inner_text(".under")
    page.get_by_role("button", name="Show the text of When is high tide?").click()
    page.wait_for_selector("dialog pre >> text=You know the tides")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.get_by_role("button", name="Explain When is high tide?").click()
    page.wait_for_selector(".ask >> text=/When is high tide.: .*(All|tokens can be reused)/")
    assert page.locator(".ask .part").first.inner_text().count("You know the tides") > 0


def test_an_entry_is_removed_from_the_tree_once_someone_is_sure(page: Page, sea: Served) -> None:
    two_branches(sea)
    page.wait_for_selector(CANVAS)
    press(page, "Home", "ArrowRight")
    asked: list[str] = []
    answers = iter([False, True])
    page.on("dialog", lambda d: (asked.append(d.message), d.accept() if next(answers) else d.dismiss()))
    remove = page.get_by_role("button", name="Remove When is high tide? from the cache")
    remove.click()
    assert "high" in [entry["conversation_id"] for entry in sea.entries()]
    remove.click()
    remove.wait_for(state="detached")
    assert "high" not in [entry["conversation_id"] for entry in sea.entries()]
    assert len(asked) == 2 and "When is high tide?" in asked[0]
    assert page.evaluate("document.activeElement.getAttribute('role')") == "tree"


def test_a_part_that_goes_while_it_is_looked_at_is_left(page: Page, sea: Served) -> None:
    two_branches(sea)
    sea.chat(user("Something else"), user_id="other")
    page.wait_for_selector(CANVAS)
    press(page, "Home", "Enter")
    page.wait_for_selector(".trail")
    for entry in sea.entries():
        if entry["head"] != "Something else":
            sea.delete(f"/v1/cache/{entry['id']}")
    page.wait_for_selector(".trail", state="detached")
    assert page.locator(".tree [role=alert]").count() == 0


def test_it_is_sharp_and_follows_the_colours_of_the_page(browser: Browser, sea: Served) -> None:
    two_branches(sea)
    context = browser.new_context(device_scale_factor=2, color_scheme="light")
    page = context.new_page()
    page.goto(f"{sea.server.url}/#/cache")
    page.wait_for_selector(CANVAS)
    page.wait_for_timeout(600)
    width, shown = page.evaluate(
        "() => { const c = document.querySelector('.picture canvas'); return [c.width, c.clientWidth]; }"
    )
    assert width == 2 * shown
    bright = colours(page)
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(300)
    dark = colours(page)
    assert max(map(sum, dark)) > 600 and (29, 27, 25) in bright and (29, 27, 25) not in dark  # the words
    context.close()


# ── a large store ──


def fill(store: KvStore) -> None:
    """Conversations of four users, which part again and again, up to so many chunks."""
    random, payload, made, ends = np.random.default_rng(7), memoryview(b"tiny"), 0, []
    while made < CHUNKS:
        number = len(ends)
        lineage = Lineage(private_namespace(f"user{number % 4}"))
        cursor = ends[number // 3] if number > 40 and number % 3 else store.origin(lineage)
        if cursor.lineage != lineage or cursor.position > 2000:
            cursor = store.origin(lineage)
        for _ in range(min(int(8 * random.pareto(1.2)) + 2, 100)):
            tokens = random.integers(32, 127, 16, dtype=np.int32)
            cursor = store.insert(cursor, tokens, payload, (), fork=True)
            made += 1
        store.turn_ended(
            Label(EntryKind.CONVERSATION, f"id:{number}", f"Number {number}", name=f"{number}"), cursor
        )
        ends.append(cursor)


@pytest.fixture(scope="module")
def ocean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a hundred thousand chunks."""
    opening = served(tmp_path_factory.mktemp("ocean"), disk_budget=0, ram_budget=1 << 30)
    with ThreadPoolExecutor(1) as other:
        ocean = other.submit(opening.__enter__).result()
        fill(ocean.backend._store)
        yield ocean
        other.submit(opening.__exit__, None, None, None).result()


def test_a_hundred_thousand_chunks_are_one_picture_a_frame_however_the_pointer_moves(
    browser: Browser, ocean: Served
) -> None:
    told = ocean.client.get("/v1/cache/tree").json()
    assert told["totals"]["chunks"] >= CHUNKS and 1000 < len(told["nodes"]) <= 1500
    for page in opened(browser, ocean):
        page.wait_for_selector(CANVAS)
        page.evaluate(RESTLESS)
        with ThreadPoolExecutor(1) as other:
            asking = other.submit(lambda: [ocean.chat(user(f"Question {n} about boats")) for n in range(4)])
            shown = page.evaluate(FRAMES, 60)
            asking.result()
        assert shown["drawn"] <= shown["frames"] + 1
        page.evaluate("clearInterval(window.restless)")
        press(page, "0", "End", "Enter")
        page.wait_for_selector(".trail")
        page.evaluate(RESTLESS)
        shown = page.evaluate(FRAMES, 60)
        assert shown["drawn"] <= shown["frames"] + 1


def test_what_was_asked_last_is_seen_among_a_hundred_thousand_chunks(browser: Browser, ocean: Served) -> None:
    for page in opened(browser, ocean):
        page.wait_for_selector(CANVAS)
        ocean.chat(user("Where is the lighthouse?"), user_id="keeper", conversation_id="lighthouse")
        while "Where is the lighthouse?" not in press(page, "End", "ArrowUp")["words"]:
            page.wait_for_timeout(200)
        page.get_by_role("button", name="Pin Where is the lighthouse?").click()
        page.get_by_role("button", name="Unpin Where is the lighthouse?").wait_for()


def test_nobody_is_shut_out_of_the_tree(page: Page, sea: Served) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    two_branches(sea)
    page.wait_for_selector(CANVAS)
    press(page, "Home", "Enter")
    page.wait_for_selector(".trail")
    press(page, "ArrowRight")
    found = axe.run(page).response["violations"]
    assert [
        (one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")
    ] == []
