"""What rules of prefix hygiene keep of clients while models are loaded and unloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.runtime.parts import SharedParts, open_store
from emberkeep.types.hygiene import HygieneAction, HygieneRule
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Message, Request, Sampling, Tool
from helpers.scripted_backend import end_of, fake_backend, read_events, settle

BUILD = HygieneRule("build", r"^Build \d+$", action=HygieneAction.FREEZE)
TOOLS = (Tool("b"), Tool("a"), Tool("c"))


@pytest.fixture(params=[0, 1 << 30])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    """Without a disk, and with one."""
    return Config(data_dir=tmp_path, hygiene=(BUILD,), disk_budget=request.param)


@pytest.fixture
def parts(config: Config) -> Iterator[SharedParts]:
    parts = SharedParts(config)
    yield parts
    parts.close()


def ask(config: Config, parts: SharedParts, build: int, tools: tuple[Tool, ...], model: str = "one") -> set[str]:
    """The rules that changed something for a model that is loaded and unloaded for it."""
    request = Request(
        messages=(Message("system", f"Build {build}"), Message("user", "What is left to do?")),
        tools=tools,
        sampling=Sampling(temperature=0),
        max_tokens=2,
        user="ann",
        namespace=private_namespace("ann"),
    )
    backend = fake_backend(config, FakeEngine(weights=model), name=model, parts=parts)
    try:
        _, completed = end_of(read_events(backend, request))
        settle(backend)
    finally:
        asyncio.run(backend.close())
    return set(completed.hygiene)


@pytest.mark.parametrize("model", ["one", "another"])
def test_what_a_client_sent_first_outlives_the_model(config: Config, parts: SharedParts, model: str) -> None:
    assert ask(config, parts, 1, TOOLS) == set()
    assert ask(config, parts, 2, TOOLS[::-1], model) == {"build", "tool-order"}


def test_a_user_is_forgotten_though_no_model_is_loaded(config: Config, parts: SharedParts) -> None:
    ask(config, parts, 1, TOOLS)
    parts.holders.forget("bob")
    assert ask(config, parts, 2, TOOLS[::-1]) == {"build", "tool-order"}
    parts.holders.forget("ann")
    assert ask(config, parts, 2, TOOLS[::-1]) == set()


@pytest.mark.parametrize("config", [1 << 30], indirect=True)
def test_a_user_whom_another_process_forgets_is_forgotten_though_no_model_is_loaded(
    config: Config, parts: SharedParts
) -> None:
    ask(config, parts, 1, TOOLS)
    elsewhere = open_store(config, b"another".ljust(32), {})
    elsewhere.catalogue.forget_user("ann")
    elsewhere.close()
    parts.sweep()
    assert ask(config, parts, 2, TOOLS[::-1]) == set()
