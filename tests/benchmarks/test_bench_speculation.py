"""`bench speculation`: what the figures are made of, with scripted servers on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import speculation
from benchmarks.speculation import (
    Sample,
    SpeculationPlan,
    best_modes,
    burst_rows,
    draft_rows,
    gap_at_difference,
    same_positions,
    same_prefix,
    speed_rows,
)
from benchmarks.tasks import KINDS
from emberkeep.bench.report import BenchResult, Row
from emberkeep.bench.servers import PeerServer
from emberkeep.bench.workspace import Words, Workspace
from emberkeep.errors import EmberkeepError
from emberkeep.types.request import Json
from helpers import scripted_llama_server
from helpers.benchmarks import ScriptedWorkspace, reply

pytestmark = pytest.mark.slow


def sample(step_ms: float, *, wall_ms: float = 100.0, drafted: int = 0, accepted: int = 0) -> Sample:
    said = reply(completion=11, predicted_ms=10 * step_ms, draft_n=drafted, draft_n_accepted=accepted)
    return Sample(said, wall_ms, (1, 2, 3, 4))


COLUMNS = {
    "plain": [sample(10.0)],
    "drafts": [sample(4.0, wall_ms=50.0, drafted=12, accepted=6)],
    "asked again": [sample(2.0, drafted=10, accepted=10)],
}


def samples(row: Row, column: str) -> tuple[float, ...]:
    return row.values[column].samples  # type: ignore[union-attr]


# ── figures ──


def test_speed_is_that_of_decoding_by_the_servers_clock_and_by_ours() -> None:
    (row,) = speed_rows({"agent": COLUMNS})
    assert (samples(row, "plain"), samples(row, "drafts")) == ((100.0,), (250.0,))
    assert (samples(row, "drafts / plain"), samples(row, "again / plain")) == ((2.5,), (5.0,))
    assert samples(row, "by the wall clock") == (2.0,)


def test_drafts_are_counted_with_what_was_accepted_of_them() -> None:
    (row,) = draft_rows({"agent": COLUMNS})
    assert (row.values["drafted"], row.values["accepted"]) == (12, "6 (50%)")
    assert (samples(row, "per step"), samples(row, "per step, again")) == ((2.2,), (11.0,))


def test_drafts_are_read_in_the_words_of_either_server() -> None:
    openai = {"completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}}
    said = replace(reply(), usage=reply().usage | openai)
    for told, expected in ((reply(), (0, 0)), (said, (4, 3)), (reply(draft_n=4, draft_n_accepted=3), (4, 3))):
        one = Sample(told, 1.0, ())
        assert (one.drafted, one.accepted) == expected


def test_tokens_are_compared_up_to_a_difference_and_by_position() -> None:
    assert same_prefix([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert same_positions([1, 2, 3, 4], [1, 2, 9, 4]) == 0.75
    assert same_prefix([1, 2, 3, 4], [1, 2]) == same_positions([1, 2, 3, 4], [1, 2]) == 0.5
    assert same_prefix([], [1]) == 1.0


TEXT_LOGPROBS = {"tokens": ["One", " two"], "top_logprobs": [{"One": -0.1, "A": -3.0}, {" 2": -1.5, " two": -1.0}]}
CHAT_LOGPROBS = {
    "content": [
        {"token": token, "top_logprobs": [{"logprob": value} for value in top.values()]}
        for token, top in zip(TEXT_LOGPROBS["tokens"], TEXT_LOGPROBS["top_logprobs"], strict=True)
    ]
}


@pytest.mark.parametrize("logprobs", [TEXT_LOGPROBS, CHAT_LOGPROBS])
def test_where_an_answer_differs_it_is_told_how_close_the_call_was(logprobs: dict[str, Json]) -> None:
    assert gap_at_difference(logprobs, "One 2") == 0.5
    assert gap_at_difference(logprobs, "A") == pytest.approx(2.9)
    assert gap_at_difference(logprobs, "One two") is None


def test_the_best_mode_is_chosen_for_every_kind_and_for_all_of_them() -> None:
    slow, fair, quick = sample(10.0), sample(5.0), sample(1.0)
    trials = {"x": {"a": quick, "b": slow}, "y": {"a": slow, "b": fair}, "z": {"a": fair, "b": slow}}
    assert best_modes(trials) == {"a": "x", "b": "y", "all": "x"}


def test_clients_are_compared_with_those_of_the_other_server_only_if_there_is_one() -> None:
    own = {"plain": [50.0], "drafts": [60.0]}
    (alone,) = burst_rows(own, {})
    (beside,) = burst_rows({**own, "llama-server": [40.0]}, {"all": "none"})
    assert "llama-server" not in alone.values
    assert samples(beside, "drafts / llama-server") == (1.5,)


# ── whole runs; ours is a scripted server that always drafts ──


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[SpeculationPlan], BenchResult]:
    program = scripted_llama_server.install(tmp_path)

    def own_server(workspace: Workspace, *, parallel: int, ctx: int) -> PeerServer:
        return PeerServer(workspace, program, parallel=parallel, ctx=ctx, more=("--spec-type", "ours"))

    monkeypatch.setattr(speculation, "OwnServer", own_server)
    workspace = ScriptedWorkspace(tmp_path, Words({"a": 1}))
    return lambda plan: asyncio.run(speculation.run(workspace, plan))


PLAN = SpeculationPlan(answer_tokens=8, clients=2, repeat=2)


def test_plain_answers_are_asked_for_without_drafts(measured: Callable[[SpeculationPlan], BenchResult]) -> None:
    speeds, drafts, clients = measured(PLAN).tables
    assert [row.label for row in speeds.rows] == list(KINDS)
    assert all(samples(row, "drafts / plain") == (2.0, 2.0) for row in speeds.rows)
    assert all(row.values["accepted"] == "8 (25%)" for row in drafts.rows)
    assert all(samples(row, "same, by position") == (100.0, 100.0) for row in drafts.rows)
    assert len(samples(clients.rows[0], "drafts / plain")) == 2


def test_the_best_mode_of_the_other_server_is_measured_beside_ours(
    measured: Callable[[SpeculationPlan], BenchResult], tmp_path: Path
) -> None:
    plan = SpeculationPlan(
        peer=tmp_path / "llama-server",
        answer_tokens=8,
        clients=2,
        repeat=1,
        modes=("none", "ngram-simple", "ngram-cache"),
    )
    result = measured(plan)
    *_, clients, beside, trials = result.tables
    assert [(row.values["its mode"], samples(row, "ratio")) for row in beside.rows] == [
        ("ngram-simple", (1.0,))
    ] * 5
    assert clients.rows[0].values["its mode"] == "ngram-simple"
    assert [row.label for row in trials.rows] == ["none", "ngram-simple"]
    assert "llama-server cannot be started with ngram-cache." in result.notes


def test_a_server_that_knows_no_mode_is_explained(
    measured: Callable[[SpeculationPlan], BenchResult], tmp_path: Path
) -> None:
    with pytest.raises(EmberkeepError, match="did not start: error: unknown speculative type ngram-cache"):
        measured(SpeculationPlan(peer=tmp_path / "llama-server", modes=("ngram-cache",)))


def test_recorded_conversations_are_one_more_kind(
    measured: Callable[[SpeculationPlan], BenchResult], tmp_path: Path
) -> None:
    (tmp_path / "talk.json").write_text('{"messages": [{"role": "assistant", "content": "Hello"}]}')
    speeds, *_ = measured(SpeculationPlan(data=tmp_path, answer_tokens=8, clients=2, repeat=1)).tables
    assert [row.label for row in speeds.rows] == [*KINDS, "recorded"]
