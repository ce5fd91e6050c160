from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import BUCKETS, DISK, HOT, RAM, ROUNDING, AccuracyPlan, Answer, Examination, report
from benchmarks.question_files import own_questions
from emberkeep.bench.report import Series
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.library.results import Collector, Result, ResultChoice, VerifyReport
from emberkeep.types.events import LookupRecord, TokenLogprob, Usage
from helpers import tiny_gguf
from helpers.benchmarks import ScriptedWorkspace, measure

pytestmark = pytest.mark.slow


def result(tokens: Sequence[int], *, moved: float = 0.0, reused: int = 0, text: str = "") -> Result:
    """With two candidates at each place, of which the other one's logprob is moved."""
    likely = [
        TokenLogprob(
            token,
            b"",
            math.log(0.6),
            (
                TokenLogprob(token, b"", math.log(0.6)),
                TokenLogprob(1 - token, b"", math.log(0.4) + moved),
                TokenLogprob(9, b"", -20.0 + 100 * moved),
            ),
        )
        for token in tokens
    ]
    return replace(
        Collector().result(),
        choices=(ResultChoice(text or " ".join(map(str, tokens)), tokens=tuple(tokens), logprobs=tuple(likely)),),
        usage=Usage(prompt_tokens=101, cached_tokens=reused, completion_tokens=len(tokens)),
        lookup=LookupRecord(prompt_tokens=101, hot_tokens=reused),
    )


def likely(told: Result, logprobs: list[TokenLogprob]) -> Result:
    return replace(told, choices=(replace(told.choices[0], logprobs=tuple(logprobs)),))


def answer(way: str, cached: Result, fresh: Result, number: int = 0, answers: tuple[str, ...] = ()) -> Answer:
    return Answer(number, way, VerifyReport(cached, fresh), answers)


COLD = result([0, 1, 0])


@pytest.mark.parametrize(
    ("reused", "bucket"),
    [(0, "0 %"), (1, "0–25 %"), (26, "25–50 %"), (75, "50–75 %"), (99, "75–99 %"), (100, "100 %")],
)
def test_a_prompt_is_reused_as_a_whole_when_its_last_token_is_left(reused: int, bucket: str) -> None:
    assert answer(HOT, result([0, 1, 0], reused=reused), COLD).bucket == bucket


def test_likely_tokens_are_compared_as_far_as_both_answers_agree() -> None:
    assert answer(HOT, result([0, 1, 0], moved=0.25), COLD).largest == pytest.approx(0.25)
    other = answer(HOT, result([0, 0, 0]), COLD)
    assert other.compared.first_difference == 1
    # Up to where they differ: there the two have changed places.
    assert other.largest == pytest.approx(math.log(0.6) - math.log(0.4))
    assert other.margin == pytest.approx(math.log(0.6) - math.log(0.4))


def test_a_likely_token_that_is_not_even_a_candidate_counts() -> None:
    gone = [replace(one, top=one.top[:1]) for one in COLD.logprobs]
    assert answer(HOT, COLD, likely(COLD, gone)).largest == 0
    wrong = [replace(one, top=(TokenLogprob(5, b"", -0.1), TokenLogprob(6, b"", -6.0))) for one in COLD.logprobs]
    assert answer(HOT, likely(COLD, wrong), COLD).largest == pytest.approx(math.log(0.6) + 6)


def test_what_differs_more_than_two_cold_evaluations_is_counted() -> None:
    rounding = answer(ROUNDING, result([0, 1, 0], moved=0.1), COLD)
    fine = answer(RAM, result([0, 1, 0], moved=0.15, reused=50), COLD)
    wrong = answer(DISK, result([0, 1, 0], moved=0.9, reused=50), COLD)
    assert any(
        note.startswith("No difference beyond rounding in 1 answers") for note in report([rounding, fine]).notes
    )
    found = report([rounding, fine, wrong])
    assert any(note.startswith("1 of 2 answers from stored state differ") for note in found.notes)
    by_way = {row.label: row.values["beyond rounding"] for row in found.tables[1].rows}
    assert by_way == {RAM: 0, DISK: 1, ROUNDING: 0}


