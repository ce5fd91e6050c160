"""Snapshots: state that cannot be divided by token is stored where it will be needed, and restored as a whole."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import StepFailed
from emberkeep.types.events import MissReason
from helpers.chance import examples
from helpers.kv_building import check_ledger, chunk_files, chunks_of
from helpers.scheduling import CLOSING, PROMPT, Recorder, Rig, reference, text

UNITS = [KvUnit.SNAPSHOT, KvUnit.BOTH]


def engine(unit: KvUnit) -> FakeEngine:
    return FakeEngine(cells=1 << 15, kv_unit=unit)


def fresh(unit: KvUnit, tokens, **more) -> list[int]:
    """What an engine that has never seen anything answers."""
    return reference(tokens, engine=engine(unit), **more)


@pytest.fixture(params=UNITS)
def unit(request) -> KvUnit:
    return request.param


@pytest.fixture
def rig(tmp_path: Path, unit: KvUnit):
    with Rig(tmp_path, engine(unit)) as rig:
        yield rig
        check_ledger(rig.store)


def test_the_next_turn_goes_on_where_the_last_one_ended(rig, unit):
    first = rig.run(PROMPT)
    history = [*PROMPT, *first.answer, *CLOSING]
    rig.run(text(50, seed=9))  # another prompt takes the engine
    turn = [*history, *text(40, seed=1)]
    second = rig.run(turn)
    assert second.lookup.reused_tokens == len(history)
    assert second.answer == fresh(unit, turn)


def test_a_conversation_survives_a_restart(tmp_path, unit):
    with Rig(tmp_path, engine(unit)) as rig:
        first = rig.run(PROMPT)
    history = [*PROMPT, *first.answer, *CLOSING]
    turn = [*history, *text(40, seed=1)]
    with Rig(tmp_path, engine(unit)) as rig:
        second = rig.run(turn)
        assert second.lookup.cold_tokens == len(history)
        assert second.answer == fresh(unit, turn)


def test_a_branch_restores_the_nearest_border_before_it(rig, unit):
    borders = frozenset({200, 450})
    rig.run(PROMPT, borders=borders)
    branch = [*PROMPT[:500], *text(100, seed=3)]
    rig.run(text(50, seed=9))
    found = rig.run(branch)
    assert found.lookup.reused_tokens == 450
    assert found.answer == fresh(unit, branch)
    earlier = [*PROMPT[:300], *text(80, seed=4)]
    assert rig.run(earlier).lookup.reused_tokens == 200
    assert rig.run([*PROMPT[:100], *text(80, seed=5)]).lookup.reused_tokens == 0


def test_a_repeated_prompt_is_resumed_at_its_last_border_and_says_why_not_later(rig, unit):
    rig.run(PROMPT, borders=frozenset({690}), closing=())
    rig.run(text(50, seed=9))
    again = rig.run(PROMPT, borders=frozenset({690}), closing=())
    assert again.lookup.reused_tokens == 690
    assert again.lookup.reason is MissReason.NO_SNAPSHOT
    assert again.answer == fresh(unit, PROMPT)


def test_a_lost_snapshot_costs_an_evaluation_and_no_answer(tmp_path, unit):
    with Rig(tmp_path, engine(unit)) as rig:
        first = rig.run(PROMPT)
        rig.store.flush()
        (snapshot,) = [c for c in chunks_of(rig.store) if c.is_snapshot]
        name = snapshot.key.hex()
    (path,) = [file for file in chunk_files(tmp_path) if file.stem == name]
    path.write_bytes(path.read_bytes()[:-3])
    turn = [*PROMPT, *first.answer, *CLOSING, *text(40, seed=1)]
    with Rig(tmp_path, engine(unit)) as rig:
        found = rig.run(turn)
        assert found.lookup.reused_tokens == 0
        assert found.lookup.reason is MissReason.CORRUPT
        assert found.answer == fresh(unit, turn)


def test_sequences_side_by_side_do_not_mix_their_state(rig, unit):
    prompts = [[*PROMPT[:400], *text(90, seed=seed)] for seed in range(4)]
    rig.run(PROMPT, borders=frozenset({400}))
    started = [rig.start(prompt) for prompt in prompts]
    for prompt, recorder in zip(prompts, started, strict=True):
        assert recorder.answer == fresh(unit, prompt)
        assert recorder.lookup.reused_tokens == 400


def test_a_stop_string_gives_the_state_up_and_nothing_wrong_is_kept(rig, unit):
    stopped = rig.run(PROMPT, Recorder(stop_at=lambda tokens: 2 if len(tokens) == 5 else None))
    turn = [*PROMPT, *stopped.answer[:2], *CLOSING, *text(30, seed=2)]
    assert rig.run(turn).answer == fresh(unit, turn)


@examples(15)
@given(
    unit=st.sampled_from(UNITS),
    turns=st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 150), st.integers(0, 3), st.sets(st.integers(1, 500))),
        min_size=2,
        max_size=6,
    ),
    warm=st.sampled_from([1 << 30, 6000]),
)
def test_any_history_of_branches_gives_the_answers_of_a_fresh_engine(tmp_path_factory, unit, turns, warm):
    """Each turn keeps some of the longest text so far and goes on with its own."""
    folder = tmp_path_factory.mktemp("snapshots")
    text_so_far: list[int] = []
    with Rig(folder, engine(unit), warm=warm) as rig:
        for kept, length, seed, borders in turns:
            prompt = [*text_so_far[:kept], *text(length, seed=seed)]
            found = rig.run(prompt, max_new=4, borders=frozenset(borders))
            assert found.answer == fresh(unit, prompt, max_new=4)
            text_so_far = [*prompt, *found.answer, *CLOSING]
        check_ledger(rig.store)


# ── prompts that come together ──


def test_one_that_cannot_be_looked_up_takes_no_other_along(rig, monkeypatch):
    cache, gate = rig.scheduler._parts.cache, Event()
    look_up, fails = cache.worth_waiting_for, iter([True])

    def once(sequence):
        if len(sequence.prompt.tokens) == 333 and rig.scheduler._slots.active and next(fails, False):
            raise MemoryError("once")
        return look_up(sequence)

    monkeypatch.setattr(cache, "worth_waiting_for", once)
    rig.scheduler.call(gate.wait)
    first, refused, last = (rig.start(text(length, seed=length)) for length in (300, 333, 350))
    gate.set()
    assert first.answer
    assert last.answer
    refused.wait()
    assert isinstance(refused.error, StepFailed)


def test_prompts_that_part_one_by_one_do_not_cut_each_other_to_pieces(tmp_path, unit):
    with Rig(tmp_path, engine(unit), parallel=1) as rig:
        beginning = text(3000)
        sequence = rig.sequence(beginning, Recorder())
        for position in range(2900, 2500, -1):
            sequence.end_slice_at(position, earliest=128)
        added = sorted(border for border in sequence.prompt.borders if 2500 < border <= 2900)
        assert added
        assert len(added) <= 1 + 400 // 128
        assert min(added) == 2501
