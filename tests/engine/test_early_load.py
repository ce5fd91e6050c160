"""Weights that begin to be loaded before anybody asks for them are those of the file, or they are not used."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from emberkeep.engine.base import Rows
from emberkeep.engine.llamacpp import model as module
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import EarlyLoad, LlamaModel, Tell, WeightsLoading, begin, begun
from emberkeep.files import FileVersion
from helpers import tiny_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_gguf.dense(tmp_path / "mine.gguf")


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    module._begun.clear()


def works(tell: Tell) -> tuple[str | None, bool]:
    return "digest", True


def begin_with(path: Path) -> EarlyLoad:
    begin(path, [FileVersion.of(path)], works)
    early = begun(path)
    assert early is not None
    return early


def scores(model: LlamaModel) -> bytes:
    engine = LlamaEngine(model, LlamaSettings(256, 256, sequences=2, batch=64, threads=1), "digest")
    engine.evaluate([Rows(0, 0, np.arange(20, dtype=np.int32), outputs=1)])
    logits = engine.logits(0).tobytes()
    engine.close()
    return logits


def test_they_compute_what_weights_compute_that_are_loaded_when_asked_for(path: Path) -> None:
    early = begin_with(path)
    model = LlamaModel(path, loading=WeightsLoading(early=early))
    assert early._handle is None  # taken
    assert scores(model) == scores(LlamaModel(path))


def test_of_a_file_that_was_replaced_since_the_new_one_is_loaded(path: Path, tmp_path: Path) -> None:
    early = begin_with(path)
    early._thread.join()
    os.utime(tiny_gguf.dense(tmp_path / "other.gguf", seed=1), ns=(0, path.stat().st_mtime_ns))
    (tmp_path / "other.gguf").replace(path)
    replaced = scores(LlamaModel(path, loading=WeightsLoading(early=early)))
    assert replaced == scores(LlamaModel(path))
    assert replaced != scores(LlamaModel(tiny_gguf.dense(tmp_path / "first.gguf")))


def test_weights_that_cannot_be_loaded_are_loaded_again_and_then_it_is_said(path: Path) -> None:
    early = begin_with(path)
    early._thread.join()
    broken = EarlyLoad(path.parent / "absent.gguf", [], works)
    broken._thread.join()
    assert broken.take(lambda fraction: None) is None
    assert scores(LlamaModel(path, loading=WeightsLoading(early=broken))) == scores(
        LlamaModel(path, loading=WeightsLoading(early=early))
    )


def test_they_are_handed_out_once_and_for_their_file_only(path: Path) -> None:
    begin(path, [FileVersion.of(path)], works)
    assert begun(path.parent / "other.gguf") is None
    assert begun(path) is not None
    assert begun(path) is None


def test_who_waits_is_told_how_far_it_is_also_what_was_told_before(path: Path) -> None:
    half, goes_on, steps = threading.Event(), threading.Event(), queue.Queue[tuple[str, int, int | None]]()

    def prove(tell: Tell) -> tuple[str | None, bool]:
        tell("Checking mine", 1, 2)
        half.set()
        goes_on.wait(30)
        tell("Checking mine", 2, 2)
        return "digest", False

    early = EarlyLoad(path, [FileVersion.of(path)], prove)
    assert half.wait(30)
    waiting = threading.Thread(target=early.proved, args=(lambda *step: steps.put(step),))
    waiting.start()
    assert steps.get(timeout=30) == ("Checking mine", 1, 2)
    goes_on.set()
    assert steps.get(timeout=30) == ("Checking mine", 2, 2)
    waiting.join(30)
    assert early.take(lambda fraction: None) is None  # what does not work is not loaded


def test_the_digest_is_that_of_the_file_that_is_there(path: Path, tmp_path: Path) -> None:
    early = begin_with(path)
    assert early.proved(lambda *step: None) == "digest"
    tiny_gguf.dense(tmp_path / "other.gguf", seed=1).replace(path)
    assert early.proved(lambda *step: None) is None


def test_weights_that_were_replaced_while_others_were_tried_out_are_not_loaded(path: Path, tmp_path: Path) -> None:
    def prove(tell: Tell) -> tuple[str | None, bool]:
        tiny_gguf.dense(tmp_path / "other.gguf", seed=1).replace(path)
        return "digest", True

    early = EarlyLoad(path, [FileVersion.of(path)], prove)
    early._thread.join()
    assert early._handle is None


def test_what_nobody_needs_any_more_is_not_loaded(path: Path) -> None:
    goes_on = threading.Event()
    early = EarlyLoad(path, [FileVersion.of(path)], lambda tell: ("digest", goes_on.wait(30)))
    early.wait()  # not for what is tried
    goes_on.set()
    assert early.take(lambda fraction: None) is None
