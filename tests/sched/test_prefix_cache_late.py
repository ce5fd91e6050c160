"""Copies that arrive late: the store ends up with the right bytes, whatever the sequence does meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from emberkeep.chat.prompt import Splice
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError
from emberkeep.kv.tree import Chunk
from emberkeep.types.lineage import Lineage
from emberkeep.types.request import Sampling
from helpers.kv_building import check_ledger, chunks_of, exported
from helpers.scheduling import (
    CLOSING,
    LONG,
    PATIENCE,
    PROMPT,
    SLICE,
    Gate,
    LateEngine,
    Recorder,
    Rig,
    no_pins,
    prompt_of,
    reference,
    text,
)

ENDLESS = Sampling(temperature=0, logit_bias=dict.fromkeys(FakeEngine().vocab.eog, -1e9))
MARKED = Lineage(splice="abc")


@pytest.fixture
def engine() -> LateEngine:
    return LateEngine()


@pytest.fixture
def rig(tmp_path: Path, engine: LateEngine):
    with Rig(tmp_path, engine, prefill_slice=SLICE) as rig:
        yield rig
        rig.settle()
        assert no_pins(rig)
        check_ledger(rig.store)
        assert_bytes_are_right(rig)


def assert_bytes_are_right(rig: Rig) -> None:
    """Exact chunks of the store. A turn lets go of the tail before it in RAM, if that is written by then."""
    for chunk in chunks_of(rig.store):
        if chunk.lineage != MARKED:
            expected = exported(whole(chunk), chunk.start, chunk.start + len(chunk.tokens))
            assert chunk.on_disk if chunk.payload is None else bytes(chunk.payload) == bytes(expected)


def whole(chunk: Chunk) -> np.ndarray:
    """The tokens of its path, to its end."""
    if chunk.parent is None:
        return chunk.tokens
    return np.concatenate([whole(chunk.parent)[: chunk.start], chunk.tokens])


def stored(rig: Rig, tokens: list[int]) -> int:
    return rig.store.advance(rig.store.origin(prompt_of(tokens).lineage), np.array(tokens, np.int32)).position


def test_what_a_step_computed_is_stored_after_the_next_one(rig, engine):
    gate = Gate(engine, holds=lambda step: step == 3)
    recorder = rig.start(LONG)
    gate.reached()
    assert (engine.begun, engine.asked) == (3, 2)
    assert stored(rig, LONG) == 2 * SLICE
    gate.open()
    assert recorder.answer == reference(LONG)
    rig.settle()
    assert engine.asked == engine.begun


def test_when_a_turn_ends_all_of_it_is_stored(rig):
    answer = rig.run(PROMPT).answer
    assert stored(rig, [*PROMPT, *answer, *CLOSING]) == len(PROMPT) + len(answer) + len(CLOSING)
    again = rig.run(PROMPT, from_store=True)
    assert again.answer == answer
    assert again.lookup.reused_tokens == len(PROMPT) - 1


def test_nothing_is_copied_twice(rig, engine):
    rig.run(LONG, max_new=0)
    rig.run(LONG, max_new=0)
    assert engine.copied_tokens == len(LONG)


def test_a_tail_grows(rig):
    history = text(40)
    for turn in range(5):
        answer = rig.run(history)
        assert answer.answer == reference(history)
        history = [*history, *answer.tokens, *CLOSING, *text(70, seed=turn + 50)]
        assert stored(rig, history) == len(history) - 70


def test_a_cancelled_prompt_keeps_what_it_computed(rig, engine):
    gate = Gate(engine, holds=lambda step: step == 2)
    sequence = rig.sequence(LONG)
    rig.scheduler.submit(sequence)
    gate.reached()
    assert sequence.saving is not None
    rig.scheduler.cancel(sequence)
    gate.open()
    rig.settle()
    assert sequence.saving is None
    assert stored(rig, LONG) == 3 * SLICE


def test_a_failed_step_leaves_nothing_on_its_way(rig, engine):
    def fail_at_third(batch) -> None:
        if batch[0].start == 2 * SLICE:
            raise EngineError("no")

    engine.on_evaluate = fail_at_third
    sequence = rig.sequence(LONG, recorder := Recorder())
    rig.scheduler.submit(sequence)
    assert isinstance(recorder.wait().error, EngineError)
    rig.settle()
    assert sequence.saving is None
    engine.on_evaluate = None
    assert stored(rig, LONG) == SLICE
    assert rig.run(LONG).answer == reference(LONG)


@pytest.mark.parametrize("shared", [SLICE - 20, 2 * SLICE, 2 * SLICE + 50])
def test_one_that_branches_off_meanwhile_stores_what_is_its_own(rig, engine, shared):
    gate = Gate(engine, holds=lambda step: step == 3)
    first = rig.start(LONG)
    gate.reached()
    other = [*LONG[:shared], *text(300, seed=8)]
    second = rig.start(other)
    gate.open()
    assert (first.answer, second.answer) == (reference(LONG), reference(other))
    rig.settle()
    assert stored(rig, other) == len(other)
    evaluated = len(LONG) + len(other) - shared + len(first.tokens) + len(second.tokens) + 2 * len(CLOSING)
    assert engine.evaluated_tokens == evaluated


def test_tokens_after_a_stop_are_not_part_of_what_goes_on(rig):
    prompt = text(SLICE - 6)
    stopped = rig.run(prompt, Recorder(stop_at=lambda tokens: 3 if len(tokens) == 10 else None), max_new=40)
    history = [*prompt, *stopped.tokens[:3], *text(200, seed=4)]
    assert rig.run(history).answer == reference(history)
    assert stored(rig, history) == len(history)


def test_what_was_on_its_way_when_the_context_became_shorter_is_stored_as_it_was(rig, monkeypatch):
    prompt, notice, recorder, saving = text(4 * SLICE + 98), text(12, seed=4), Recorder(), []

    def make_room() -> bool:
        source, is_first = np.array([*prompt, *recorder.tokens], np.int32), len(recorder.tokens) == 31
        splice = Splice(source, 50, 350, np.array(notice, np.int32), may_shift=True)
        shorter = prompt_of([*prompt[:50], *notice, *prompt[350:]], max_new=200, splice=splice, lineage=MARKED)
        saving.append(sequence.saving)
        rig.scheduler.make_room(sequence, shorter if is_first else None)
        return True

    shift = rig.scheduler._parts.cache.shift
    monkeypatch.setattr(shift, "shorten", _noting(shift.shorten, saving))
    # The step that samples its last token fills a chunk.
    sequence = rig.sequence(prompt, recorder, on_full=make_room, max_new=31, sampling=ENDLESS, lineage=MARKED)
    rig.scheduler.submit(sequence)
    assert len(recorder.answer) == 200
    rig.settle()
    assert saving[1] is not None
    assert stored(rig, [*prompt, *recorder.tokens]) == 5 * SLICE


def _noting(shorten, saving: list):
    def noting(sequence, prompt) -> None:
        saving.append(sequence.saving)
        shorten(sequence, prompt)

    return noting


def test_a_copy_that_fails_is_made_again(tmp_path):
    with Rig(tmp_path, engine := LateEngine(failing=(1, 3)), prefill_slice=SLICE) as rig:
        answer = rig.run(LONG)
        assert answer.answer == reference(LONG)
        assert stored(rig, LONG) == len(LONG)
        assert_bytes_are_right(rig)
        assert engine.asked == engine.begun


def test_of_a_user_that_is_forgotten_nothing_arrives(rig, engine):
    gate = Gate(engine, holds=lambda step: step == 2)
    sequence = rig.sequence(LONG)
    rig.scheduler.submit(sequence)
    gate.reached()
    forgotten = rig.scheduler.forget({sequence.lineage.owner})
    gate.open()
    forgotten.result()
    rig.settle()
    assert engine.begun == 3
    assert stored(rig, LONG) == 2 * SLICE


# ── an engine that computes on when `evaluate` has returned ──


class AheadEngine(FakeEngine):
    """Tells in which order steps and exports were asked for."""

    def __init__(self) -> None:
        super().__init__(cells=1 << 15, context=1 << 14)
        self.capabilities = replace(self.capabilities, runs_ahead=True)
        self.asked: list[str] = []
        self.exported_tokens: list[int] = []

    def evaluate(self, batch):
        self.asked.append("outputs" if any(rows.outputs for rows in batch) else "step")
        return super().evaluate(batch)

    def export_kv(self, sequence, borders, bits=16):
        self.asked.append("export")
        self.exported_tokens.append(borders[-1] - borders[0])
        return super().export_kv(sequence, borders, bits)


def test_nothing_waits_for_a_step_that_nobody_waits_for(tmp_path):
    """A prompt of several slices is stored when its first token is there."""
    engine = AheadEngine()
    with Rig(tmp_path, engine, prefill_slice=SLICE) as rig:
        first = rig.run(LONG, max_new=4)
        steps = engine.asked[: engine.asked.index("outputs")]
        assert len(steps) > 2 and set(steps) == {"step"}
        assert "export" in engine.asked
        assert rig.run(LONG, max_new=4).answer == first.answer == reference(LONG, max_new=4)
        rig.scheduler.forget({""}).result(PATIENCE)
        again = rig.run(LONG, max_new=4)
        assert (again.answer, again.lookup.reused_tokens) == (first.answer, len(LONG) - 1)


def test_a_long_prompt_is_stored_between_several_steps(tmp_path):
    prompt, engine = text(9000), AheadEngine()
    with Rig(tmp_path, engine, prefill_slice=512) as rig:
        assert rig.run(prompt, max_new=8).answer == reference(prompt, max_new=8)
        assert len(engine.exported_tokens) > 2 and max(engine.exported_tokens) <= 4096
        rig.scheduler.forget({""}).result(PATIENCE)
        assert rig.run(prompt, max_new=8).lookup.reused_tokens == len(prompt) - 1
