"""Who watches a model does not load it: one that rests goes on resting, whatever view is open."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from emberkeep.config.settings import Config
from emberkeep.runtime.served_models import open_models
from helpers.several_models import install, load_fake_engines, serving, with_memory_for_one

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from emberkeep.backend.local import LocalBackend

pytestmark = pytest.mark.slow


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[LocalBackend]:
    return load_fake_engines(monkeypatch)


@pytest.fixture
def client(tmp_path: Path, loaded: list[LocalBackend]) -> Iterator[httpx.Client]:
    """With memory for one of two models, opened by another thread: Playwright has an event loop in this one."""
    install(tmp_path, "first", "second")
    config = with_memory_for_one(Config(data_dir=tmp_path, model="first", models=("all",)))
    with ThreadPoolExecutor(1) as other:
        opening = other.submit(lambda: serving(config, open_models(config))).result()
        yield other.submit(opening.__enter__).result()
        other.submit(opening.__exit__, None, None, None).result()


def ask(client: httpx.Client, model: str) -> None:
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello there. " * 40}]}
    client.post("/v1/chat/completions", json=body).raise_for_status()


def test_the_cache_of_a_model_that_rests_is_not_asked_for(
    browser: Browser, client: httpx.Client, loaded: list[LocalBackend]
) -> None:
    ask(client, "first")
    page = browser.new_page()
    page.goto(f"{client.base_url}/#/cache")
    page.wait_for_selector("[role=tree]")
    before = len(loaded)
    ask(client, "second")
    page.wait_for_selector("text=This model is not loaded.")
    page.wait_for_timeout(3000)  # twice as long as the view waits between two questions
    assert len(loaded) == before + 1
    page.get_by_label("of").select_option("second")
    page.wait_for_selector("[role=tree]")
    assert len(loaded) == before + 1
    client.post("/models/unload", json={"model": "second"}).raise_for_status()
    page.wait_for_selector("text=This model is not loaded.")
    page.wait_for_timeout(3000)
    assert len(loaded) == before + 1
    page.close()
