"""How an answer ends, what stays of it, and what is told on the way."""

from __future__ import annotations

import pytest

from emberkeep.sched.sequence_state import EndReason
from helpers.scheduling import (
    CLOSING,
    LONG,
    PROMPT,
    SLICE,
    Recorder,
    reference,
    text,
)


def test_a_sequence_ends_after_max_new_tokens(rig):
    recorder = rig.run(PROMPT, max_new=3)
    assert recorder.answer == reference(PROMPT, max_new=3)
    assert recorder.ending.reason is EndReason.LENGTH
    assert recorder.ending.sampled_tokens == 3
    assert recorder.ending.prompt_tokens == 700


def test_a_sequence_ends_where_the_model_ends_its_turn(rig):
    prompt = next(p for p in (text(50, seed=s) for s in range(100)) if len(reference(p, max_new=100)) < 100)
    recorder = rig.run(prompt, max_new=100)
    assert recorder.answer == reference(prompt, max_new=100)
    assert recorder.ending.reason is EndReason.END_OF_TURN


def test_zero_tokens_evaluates_the_prompt_and_nothing_else(rig, engine):
    recorder = rig.run(PROMPT, max_new=0)
    assert recorder.answer == []
    assert recorder.ending.reason is EndReason.LENGTH
    assert engine.evaluated_tokens == len(PROMPT)


def test_a_prompt_of_one_token_is_answered(rig):
    assert rig.run([70]).answer == reference([70])


@pytest.mark.parametrize("kept", [0, 1, 4, 6, 7])
def test_a_stop_string_is_trimmed_off_the_state(rig, engine, kept):
    stop = Recorder(lambda tokens: kept if len(tokens) == 7 else None)
    rig.run(PROMPT, stop)
    assert stop.ending.reason is EndReason.STOPPED
    assert stop.ending.sampled_tokens == kept
    assert engine.evaluated_tokens == len(PROMPT) + max(6, kept)
    follow_up = [*PROMPT, *reference(PROMPT)[:kept], *text(30, seed=8)]
    answer = rig.run(follow_up)
    assert answer.lookup.reused_tokens >= len(PROMPT) + kept
    assert answer.answer == reference(follow_up)


@pytest.mark.parametrize("kept", [0, 3, 127])
def test_a_stop_string_over_a_chunk_border_is_trimmed_off_the_state(rig, kept):
    """The full chunk was stored with tokens that are then taken back."""
    prompt = text(125)
    stop = Recorder(lambda tokens: min(kept, 8) if len(tokens) == 9 else None)
    rig.run(prompt, stop)
    follow_up = [*prompt, *stop.tokens[: min(kept, 8)], *text(200, seed=8)]
    assert rig.run(follow_up).answer == reference(follow_up)


def test_the_end_of_the_turn_is_in_the_state(rig, engine):
    answer = rig.run(PROMPT)
    before = engine.evaluated_tokens
    follow_up = [*PROMPT, *answer.tokens, *CLOSING, 65]
    assert rig.run(follow_up, max_new=0).lookup.reused_tokens == len(follow_up) - 1
    assert engine.evaluated_tokens == before + 1


def test_progress_is_reported_and_includes_what_was_reused(rig):
    recorder = rig.run(LONG, want_progress=True)
    assert [report.processed for report in recorder.reports] == [*range(0, 1900, SLICE), 1896, 1999, 2000]
    assert {report.total for report in recorder.reports} == {2000}
    rig.run(LONG[:1500])
    again = rig.run([*LONG[:1500], *text(300, seed=2)], want_progress=True)
    assert again.reports[0].cached == again.reports[0].processed == 1500
    assert again.reports[1].processed > 1500


def test_quiet_sequences_get_no_progress(rig):
    assert rig.run(LONG).reports == []
