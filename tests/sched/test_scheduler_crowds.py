"""Many sequences at once: who runs, who waits and for how long, who is refused."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from emberkeep.engine.base import Outcome, Payload, Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import DeadlineExceeded
from helpers.scheduling import (
    ENDLESS,
    LONG,
    PROMPT,
    SLICE,
    Gate,
    HeldDisk,
    Recorder,
    Rig,
    no_pins,
    reference,
    text,
)


def test_others_run_while_one_loads(stored):
    with Rig(stored) as rig:
        disk = HeldDisk(rig.store)
        loading = rig.start(PROMPT)
        other = text(100, seed=6)
        assert rig.start(other).answer == reference(other)
        assert not loading.is_over
        disk.open()
        assert loading.answer == reference(PROMPT)


class SlowLoads(FakeEngine):
    """What it imports is there after some more steps."""

    STEPS = 3

    def __init__(self) -> None:
        super().__init__(cells=1 << 15)
        self.steps: list[set[int]] = []
        self._there_at: dict[int, int] = {}

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        self.steps.append({rows.sequence for rows in batch})
        return super().evaluate(batch)

    def import_kv(
        self, sequence: int, start: int, end: int, payloads: Sequence[Payload], payload_start: int
    ) -> Outcome:
        self._there_at[sequence] = len(self.steps) + self.STEPS
        return super().import_kv(sequence, start, end, payloads, payload_start)

    def is_loading(self, sequence: int) -> bool:
        return len(self.steps) < self._there_at.get(sequence, 0)


def test_others_go_on_while_state_is_loaded(tmp_path):
    engine = SlowLoads()
    with Rig(tmp_path, engine, prefill_slice=SLICE) as rig:
        answer, other = rig.run(PROMPT).answer, text(40, seed=8)
        gate = Gate(engine, holds=lambda step: step == 4)
        writing = rig.start(other, sampling=ENDLESS, max_new=30)
        gate.reached()
        begin = len(engine.steps)
        found = rig.start(PROMPT, from_store=True)
        gate.open()
        assert found.wait().answer == answer
        assert found.lookup.reused_tokens == len(PROMPT) - 1
        first = next(number for number, step in enumerate(engine.steps[begin:]) if len(step) > 1)
        assert first >= SlowLoads.STEPS
        assert writing.wait().answer == reference(other, sampling=ENDLESS, max_new=30)
        # Who is alone does not wait for others: the device is told at once, and does one after the other.
        assert rig.run(PROMPT, from_store=True).answer == answer


def test_sequences_that_do_not_fit_together_run_one_after_the_other(tmp_path):
    engine = FakeEngine(cells=1000, context=1000)
    prompts = [text(600, seed=seed) for seed in range(4)]
    with Rig(tmp_path, engine) as rig:
        recorders = [rig.start(prompt) for prompt in prompts]
        assert [r.answer for r in recorders] == [reference(prompt) for prompt in prompts]
        assert rig.scheduler.counters.failed == 0


def test_a_turn_that_is_being_closed_still_counts_as_room_taken(tmp_path):
    """Two conversations that each nearly fill the engine, one right behind the other."""
    engine = FakeEngine(cells=1000, context=1000)
    one, other = text(960, seed=1), text(960, seed=2)
    with Rig(tmp_path, engine) as rig:
        second = Recorder()
        first = Recorder(then=lambda _: rig.start(other, second, closing=()) and None)
        assert rig.start(one, first, closing=(10,) * 20).answer == reference(one)
        assert second.answer == reference(other)


def test_a_sequence_that_waited_too_long_fails(tmp_path):
    engine = FakeEngine()
    gate = Gate(engine)
    with Rig(tmp_path, engine, parallel=1) as rig:
        running = rig.start(PROMPT)
        gate.reached()
        late = rig.start(text(20, seed=1), deadline=monotonic() - 1)
        gate.open()
        assert isinstance(late.wait().error, DeadlineExceeded)
        assert running.answer == reference(PROMPT)


def test_a_sequence_that_loads_for_too_long_fails_when_nothing_else_happens(stored):
    with Rig(stored) as rig:
        disk = HeldDisk(rig.store)
        loading = rig.start(PROMPT, deadline=monotonic() + 0.05)
        assert isinstance(loading.wait().error, DeadlineExceeded)
        disk.open()
        rig.settle()
        assert no_pins(rig)


def test_a_running_sequence_that_takes_too_long_fails_and_keeps_what_it_computed(rig, engine):
    gate = Gate(engine, holds=lambda step: step == 1)
    recorder = Recorder()
    sequence = rig.sequence(LONG, recorder, deadline=monotonic() + 1000)
    rig.scheduler.submit(sequence)
    gate.reached()
    sequence.deadline = monotonic() - 1
    gate.open()
    assert isinstance(recorder.wait().error, DeadlineExceeded)
    assert rig.run(LONG).lookup.reused_tokens == 2 * SLICE


def test_stats_can_be_asked_for_from_any_thread_while_sequences_come_and_go(rig):
    recorders = [rig.start(text(30, seed=seed), max_new=2) for seed in range(40)]
    while not all(recorder.is_over for recorder in recorders):
        stats = rig.scheduler.stats()
        assert stats["active"] <= 4
    rig.settle()
    stats = rig.scheduler.stats()
    assert stats["jobs"] == 40
    assert stats["evaluated_tokens"] == rig.engine.evaluated_tokens
    assert stats["waiting"] == stats["active"] == 0