def test_small_differences_have_a_small_unit() -> None:
    rounding = answer(ROUNDING, result([0, 1, 0], moved=2e-5), COLD)
    (row,) = report([rounding, answer(RAM, result([0, 1, 0], moved=1e-5), COLD)]).tables[1].rows[:1]
    difference = row.values["largest Δ logprob"]
    assert isinstance(difference, Series) and difference.unit == "µnats"
    assert difference.median == pytest.approx(10)


def test_answers_that_differ_are_shown_and_those_that_are_right_counted() -> None:
    rounding = answer(ROUNDING, result([0, 1, 0], text="blue"), result([0, 1, 0], text="blue"), 0, ("blue",))
    other = answer(RAM, result([0, 0], text="red", reused=100), result([0, 1, 0], text="blue"), 0, ("blue",))
    found = report([rounding, other])
    (row,) = (row for row in found.tables[1].rows if row.label == RAM)
    assert (row.values["right, cold"], row.values["right, here"], row.values["same"]) == (
        "100.0 %",
        "0.0 %",
        "0 %",
    )
    assert found.tables[3].rows[0].label == "question 1, RAM"
    assert found.tables[3].rows[0].values["first difference"] == "token 2"


def check(result: dict[str, Any]) -> None:
    """Every bucket and every tier was there, and nothing differs but for rounding."""
    assert [row["label"] for row in result["tables"][0]["rows"]] == [*(name for _, name in BUCKETS), ROUNDING]
    tiers = {row["label"]: row for row in result["tables"][1]["rows"]}
    assert list(tiers) == ["turns, hot", HOT, RAM, DISK, "turns, disk", ROUNDING]
    assert all(row["beyond rounding"] == 0 for row in tiers.values())
    assert any(note.startswith("No difference beyond rounding in 30 answers") for note in result["notes"])
    assert result["tables"][2]["rows"][-1]["turns, disk"] == 6


def test_llamacpp_answers_from_stored_state_as_from_a_fresh_evaluation(tmp_path: Path) -> None:
    check(
        measure(
            tmp_path,
            "accuracy",
            "--quick",
            "--model",
            str(tiny_gguf.dense(tmp_path / "tiny.gguf")),
            "--questions",
            short(tmp_path),
        )
    )


def test_transformers_answer_from_stored_state_as_from_a_fresh_evaluation(tmp_path: Path) -> None:
    from helpers import tiny_hf

    model = tiny_hf.write(tmp_path / "tiny")
    check(
        measure(
            tmp_path,
            "accuracy",
            "--quick",
            "--model",
            str(model),
            "--engine",
            "hf",
            "--questions",
            short(tmp_path),
        )
    )


def short(tmp_path: Path) -> str:
    """Questions in two conversations for models with a small context."""
    file = tmp_path / "questions.jsonl"
    lines = [{"turns": [f"{who} has a boat. Who has it?", "Since when?", "Why?"]} for who in ("Anouk", "Desta")]
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def test_state_in_fewer_bits_is_told_from_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configured = Examination._config
    monkeypatch.setattr(Examination, "_config", lambda self: coarse(configured(self)))
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    workspace = ScriptedWorkspace(tmp_path, model=str(model))
    plan = AccuracyPlan(prompts=2, answer_tokens=4)
    found = report(asyncio.run(Examination(workspace, plan, own_questions()).answers()))
    assert any("answers from stored state differ from the cold one by more than" in note for note in found.notes)


def coarse(config: Config) -> Config:
    return replace(config, kv_bits=4)


def test_questions_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "questions.json"
    file.write_text(json.dumps([{"question": "Why? " * 2000}]))
    model = tiny_gguf.dense(tmp_path / "tiny.gguf")
    with pytest.raises(EmberkeepError, match=r"^No question fits into "):
        measure(tmp_path, "accuracy", "--model", str(model), "--questions", str(file))
