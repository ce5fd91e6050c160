"""From settings to a running backend, with a real engine."""

from __future__ import annotations

import asyncio

import pytest

from emberkeep.config.settings import Config
from emberkeep.runtime.served_models import open_backend
from emberkeep.types.events import Completed
from emberkeep.types.request import Request, Sampling
from helpers import tiny_gguf

ASKED = Request(prompt="tell me more than sixteen tokens about state", max_tokens=2, sampling=Sampling(seed=1))


async def reused(config: Config) -> int:
    backend = open_backend(config)
    try:
        [*_, last] = [event async for event in backend.generate(ASKED)]
        assert isinstance(last, Completed)
        return last.usage.cached_tokens
    finally:
        await backend.close()


@pytest.mark.parametrize("changed", [{"parallel": 1}, {"ctx": 4096}, {"ctx": 256}])
def test_what_was_stored_is_found_with_other_settings(tmp_path, changed):
    """All but the number of threads, with which attention adds up in another order."""
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    settings = {"model": str(model), "data_dir": tmp_path / "data", "parallel": 4}
    assert asyncio.run(reused(Config(**settings))) == 0
    assert asyncio.run(reused(Config(**{**settings, **changed}))) > 16
