from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bits import BitsPlan, before_difference, kl, run
from emberkeep.engine.llamacpp.engine import LlamaEngine
from helpers import tiny_gguf
from helpers.benchmarks import ScriptedWorkspace

pytestmark = pytest.mark.slow


def test_only_what_comes_before_the_first_difference_is_the_same_text() -> None:
    assert before_difference([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert before_difference([1, 2], [1, 2]) == 2
    assert before_difference([], [1]) == 0


def test_equal_distributions_do_not_diverge_and_others_do() -> None:
    logits = np.array([1.0, 2.0, 500.0], np.float32)
    assert kl(logits, logits) == kl(logits, logits + 7) == 0
    assert kl(np.log(np.float32([0.5, 0.5])), np.log(np.float32([0.25, 0.75]))) == pytest.approx(0.1438, abs=1e-3)


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, dict]:
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    workspace = ScriptedWorkspace(tmp_path, model=str(model))
    result = asyncio.run(run(workspace, BitsPlan(prompts=2, chunks=2, answer=6))).json()
    (table,) = result["tables"]
    return {row["label"]: {key: v["median"] for key, v in row.items() if key != "label"} for row in table["rows"]}


def test_sixteen_bits_are_the_reference_and_fewer_are_smaller_and_further_away(rows: dict[str, dict]) -> None:
    assert list(rows) == ["16 bits", "8 bits", "4 bits"]
    exact, eight, four = rows.values()
    assert exact["same next token"] == exact["same text"] == exact["of 16 bits"] == 100
    assert exact["mean KL"] == pytest.approx(0, abs=1e-6)
    assert 0 < eight["mean KL"] < four["mean KL"]
    assert four["bytes per token"] < eight["bytes per token"] < 0.65 * exact["bytes per token"]
    assert all(row["out, per 1,000 tokens"] > 0 < row["in, per 1,000 tokens"] for row in rows.values())


def test_what_is_continued_was_loaded_and_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[int, int]] = []
    real = LlamaEngine.import_kv

    def counted(self: LlamaEngine, sequence: int, start: int, end: int, *rest: object) -> object:
        loaded.append((start, end))
        return real(self, sequence, start, end, *rest)

    monkeypatch.setattr(LlamaEngine, "import_kv", counted)
    workspace = ScriptedWorkspace(tmp_path, model=str(tiny_gguf.dense(tmp_path / "tiny.gguf")))
    asyncio.run(run(workspace, BitsPlan(prompts=1, chunks=2, answer=4)))
    assert loaded == [(0, 256)] * 6  # both chunks at once, twice per number of bits
