"""Weights that begin to be loaded before anybody asks for them are those of the file, or they are not used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from emberkeep.engine.base import Rows
from emberkeep.engine.llamacpp import LlamaEngine, LlamaModel, LlamaSettings
from emberkeep.engine.llamacpp import early_load as module
from emberkeep.engine.llamacpp.early_load import EarlyLoad, begin, begun
from emberkeep.file_digests import FileVersion
from helpers import tiny_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_gguf.dense(tmp_path / "mine.gguf")


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    module.wait()
    module._begun.clear()


def begin_with(path: Path) -> EarlyLoad:
    begin(path, [FileVersion.of(path)])
    early = begun(path)
    assert early is not None
    return early


def scores(model: LlamaModel) -> bytes:
    engine = LlamaEngine(model, LlamaSettings(256, 256, sequences=2, batch=64, threads=1), "digest")
    engine.evaluate([Rows(0, 0, np.arange(20, dtype=np.int32), outputs=1)])
    told = engine.logits(0).tobytes()
    engine.close()
    return told


def test_they_compute_what_weights_compute_that_are_loaded_when_asked_for(path: Path) -> None:
    early = begin_with(path)
    model = LlamaModel(path, early=early)
    assert early._handle is None  # taken
    assert scores(model) == scores(LlamaModel(path))


def test_of_a_file_that_was_replaced_since_the_new_one_is_loaded(path: Path, tmp_path: Path) -> None:
    early = begin_with(path)
    early.wait()
    os.utime(tiny_gguf.dense(tmp_path / "other.gguf", seed=1), ns=(0, path.stat().st_mtime_ns))
    (tmp_path / "other.gguf").replace(path)
    replaced = scores(LlamaModel(path, early=early))
    assert replaced == scores(LlamaModel(path))
    assert replaced != scores(LlamaModel(tiny_gguf.dense(tmp_path / "first.gguf")))


def test_weights_that_cannot_be_loaded_are_loaded_again_and_then_it_is_said(path: Path) -> None:
    early = begin_with(path)
    early.wait()
    broken = EarlyLoad(path.parent / "absent.gguf", [])
    broken.wait()
    assert broken.take(lambda fraction: None) is None
    assert scores(LlamaModel(path, early=broken)) == scores(LlamaModel(path, early=early))


def test_they_are_handed_out_once_and_for_their_file_only(path: Path) -> None:
    begin(path, [FileVersion.of(path)])
    assert begun(path.parent / "other.gguf") is None
    assert begun(path) is not None
    assert begun(path) is None
