"""What runs and what ran lately, in which slot, how long each phase took, and where its state came from."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.sched import slots
from emberkeep.sched.sequence_state import Reuse
from emberkeep.types.events import LookupRecord, Source
from emberkeep.types.models import RequestState, TimelineRecord
from helpers.scheduling import PATIENCE, PROMPT, Gate, Recorder, Rig, text


def only(rig: Rig) -> TimelineRecord:
    (record,) = rig.scheduler.timeline()
    return record


def test_its_phases_follow_each_other(rig):
    rig.run(PROMPT)
    first = only(rig)
    assert first.loaded_at is None
    assert first.asked_at <= first.started_at <= first.first_token_at <= first.ended_at
    rig.scheduler.forget({""}).result(PATIENCE)  # it comes from RAM then
    rig.run([*PROMPT, *text(50, seed=9)])
    later = only(rig)
    assert (first.number, later.number) == (1, 2)
    assert first.state is later.state is RequestState.FINISHED
    assert later.asked_at <= later.started_at <= later.loaded_at <= later.first_token_at <= later.ended_at
    assert later.lookup.warm_tokens == 700
    assert later.computed_tokens == 750 and later.sampled_tokens > 0 and later.slot >= 0


def test_one_that_runs_is_told_as_far_as_it_has_come(rig, engine):
    gate = Gate(engine, holds=lambda step: step == 2)
    waiting = rig.start(PROMPT)
    gate.reached()
    record = only(rig)
    assert record.state is RequestState.PREFILL
    assert 0 < record.computed_tokens < 700
    assert record.first_token_at is None and record.ended_at is None
    gate.open()
    waiting.wait()
    rig.settle()
    assert only(rig).state is RequestState.FINISHED


@pytest.mark.parametrize("held", [0, 2])
def test_one_that_was_cancelled_is_told_too(rig, engine, held):
    rig.cancel_at(Gate(engine, holds=lambda step: step == held), PROMPT)
    record = only(rig)
    assert record.state is RequestState.CANCELLED
    assert record.ended_at is not None


def test_of_a_user_who_was_forgotten_nothing_is_told(rig):
    rig.run(PROMPT)
    rig.scheduler.forget({""}).result(PATIENCE)
    assert rig.scheduler.timeline() == []


def test_a_user_who_is_forgotten_meanwhile_leaves_no_name(rig, engine):
    gate = Gate(engine, holds=lambda step: step == 2)
    recorder = Recorder()
    sequence = rig.sequence(PROMPT, recorder)
    sequence.request = replace(sequence.request, user="alice", conversation_id="private")
    rig.scheduler.submit(sequence)
    gate.reached()
    forgetting = rig.scheduler.forget({""})
    gate.open()
    forgetting.result(PATIENCE)
    recorder.wait()
    rig.settle()
    record = only(rig)
    assert record.state is RequestState.FINISHED
    assert (record.user, record.conversation_id) == ("", None)


def test_one_that_is_cancelled_twice_is_told_once(rig, engine):
    gate = Gate(engine)
    rig.start(PROMPT)
    gate.reached()
    waiting = [rig.sequence(text(8, seed=seed), Recorder()) for seed in range(8)]
    for sequence in waiting:
        rig.scheduler.submit(sequence)
    for sequence in waiting * 2:
        rig.scheduler.cancel(sequence)
    gate.open()
    rig.settle()
    numbers = [record.number for record in rig.scheduler.timeline()]
    assert sorted(numbers) == sorted(set(numbers))


def test_it_remembers_so_many(rig):
    for seed in range(slots.REMEMBERED + 3):
        rig.run(text(8, seed=seed), max_new=1)
    numbers = [record.number for record in rig.scheduler.timeline()]
    assert numbers == list(range(slots.REMEMBERED + 3, 3, -1))


def test_what_was_reused_saved_the_time_of_evaluating_it(tmp_path):
    with Rig(tmp_path) as rig:
        rig.run(PROMPT)
        assert rig.scheduler.counters.saved_s == 0
        rig.scheduler.store.costs.evaluate.value = 100.0
        rig.run(PROMPT)
        assert rig.scheduler.counters.saved_s == pytest.approx(6.99, rel=1e-2)


def sources_of(lookup: LookupRecord) -> list[tuple[str, int]]:
    return [(part.source.value, part.tokens) for part in lookup.sources]


def test_a_new_prompt_is_evaluated_and_the_next_one_is_in_the_engine(rig):
    assert sources_of(rig.run(PROMPT).lookup) == [("evaluated", 700)]
    assert sources_of(rig.run(PROMPT).lookup) == [("hot", 699), ("evaluated", 1)]


def test_what_left_the_engine_comes_from_ram_and_after_a_restart_from_disk(rig, tmp_path):
    rig.run(PROMPT)
    rig.scheduler.forget({""}).result(PATIENCE)
    assert sources_of(rig.run([*PROMPT, *text(50, seed=9)]).lookup) == [("warm", 700), ("evaluated", 50)]
    rig.close()
    with Rig(tmp_path) as again:
        assert sources_of(again.run(PROMPT).lookup) == [("cold", 699), ("evaluated", 1)]


def test_a_part_in_the_engine_and_a_part_in_ram_are_told_apart(rig):
    rig.run(PROMPT)
    rig.scheduler.forget({""}).result(PATIENCE)
    rig.run(PROMPT[:256], max_new=0)
    parts = sources_of(rig.run(PROMPT).lookup)
    assert sum(tokens for _, tokens in parts) == 700
    assert [source for source, _ in parts] == ["hot", "warm", "evaluated"]


SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from(list(Source)[:4])), max_size=8)


@given(SPANS, st.integers(0, 80), st.integers(0, 80), st.integers(0, 10))
def test_every_token_of_a_prompt_has_one_source(spans, length, only, moved):
    reuse, at = Reuse(), 0
    for gap, tokens, source in spans:
        reuse.add(at + gap, at + gap + tokens, source)
        at += gap + tokens
    for each in (reuse, _only(reuse, only, moved)):
        parts = each.sources(length)
        assert sum(part.tokens for part in parts) == length
        assert all(part.tokens > 0 for part in parts)
        assert all(a.source is not b.source for a, b in pairwise(parts))
        positions = [part.source for part in parts for _ in range(part.tokens)]
        expected = [Source.EVALUATED] * length
        for start, end, source in each.spans:
            expected[start:end] = [source] * (min(end, length) - start) if start < length else []
        assert positions == expected[:length]


def _only(reuse: Reuse, length: int, moved: int) -> Reuse:
    shorter = Reuse(list(reuse.spans))
    shorter.only(length, moved)
    assert shorter.moved >= moved
    return shorter
