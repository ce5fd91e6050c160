"""Counting experts from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.config.settings import Config
from emberkeep.errors import RequestError
from emberkeep.library.emberkeep import Emberkeep
from helpers import tiny_gguf


def opened(model: Path, folder: Path) -> Emberkeep:
    return Emberkeep.open(Config(model=str(model), data_dir=folder))


def test_what_is_evaluated_while_tracking_is_on_is_counted(tmp_path: Path) -> None:
    with opened(tiny_gguf.moe(tmp_path / "moe.gguf"), tmp_path) as llm:
        assert llm.track_experts(True).enabled
        evaluated = llm.warm("a prefix of some length").tokens
        (layer,) = llm.expert_stats().layers
        assert (layer.tokens, sum(layer.counts)) == (evaluated, evaluated * tiny_gguf.EXPERTS_USED)
        assert llm.track_experts(reset=True).layers == ()
        assert not llm.track_experts(False).enabled


def test_a_model_without_experts_says_so(tmp_path: Path) -> None:
    with opened(tiny_gguf.dense(tmp_path / "dense.gguf"), tmp_path) as llm:
        for ask in (llm.expert_stats, llm.track_experts):
            with pytest.raises(RequestError, match="not a mixture"):
                ask()
