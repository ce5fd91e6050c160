"""Models on the page: what there is, loading, installing and removing it, with one model and with several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from emberkeep.backend.base import ModelCard
from emberkeep.backend.local import LocalBackend
from emberkeep.config.kinds import Alias
from emberkeep.config.settings import Config
from emberkeep.models.library import ModelLibrary
from emberkeep.models.remotes import Remotes
from emberkeep.runtime import served_models
from emberkeep.runtime.parts import ModelParts
from emberkeep.runtime.served_models import open_models
from emberkeep.types.models import RemoteModel
from helpers.gguf_builders import tiny_llama
from helpers.model_file_server import ServedRepo, serving_repo
from helpers.page_view import open_view, who_is_shut_out
from helpers.scripted_server import ScriptedBackend, running
from helpers.several_models import install, load_fake_engines, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.slow

NAME = "Install a model"
HOSTILE = "<img src=x onerror='window.hacked = 1'>"


@pytest.fixture
def may_load() -> Iterator[threading.Event]:
    """Models are loaded while it is set."""
    event = threading.Event()
    event.set()
    yield event
    event.set()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    install(tmp_path / "data", "first", "second")
    return tmp_path / "data"


@pytest.fixture
def several(data_dir: Path, may_load: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A server of all that is installed, and of one that runs elsewhere."""
    load_fake_engines(monkeypatch)
    open_fake = served_models.open_local

    def open_when_it_may(config: Config, parts: ModelParts, report: Callable[[float], None]) -> LocalBackend:
        assert may_load.wait(60)
        return open_fake(config, parts, report)

    monkeypatch.setattr(served_models, "open_local", open_when_it_may)
    aliases = (Alias("gpt-4o", "second"),)
    config = Config(data_dir=data_dir, model="first", models=("all",), aliases=aliases)
    Remotes(config).add(RemoteModel("cloud", "openai", model="large"))
    with serving(config, open_models(config)) as client:
        yield client


@pytest.fixture
def page(browser: Browser, several: httpx.Client) -> Iterator[Page]:
    with open_view(browser, str(several.base_url).rstrip("/"), "models") as page:
        yield page


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedRepo]:
    weights = tiny_llama(tmp_path / "remote.gguf", seed=3).read_bytes()
    with serving_repo(ServedRepo("owner/small-GGUF", {"small-Q4_K_M.gguf": weights})) as repo:
        monkeypatch.setenv("HF_ENDPOINT", repo.url)
        yield repo


def card(page: Page, name: str) -> Locator:
    return page.locator(".cards > li", has=page.get_by_role("heading", name=name))


def ask_for(page: Page, name: str) -> None:
    page.get_by_label(NAME).fill(name)
    page.get_by_role("button", name="Install", exact=True).click()


def states(client: httpx.Client) -> dict[str, str]:
    return {model["id"]: model["status"]["value"] for model in client.get("/v1/models").json()["data"]}


def test_every_model_says_what_it_is(page: Page) -> None:
    first, second, cloud = (card(page, name) for name in ("first", "second", "cloud"))
    assert "default" in first.inner_text() and "Loaded" in first.inner_text()
    assert "context 4,096 tokens" in first.inner_text()
    assert "Not loaded" in second.inner_text() and "F32" in second.inner_text()
    assert "also called gpt-4o" in second.inner_text() and "default" not in second.inner_text()
    assert "Runs elsewhere (openai)" in cloud.inner_text()
    assert cloud.get_by_role("button").count() == 0
    second.get_by_text("More").click()
    second.get_by_text("1,024 tokens").wait_for()
    assert "llama" in second.inner_text() and "completion" in second.inner_text()


def test_a_model_is_loaded_and_unloaded_and_that_is_seen(
    page: Page, several: httpx.Client, may_load: threading.Event
) -> None:
    may_load.clear()
    second = card(page, "second")
    second.get_by_role("button", name="Load").click()
    second.get_by_text("Is being loaded").wait_for()
    assert second.get_by_role("progressbar", name="second is being loaded").is_visible()
    assert second.get_by_role("button", name="Load").is_disabled()
    may_load.set()
    second.get_by_text("Loaded", exact=False).and_(page.locator(".state.loaded")).wait_for()
    assert "of memory" in second.inner_text() and "is unloaded in" in second.inner_text()
    second.get_by_role("button", name="Unload").click()
    second.get_by_text("Not loaded").wait_for()
    assert states(several)["second"] == "unloaded"


def test_what_others_do_is_seen_without_a_reload(page: Page, several: httpx.Client) -> None:
    several.post("/models/load", json={"model": "second"})
    card(page, "second").locator(".state.loaded").wait_for()


def test_a_model_that_cannot_be_loaded_says_why(page: Page, data_dir: Path) -> None:
    (data_dir / "models" / "second" / "second.gguf").write_bytes(b"nonsense")
    second = card(page, "second")
    second.get_by_role("button", name="Load").click()
    second.get_by_role("alert").get_by_text("second.gguf").wait_for()
    second.get_by_text("Could not be loaded").wait_for()


