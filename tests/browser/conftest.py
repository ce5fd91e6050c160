"""A real Chromium, and a server whose model says what a test wants. Skipped where there is no Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from emberkeep.config.settings import Config
from helpers.cache_server import Served, served
from helpers.page_view import chromium
from helpers.scripted_server import Running, ScriptedBackend, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

FIELD = "textarea[aria-label='Your message']"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for longer: while Playwright is there, this thread has an event loop that runs, and no test of another
    module could have its own."""
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running(ScriptedBackend(), Config()) as server:
        yield server


@pytest.fixture
def backend(server: Running) -> ScriptedBackend:
    server.backend.reset()
    return server.backend


def _is_complaint(said: ConsoleMessage) -> bool:
    """A status that the page tells about itself is none."""
    return said.type == "error" and not said.text.startswith("Failed to load resource")


@pytest.fixture
def page(browser: Browser, server: Running, backend: ScriptedBackend) -> Iterator[Page]:
    """Of a browser that was never here; whatever it complains about fails the test."""
    context = browser.new_context()
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if _is_complaint(said) else None)
    page.goto(server.url)
    page.wait_for_selector(FIELD)
    yield page
    backend.release.set()
    context.close()
    assert complaints == []


@pytest.fixture
def sea(tmp_path: Path) -> Iterator[Served]:
    """A server with a real store and a real scheduler, opened and closed by another thread: Playwright has an
    event loop running in this one."""
    opening = served(tmp_path)
    with ThreadPoolExecutor(1) as other:
        yield other.submit(opening.__enter__).result()
        other.submit(opening.__exit__, None, None, None).result()
