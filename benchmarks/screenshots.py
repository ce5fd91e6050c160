"""Pictures of every view of the page, light and dark, on a phone and on a desk, of a real server that was used.

    python -m benchmarks.screenshots                       into docs/images/page
    python -m benchmarks.screenshots --model FILE.gguf -o FOLDER

It needs Chromium, and Playwright (`make torture` installs it).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx

from emberkeep.bench.servers import ServerUnderTest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SIZES: Mapping[str, tuple[int, int]] = {"desktop": (1280, 800), "phone": (390, 844)}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
VIEWS = ("chat", "prompt", "cache", "requests", "models", "tools", "memory")
FIELD = "textarea[aria-label='Your message']"
ARRIVED = """() => {
  const [paint] = performance.getEntriesByName("first-contentful-paint");
  const bytes = performance.getEntriesByType("resource").reduce((sum, one) => sum + one.transferSize, 0);
  return `first paint after ${Math.round(paint.startTime)} ms, ${Math.round(bytes / 1000)} KB`;
}"""
SYSTEM = (
    "You are the harbour master of a small port. You know the tides, the winds, the berths and the boats that lie "
    "here, and you answer in one or two short sentences. "
) * 4
QUESTIONS = (
    ("When is the best time to leave?", "And to come back?", "What if the wind turns north?"),
    ("Which berth is free tonight?", "Is it deep enough for two metres?"),
    ("How do I tie a bowline?",),
    ("What does a red buoy mean?", "And a green one?"),
    ("Write a list of three things to check before sailing.",),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a model that runs here (default: the default one)")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/images/page"))
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), asked.model) as url:
        use(url)
        for name in take(url, asked.output):
            print(name)


@contextmanager
def served(folder: Path, model: str) -> Iterator[str]:
    (folder / "root").mkdir()
    (folder / "root" / "log.txt").write_text("The Zephyr came in at noon.\n")
    chosen = ["--model", model] if model else []
    data = ["--data-dir", str(folder / "data")]
    tools = ["--server-tools", "ask", "--enable-tools", "read_file,write_file"]
    tools += ["--tools-root", str(folder / "root")]
    command = [sys.executable, "-m", "emberkeep"]
    serve = [*command, "serve", "--ctx", "4096", *chosen, *data, *tools]
    with ServerUnderTest(serve, folder / "serve.log") as server:
        yield f"http://127.0.0.1:{server.port}"


def use(url: str) -> None:
    """As people would: conversations that share a beginning, and facts to remember."""
    with httpx.Client(base_url=url, timeout=300) as http:
        for number, questions in enumerate(QUESTIONS):
            messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
            for question in questions:
                messages.append({"role": "user", "content": question})
                answer = ask(http, messages=messages, conversation_id=f"harbour-{number}")
                messages.append({"role": "assistant", "content": answer})
        for name, value in (("boat", "Marigold"), ("home port", "Lorient"), ("draught", "1.9 m")):
            http.put(f"/v1/memory/facts/{name}", json={"value": value}).raise_for_status()


def ask(http: httpx.Client, **body: Any) -> str:
    asked = {"max_tokens": 48, "temperature": 0, "tool_choice": "none", **body}
    response = http.post("/v1/chat/completions", json=asked)
    response.raise_for_status()
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def take(url: str, output: Path) -> Iterator[str]:
    from playwright.sync_api import sync_playwright

    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        sys.exit("There is no Chromium: install it (apt install chromium).")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for device, size in SIZES.items():
            yield from on_device(chromium, url, output, device, size)


def on_device(chromium: Browser, url: str, output: Path, device: str, size: tuple[int, int]) -> Iterator[str]:
    context = chromium.new_context(
        viewport={"width": size[0], "height": size[1]}, is_mobile=device == "phone", reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector(FIELD)
    yield f"{device}: {page.evaluate(ARRIVED)}"
    talk(page)
    for view in VIEWS:
        show(page, view)
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            page.wait_for_timeout(300)
            path = output / f"{view}-{device}-{scheme}.png"
            page.screenshot(path=path)
            yield str(path)
    context.close()


def talk(page: Page) -> None:
    """Two turns and a branch: what the cache does is seen under the answers."""
    for text in ("Name three things that every sailor should carry.", "Why the second one?"):
        page.fill(FIELD, text)
        page.press(FIELD, "Enter")
        page.wait_for_function(
            "count => document.querySelectorAll('.cost').length >= count",
            arg=page.locator(".cost").count() + 1,
            timeout=300_000,
        )


def show(page: Page, view: str) -> None:
    if view == "prompt":
        page.get_by_role("button", name="show the prompt").last.click()
        page.wait_for_selector("dialog pre .part")
        return
    if page.locator("dialog[open]").count():
        page.keyboard.press("Escape")
    page.get_by_role("navigation", name="Views").get_by_role("button", name=view.title(), exact=True).click()
    page.wait_for_selector(".view h1, .chat .messages")
    if view == "benchmarks":
        page.wait_for_selector(".view img")
    page.wait_for_timeout(2000)


if __name__ == "__main__":
    main()
