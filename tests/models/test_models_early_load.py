"""A start loads early only what an earlier start has shown to work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.config import Config
from emberkeep.engine.llamacpp import early_load
from emberkeep.errors import EmberkeepError
from emberkeep.models.digest import model_digest
from emberkeep.models.early_load import loaded_early
from emberkeep.models.library import ModelLibrary
from helpers import tiny_gguf


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tiny_gguf.dense(tmp_path / "mine.gguf")
    model_digest(path, ModelLibrary(tmp_path / "models").digests)
    return Config(data_dir=tmp_path, model=str(path))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Of which files a load was begun, where everything is known to work."""
    paths: list[Path] = []
    monkeypatch.setattr("emberkeep.engine.llamacpp.choose_known_library", lambda choice, digest: True)
    monkeypatch.setattr(early_load, "begin", lambda path, versions: not paths.append(path))
    return paths


def test_a_model_that_was_seen_to_work_is_begun(config: Config, begun: list[Path]) -> None:
    with loaded_early(config):
        assert begun == [Path(config.model or "")]


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "hf"},
        {"mlock": True},
        {"draft_model": "other"},
        {"backend": "openai"},
        {"model": "absent"},
        {"model": "./absent.gguf"},
    ],
)
def test_another_one_is_not(config: Config, begun: list[Path], change: dict[str, object]) -> None:
    with loaded_early(replace(config, **change)):
        assert begun == []


def test_neither_is_one_whose_digest_is_not_known(config: Config, begun: list[Path], tmp_path: Path) -> None:
    tiny_gguf.dense(tmp_path / "mine.gguf", seed=1)
    with loaded_early(config):
        assert begun == []


def test_nor_one_that_no_start_has_tried_with_this_library(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf.dense(tmp_path / "mine.gguf", seed=4711)  # of no other test
    model_digest(path, ModelLibrary(tmp_path / "models").digests)
    monkeypatch.setattr(early_load, "begin", lambda *_: pytest.fail("it was begun"))
    with loaded_early(config):
        pass


def test_a_start_that_fails_waits_for_it(
    config: Config, begun: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []
    monkeypatch.setattr(early_load, "wait", lambda: waited.append(True))
    with pytest.raises(EmberkeepError), loaded_early(config):
        raise EmberkeepError("injected")
    assert waited == [True]
