"""What fails concerns its own sequences, and the loop goes on while it can."""

from __future__ import annotations

from emberkeep.engine.base import Outcome
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError, StepFailed
from helpers.scheduling import (
    LONG,
    PROMPT,
    SLICE,
    Gate,
    Recorder,
    Rig,
    reference,
    text,
)


def fail_once(engine: FakeEngine, at: int, error: Exception) -> None:
    steps = iter(range(1000))

    def on_evaluate(batch):
        if next(steps) == at:
            raise error

    engine.on_evaluate = on_evaluate


def test_a_failed_step_fails_its_sequences_and_the_loop_goes_on(rig, engine):
    fail_once(engine, 1, EngineError("the accelerator is on fire"))
    assert isinstance(rig.run(LONG).error, EngineError)
    assert rig.run(LONG).answer == reference(LONG)
    assert rig.scheduler.counters.failed == 1


def test_what_waits_for_a_sequence_that_fails_runs_itself(rig, engine):
    gate = Gate(engine)
    first = rig.start(LONG)
    gate.reached()
    second = rig.start(LONG)
    third = rig.start(LONG[:1500])
    held = engine.on_evaluate

    def fail(batch):
        engine.on_evaluate = None
        held(batch)
        raise EngineError("once")

    engine.on_evaluate = fail
    gate.open()
    first.wait()
    assert second.answer == reference(LONG)
    assert third.answer == reference(LONG[:1500])


def test_nothing_of_a_failed_step_is_kept(rig, engine):
    fail_once(engine, 2, EngineError("no"))
    rig.run(LONG)
    again = rig.run(LONG)
    assert again.lookup.reused_tokens == 2 * SLICE
    assert again.answer == reference(LONG)


def test_a_memory_that_stays_full_fails_the_sequence_and_not_the_loop(tmp_path):
    class Stubborn(FakeEngine):
        full = True

        def evaluate(self, batch):
            return Outcome.NO_ROOM if self.full else super().evaluate(batch)

    engine = Stubborn()
    with Rig(tmp_path, engine) as rig:
        failed = rig.run(PROMPT)
        assert isinstance(failed.error, EngineError)
        assert "full" in str(failed.error)
        engine.full = False
        assert rig.run(PROMPT).answer == reference(PROMPT)


def test_state_that_cannot_be_exported_costs_its_reuse_only(tmp_path):
    class Mute(FakeEngine):
        def export_kv(self, sequence, borders):
            raise EngineError("no")

    with Rig(tmp_path, Mute()) as rig:
        assert rig.run(PROMPT).answer == reference(PROMPT)
        assert rig.run(text(50)).answer == reference(text(50))


def test_memory_that_runs_out_while_loading_costs_the_reuse_and_no_file(tmp_path):
    class Exhausted(FakeEngine):
        def import_kv(self, *place):
            raise StepFailed("no memory")

    with Rig(tmp_path) as rig:
        rig.run(PROMPT)
    with Rig(tmp_path, Exhausted()) as rig:
        assert rig.run(PROMPT).answer == reference(PROMPT)
        assert rig.store.counters.damaged_chunks == 0
    with Rig(tmp_path) as rig:
        assert rig.run(PROMPT).lookup.cold_tokens > 0


def test_a_sampler_that_fails_concerns_its_own_request(rig):
    class Broken:
        def sample(self, logits, pieces):
            raise ZeroDivisionError

    broken, recorder = rig.sequence(PROMPT), Recorder()
    broken.sampler, broken.output = Broken(), recorder
    rig.scheduler.submit(broken)
    other = rig.start(text(90, seed=2))
    assert isinstance(recorder.wait().error, EngineError)
    assert other.answer == reference(text(90, seed=2))
