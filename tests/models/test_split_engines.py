"""Split models in the engines: they compute what the whole file does, and keep their state to themselves."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from emberkeep.config.settings import Config
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.errors import ModelBroken
from emberkeep.models.library import ModelLibrary
from emberkeep.models.parts import part_files
from emberkeep.models.pull import pull
from emberkeep.runtime.served_models import open_backend
from emberkeep.types.events import Completed
from emberkeep.types.request import Request, Sampling
from helpers import tiny_gguf
from helpers.engines import TOKENS, evaluate

pytestmark = pytest.mark.slow

ASKED = Request(prompt="tell me more than sixteen tokens about state", max_tokens=2, sampling=Sampling(seed=1))
Reused = Callable[[Path | str], int]


@pytest.fixture
def first(tmp_path: Path) -> Path:
    folder = tmp_path / "split"
    folder.mkdir()
    return tiny_gguf.dense(folder / "Big Model.gguf", tensors_per_part=7)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return tiny_gguf.dense(tmp_path / "whole.gguf")


@pytest.fixture(params=["llamacpp", "hf"])
def reused(request: pytest.FixtureRequest, tmp_path: Path) -> Reused:
    """How many tokens of the same prompt were found when a model is opened, asked and closed."""

    async def answered(model: Path | str) -> int:
        settings = {"model": str(model), "data_dir": tmp_path / "data", "engine": request.param, "threads": 1}
        backend = open_backend(Config(**settings))
        try:
            [*_, last] = [event async for event in backend.generate(ASKED)]
            assert isinstance(last, Completed)
            return last.usage.cached_tokens
        finally:
            await backend.close()

    return lambda model: asyncio.run(answered(model))


def _llama_logits(path: Path) -> np.ndarray:
    settings = LlamaSettings(context=256, cells=256, sequences=1, batch=64, threads=1)
    engine = LlamaEngine(LlamaModel(path), settings, "digest")
    try:
        return evaluate(engine, 0, 0, 40)
    finally:
        engine.close()


def _hf_logits(path: Path) -> np.ndarray:
    import torch

    from emberkeep.engine.hf.model_loader import HfSource, load_model

    source = HfSource(path.parent, path.name, rest=part_files(path)[1:])
    model = load_model(source, device="cpu", dtype="float32", attention="eager")
    with torch.no_grad():
        return model.network(torch.from_numpy(TOKENS[:40].astype(np.int64))[None]).logits[0, -1].numpy()


@pytest.mark.parametrize("logits", [_llama_logits, _hf_logits])
def test_a_split_model_computes_what_the_whole_file_does(
    first: Path, whole: Path, logits: Callable[[Path], np.ndarray]
) -> None:
    assert len(part_files(first)) == 3
    assert np.array_equal(logits(first), logits(whole))


def test_what_was_stored_is_found_after_a_restart_however_the_model_is_named(
    first: Path, reused: Reused, tmp_path: Path
) -> None:
    assert reused(first) == 0
    found = reused(first)
    assert found > 16
    assert [reused(path) for path in (part_files(first)[1], first.parent)] == [found, found]
    pull(str(first), ModelLibrary(tmp_path / "data" / "models"), name="big")
    assert reused("big") == found
    shutil.move(first.parent, tmp_path / "elsewhere")
    assert reused(tmp_path / "elsewhere") == found


def test_state_is_never_shared_with_another_model(
    first: Path, whole: Path, reused: Reused, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = tiny_gguf.dense(tmp_path / "other" / "Big Model.gguf", seed=1, tensors_per_part=7)
    assert reused(first) == 0
    assert [reused(path) for path in (whole, other)] == [0, 0]
    mine = part_files(first)[1].read_bytes()
    # The same path, the same headers, other weights.
    shutil.copy(part_files(other)[1], part_files(first)[1])
    assert reused(first) == 0
    part_files(first)[1].write_bytes(mine)
    assert reused(first) > 16


def test_an_incomplete_model_is_refused_in_one_sentence(first: Path, reused: Reused) -> None:
    part_files(first)[2].unlink()
    with pytest.raises(ModelBroken, match=r"Big Model in .* lacks part 3 of 3: put all parts into one folder"):
        reused(first)
