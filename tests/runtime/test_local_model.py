"""Settings that contradict each other, or that the engine would ignore, are refused with the way out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from emberkeep.config.kinds import LoraFile
from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EmberkeepError, ModelBroken
from emberkeep.runtime import local_model
from emberkeep.runtime.local_model import open_local
from emberkeep.runtime.parts import OpenedModel
from emberkeep.runtime.served_models import open_backend
from emberkeep.types.events import Completed
from emberkeep.types.request import Request, Sampling
from helpers import tiny_gguf


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"engine": "hf", "lora": (LoraFile(Path("a.gguf")),)},
            "--lora is for GGUF models in llama.cpp: leave it",
        ),
        (
            {"engine": "hf", "flash_attention": "off"},
            "--flash-attention is for GGUF models in llama.cpp: leave it",
        ),
        ({"kv_type": "q8_0", "kv_bits": 8}, "kv_bits packs state that is held as f16, and kv_type = q8_0 "),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    with pytest.raises(EmberkeepError) as refused:
        open_local(Config(data_dir=tmp_path, model=str(model), **settings))
    assert str(refused.value).startswith(sentence)


def test_weights_that_are_replaced_while_they_are_loaded_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf.dense(tmp_path / "mine.gguf")
    engine, closed = FakeEngine(), []

    def replace_and_open(*_: object, **__: object) -> OpenedModel:
        tiny_gguf.dense(tmp_path / "other.gguf", seed=1).replace(path)
        return OpenedModel(engine, None, {})

    monkeypatch.setattr(engine, "close", lambda: closed.append(1))
    monkeypatch.setattr(local_model, "open_llamacpp", replace_and_open)
    with pytest.raises(ModelBroken, match="changed while it was loaded"):
        local_model.open_local(Config(data_dir=tmp_path, model=str(path)))
    assert closed


LETTERS = Request(prompt="tell me more than sixteen tokens about state", max_tokens=2, sampling=Sampling(seed=1))


async def reused(config: Config) -> int:
    backend = open_backend(config)
    try:
        [*_, last] = [event async for event in backend.generate(LETTERS)]
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
