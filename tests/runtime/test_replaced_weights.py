"""State is stored by the digest of the weights, so these must be the ones that were loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import ModelBroken
from emberkeep.runtime import local_model
from emberkeep.runtime.parts import OpenedModel
from helpers import tiny_gguf


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
