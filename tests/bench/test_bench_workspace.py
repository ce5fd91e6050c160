from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.bench.workspace import Words, open_workspace
from emberkeep.errors import EmberkeepError, ModelError
from helpers import tiny_gguf


def test_a_text_costs_the_tokens_asked_for() -> None:
    costs = {"a": 1, "bb": 2}
    words = Words(costs).text(50, "seed").split(" ")
    assert 50 <= sum(costs[word] for word in words) <= 51


def test_texts_are_equal_for_equal_seeds_only() -> None:
    words = Words(dict.fromkeys("abcdefgh", 1))
    assert words.text(40, 1) == words.text(40, 1) != words.text(40, 2)


def test_a_workspace_leaves_nothing_behind_and_touches_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with open_workspace(tmp_path, print, lambda: tmp_path / "none.gguf") as workspace:
        assert workspace.new_data_dir().is_relative_to(tmp_path)
        assert workspace.new_data_dir() != workspace.new_data_dir()
        with pytest.raises(ModelError):
            _ = workspace.words
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_more_context_than_a_model_was_trained_for_is_refused(tmp_path: Path) -> None:
    with open_workspace(tmp_path, print, lambda: tiny_gguf.dense(tmp_path / "tiny.gguf")) as workspace:
        workspace.require_context(1024)
        with pytest.raises(EmberkeepError, match=r"trained for 1,024: choose smaller sizes or another --model\."):
            workspace.require_context(1025)
