"""Which models a server answers for, and what they share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emberkeep.backend.local import LocalBackend
from emberkeep.backend.models import Models
from emberkeep.config.kinds import Alias, LoraFile
from emberkeep.config.settings import DEFAULT_MODEL, Config
from emberkeep.config.sources import load_config
from emberkeep.errors import ConfigError, ModelNotFound, Overloaded, RequestError
from emberkeep.runtime.parts import rest_budgets
from emberkeep.runtime.placement import room_for_models, weight_bytes
from emberkeep.runtime.served_models import open_backend, open_models, serves_others
from emberkeep.types.events import Completed
from emberkeep.types.models import ModelState, RemoteModel
from emberkeep.types.request import Execution, Message, Request, Sampling
from helpers.several_models import install, load_fake_engines, with_memory_for_one
from helpers.vendors.openai_server import KEY, OpenAIServer

LONG = "The tides, the winds and the harbours of this coast. " * 8

ASKED = Request(
    messages=(Message("user", LONG),),
    max_tokens=4,
    sampling=Sampling(temperature=0),
    execution=Execution(from_store=True),  # whether or not a fake engine would evaluate it faster
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    install(tmp_path, "first", "second", "third")
    return Config(data_dir=tmp_path, model="first", models=("all",))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def ask(models: Models, name: str, request: Request = ASKED) -> Completed:
    *_, last = [event async for event in models.find(name).generate(request)]
    assert isinstance(last, Completed)
    return last


def names(models: Models) -> list[str]:
    return [backend.card.id for backend in models.list()]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"model": "mine"}, False),
        ({"backend": "gpt"}, False),
        ({"model": "mine", "models": ("all",)}, True),
        ({"model": "mine", "models": ("other",)}, True),
        ({"models": ("none",)}, False),
    ],
)
def test_who_names_a_model_and_no_others_gets_that_one(changed: dict[str, Any], expected: bool) -> None:
    assert serves_others(Config(**changed)) is expected


async def test_all_installed_and_registered_models_answer_under_their_names(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_fake_engines(monkeypatch)
    remote = RemoteModel("gpt", "openai", "gpt-5")
    config = replace(config, backends=(remote,), aliases=(Alias("gpt-4o", "second"),))
    models = open_models(config)
    await models.start()
    assert names(models) == ["first", "gpt", "second", "third"]
    assert [backend.card.id for backend in loaded] == ["first"]
    for name in ("gpt-4o", "second:latest", "gpt-4o:latest"):
        assert models.find(name) is models.find("second")
    assert models.find(None) is models.find("first:latest") is models.default
    assert models.find("gpt").card.also == ("gpt-5",)
    assert models.aliases_of(models.find("second")) == ["gpt-4o"]
    with pytest.raises(ModelNotFound, match="'fourth' is not served here"):
        models.find("fourth")
    install(config.data_dir, "fourth")
    assert models.find("fourth").card.id == "fourth"
    await models.close()


async def test_named_ones_answer_and_no_others(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load_fake_engines(monkeypatch)
    file = tmp_path / "second.gguf"
    models = open_models(replace(config, models=(str(file),)))
    assert names(models) == ["first", "second"]
    with pytest.raises(ModelNotFound):
        models.find("third")
    await models.close()


async def test_one_that_is_served_alone_is_never_unloaded(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    load_fake_engines(monkeypatch)
    models = open_models(replace(config, models=("none",)))
    assert await models.load("first") is models.default
    with pytest.raises(RequestError, match="is the only model of this server"):
        await models.unload("first")
    await models.close()


@pytest.mark.parametrize("others", [("none",), ("all",)], ids=["alone", "nothing else installed"])
async def test_where_one_model_is_served_any_name_may_mean_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...]
) -> None:
    load_fake_engines(monkeypatch)
    install(tmp_path, "first")
    config = Config(data_dir=tmp_path, model="first", models=others)
    models = open_models(replace(config, aliases=(Alias("*", "first"),)))
    assert models.find("claude-sonnet") is models.find("gpt-4o:latest") is models.default
    await models.close()
    models = open_models(config)
    with pytest.raises(ModelNotFound, match="use 'first' or 'default'"):
        models.find("claude-sonnet")
    await models.close()


async def test_an_unknown_name_among_several_is_refused_with_the_names_there_are(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_fake_engines(monkeypatch)
    config = replace(config, aliases=(Alias("gpt-4o", "second"),))
    models = open_models(config)
    with pytest.raises(ModelNotFound, match="use one of 'first', 'second', 'third', 'gpt-4o'"):
        models.find("fourth")
    install(config.data_dir, *(f"model-{number}" for number in range(40)))
    with pytest.raises(ModelNotFound, match="or one of 12 more of GET /v1/models"):
        models.find("fourth")
    await models.close()


@pytest.mark.parametrize("disk", [0, 1 << 30])
async def test_nothing_is_lost_when_two_models_take_turns_with_memory_for_one(
    config: Config, monkeypatch: pytest.MonkeyPatch, disk: int
) -> None:
    """Without a disk what was stored stays in RAM."""
    loaded = load_fake_engines(monkeypatch)
    config = with_memory_for_one(replace(config, disk_budget=disk))
    models = open_models(config)
    await models.start()
    for name in ("first", "second"):
        assert (await ask(models, name)).usage.cached_tokens == 0
    for name in ("first", "second", "first"):
        completed = await ask(models, name)
        assert completed.usage.cached_tokens > 0.9 * completed.usage.prompt_tokens
        assert completed.lookup.warm_tokens == completed.usage.cached_tokens
        assert [backend.card.id for backend in models.loaded()] == [name]
    assert [backend.card.id for backend in loaded] == ["first", "second"] * 2 + ["first"]
    await models.close()


def test_what_was_stored_by_several_models_is_there_after_a_restart(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_fake_engines(monkeypatch)
    config = with_memory_for_one(config)

    async def start(expected: bool) -> None:
        models = open_models(config)
        await models.start()
        for name in ("first", "second"):
            assert bool((await ask(models, name)).usage.cached_tokens) is expected
        await models.close()

    run(start(False))
    run(start(True))


async def test_settings_of_the_first_model_are_not_those_of_the_others(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = load_fake_engines(monkeypatch)
    seen: list[Config] = []
    monkeypatch.setattr(
        "emberkeep.runtime.served_models.open_local",
        lambda config, parts, report: seen.append(config) or loaded[0],
    )
    models = open_models(replace(config, lora=(LoraFile(tmp_path / "mine.gguf"),), gpu_layers=3))
    await models.load("second")
    assert (seen[0].model, seen[0].lora, seen[0].gpu_layers) == ("second", (), None)
    await models.default.close()


async def test_pinned_models_stay(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    load_fake_engines(monkeypatch)
    models = open_models(with_memory_for_one(replace(config, pinned=("first",))))
    with pytest.raises(Overloaded, match="beside first"):
        await ask(models, "second")
    await models.close()


async def test_a_user_is_forgotten_by_all_models_loaded_or_not(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_fake_engines(monkeypatch)
    mine = replace(ASKED, user="ann", namespace='["ann", ""]')
    models = open_models(with_memory_for_one(replace(config, disk_budget=0)))
    await models.start()
    for name in ("first", "second"):
        await ask(models, name, mine)
    removed = await asyncio.to_thread(models.remove_user, "ann")
    assert removed.entries >= 1  # the latest may not have been stored yet
    for name in ("first", "second"):
        assert (await ask(models, name, mine)).usage.cached_tokens == 0
    await models.close()


@pytest.mark.parametrize("moment", ["closing", "loading"])
async def test_a_user_is_forgotten_by_a_model_that_just_comes_or_goes(
    config: Config, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    loaded = load_fake_engines(monkeypatch)
    mine = replace(ASKED, user="ann", namespace='["ann", ""]')
    models = open_models(replace(config, disk_budget=0))
    await models.start()
    await ask(models, "first", mine)
    if moment == "loading":
        await models.unload("first")
    reached, go_on = asyncio.Event(), asyncio.Event()
    close, start = LocalBackend.close, LocalBackend.start

    async def wait_and(act: Callable[[LocalBackend], Awaitable[None]], backend: LocalBackend) -> None:
        reached.set()
        await go_on.wait()
        await act(backend)

    monkeypatch.setattr(LocalBackend, "close", lambda self: wait_and(close, self))
    monkeypatch.setattr(LocalBackend, "start", lambda self: wait_and(start, self))
    changing = asyncio.create_task(models.load("first") if moment == "loading" else models.unload("first"))
    await reached.wait()
    removed = await asyncio.to_thread(models.remove_user, "ann")
    assert removed.tokens > 0  # the end of the turn may not have been stored yet
    assert len(loaded) == (2 if moment == "loading" else 1)  # nothing is loaded for it
    go_on.set()
    await changing
    assert (await ask(models, "first", mine)).usage.cached_tokens == 0
    await models.close()


async def test_one_file_under_two_names_is_loaded_twice_and_shares_what_is_stored(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_fake_engines(monkeypatch)
    monkeypatch.setattr("emberkeep.engine.fake.FakeEngine.fingerprint", b"one".ljust(32))
    models = open_models(config)
    await models.start()
    await ask(models, "first")
    await models.load("second")
    assert (await ask(models, "second")).usage.cached_tokens >= 0
    await models.unload("first")
    assert [backend.card.id for backend in models.loaded()] == ["second"]
    await ask(models, "second")
    await models.close()


async def test_a_model_that_cannot_be_loaded_says_why(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    load_fake_engines(monkeypatch)
    models = open_models(config)
    (config.data_dir / "models" / "second" / "second.gguf").write_bytes(b"nonsense")
    with pytest.raises(Exception, match="second"):
        await ask(models, "second")
    assert models.find("second").status.state is ModelState.FAILED  # type: ignore[attr-defined]
    await models.close()


def test_ram_for_state_goes_to_the_latest_of_those_at_rest() -> None:
    assert rest_budgets([30, 20, 10], 100) == [30, 20, 10]
    assert rest_budgets([30, 20, 10], 25) == [0, 15, 10]
    assert rest_budgets([], 10) == []


def test_gpus_tell_what_they_have_left() -> None:
    from emberkeep.backend.model_pool import Need

    fits = room_for_models(Config(model_memory=100), lambda: 50)
    assert fits(Need(60), [Need(40)])
    assert not fits(Need(61), [Need(40)])
    assert fits(Need(10, gpu=50), [Need(0, gpu=500)])
    assert not fits(Need(10, gpu=51), [])


def test_weights_are_counted_by_their_files(config: Config) -> None:
    file = config.data_dir / "models" / "first" / "first.gguf"
    assert weight_bytes(file) == file.stat().st_size


def test_a_draft_model_is_for_a_model_that_runs_here() -> None:
    with pytest.raises(
        ConfigError, match=r"drafts for a model that runs here.*: leave speculation out, or add local"
    ):
        open_backend(Config(backend="openai", speculation="small"))


def asked(folder: Path, **settings: object) -> Config:
    return load_config({"data_dir": folder, **settings}, env={}, cwd=folder).config


@pytest.mark.slow
@pytest.mark.parametrize(("given", "expected"), [(DEFAULT_MODEL, DEFAULT_MODEL), (None, "gpt-6-sol")])
def test_a_service_is_asked_for_the_model_that_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    async def answering() -> str:
        async with OpenAIServer(models=[{"id": "gpt-6-sol"}, {"id": DEFAULT_MODEL}]) as server:
            config = asked(tmp_path, model=given, backend="openai", base_url=f"{server.url}/v1")
            backend = await asyncio.to_thread(open_backend, config)
            await backend.close()
            return backend.card.id

    assert asyncio.run(answering()) == expected


@pytest.mark.parametrize(("given", "expected"), [(DEFAULT_MODEL, False), ("mine", False), (None, True)])
def test_who_names_a_model_wants_that_one_alone(tmp_path: Path, given: str | None, expected: bool) -> None:
    assert serves_others(asked(tmp_path, model=given)) is expected
