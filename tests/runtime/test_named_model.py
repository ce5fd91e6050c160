"""A model that is named is meant, also by the name of the default one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from emberkeep.config.settings import DEFAULT_MODEL, Config
from emberkeep.config.sources import load_config
from emberkeep.runtime.served_models import open_backend, serves_others
from helpers.vendors.openai_server import KEY, OpenAIServer


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