def test_a_model_is_installed_and_answers(page: Page, hub: ServedRepo, several: httpx.Client) -> None:
    ask_for(page, "hf.co/owner/small-GGUF:Q4_K_M")
    page.locator(".installs").get_by_text("is installed").wait_for()
    card(page, "small-q4_k_m").get_by_role("button", name="Load").click()
    card(page, "small-q4_k_m").locator(".state.loaded").wait_for()
    assert hub.downloads == ["small-Q4_K_M.gguf"]
    page.get_by_role("button", name="Dismiss").click()
    assert page.locator(".installs li").count() == 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hf.co/owner/small-GGUF:Q8_0", "There is no Q8_0 in hf:owner/small-GGUF"),
        ("/etc/passwd", "model '/etc/passwd' not found: pull smollm2-135m or hf.co/"),
    ],
)
def test_what_cannot_be_installed_says_why(page: Page, hub: ServedRepo, name: str, sentence: str) -> None:
    ask_for(page, name)
    page.locator(".installs [role=alert]").get_by_text(sentence).wait_for()


def test_an_install_shows_how_far_it_is_goes_on_meanwhile_and_can_be_given_up(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def fetch_for_ever(spec: str, library: ModelLibrary, reporter: Any) -> None:
        try:
            while True:
                reporter.progress("Fetching", 25_000_000, 100_000_000)
                threading.Event().wait(0.02)
        finally:
            ended.set()

    monkeypatch.setattr("emberkeep.server.routes.ollama_models._fetch", fetch_for_ever)
    ask_for(page, "hf.co/owner/large")
    bar = page.get_by_role("progressbar", name="hf.co/owner/large is being installed")
    page.get_by_text("25 MB of 100 MB").wait_for()
    assert bar.evaluate("bar => bar.value / bar.max") == 0.25
    page.get_by_role("button", name="Memory", exact=True).click()
    page.wait_for_selector(".view.memory")
    page.get_by_role("button", name="Models", exact=True).click()
    bar.wait_for()
    assert not ended.is_set()
    page.get_by_role("button", name="Cancel hf.co/owner/large").click()
    page.locator(".installs [role=alert]").get_by_text("Given up").wait_for()
    assert ended.wait(20)


def test_removing_asks_first(page: Page, data_dir: Path) -> None:
    library, asked = ModelLibrary(data_dir / "models"), []

    def refuse_first(dialog: Any) -> None:
        asked.append(dialog.message)
        dialog.accept() if len(asked) > 1 else dialog.dismiss()

    page.on("dialog", refuse_first)
    remove = card(page, "second").get_by_role("button", name="Remove second")
    remove.click()
    assert library.holds("second") and "second" in asked[0]
    remove.click()
    card(page, "second").wait_for(state="detached")
    assert not library.holds("second") and library.holds("first")


def test_nobody_is_shut_out(page: Page) -> None:
    card(page, "second").get_by_text("More").click()
    card(page, "second").get_by_text("llama").first.wait_for()
    ask_for(page, "none")
    page.locator(".installs [role=alert]").wait_for()
    assert who_is_shut_out(page) == []


# ── one model only ──


@pytest.fixture
def alone(browser: Browser, data_dir: Path) -> Iterator[Page]:
    """What the server serves is not even in its library, and has a name that is no good."""
    backend = ScriptedBackend()
    backend.card = ModelCard(HOSTILE, 0, 512, details={"quantisation": HOSTILE, "gpu_layers": HOSTILE})
    with running(backend, Config(data_dir=data_dir)) as server, open_view(browser, server.url, "models") as page:
        page.wait_for_selector(".cards > li")
        yield page


def test_the_only_model_stays_and_says_how_there_could_be_more(alone: Page) -> None:
    alone.get_by_role("button", name="Unload").click()
    alone.get_by_role("alert").get_by_text("start it with --models all").wait_for()
    assert alone.get_by_text("emberkeep serve --models all").is_visible()
    rows = alone.locator("tbody tr")
    assert [rows.nth(index).locator("th").inner_text() for index in range(2)] == ["first", "second"]


def test_what_is_installed_and_not_served_can_be_removed(alone: Page, data_dir: Path) -> None:
    alone.on("dialog", lambda dialog: dialog.accept())
    alone.get_by_role("button", name="Remove second").click()
    alone.locator("tbody tr", has_text="second").wait_for(state="detached")
    assert [model.id for model in ModelLibrary(data_dir / "models").list()] == ["first"]


def test_hostile_names_do_nothing(alone: Page) -> None:
    ask_for(alone, HOSTILE)
    alone.locator(".installs [role=alert]").wait_for()
    alone.get_by_text("More").click()
    alone.wait_for_selector("details dl")
    assert alone.evaluate("window.hacked") is None and alone.locator(".view img").count() == 0
    assert HOSTILE in alone.inner_text(".cards h2") and HOSTILE in alone.inner_text(".installs")
    assert who_is_shut_out(alone) == []
