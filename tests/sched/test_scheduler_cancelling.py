"""A cancelled sequence stops soon, lets go of everything, and keeps what it computed."""

from __future__ import annotations

import threading

from emberkeep.engine.fake import FakeEngine
from helpers.scheduling import (
    CLOSING,
    LONG,
    PATIENCE,
    PROMPT,
    SLICE,
    Gate,
    Recorder,
    Rig,
    no_pins,
    reference,
    text,
)


def test_a_cancelled_prefill_stops_within_one_slice_and_keeps_what_it_computed(rig, engine):
    gate = Gate(engine, holds=lambda step: step == 1)
    recorder = Recorder()
    sequence = rig.sequence(LONG, recorder)
    rig.scheduler.submit(sequence)
    gate.reached()
    rig.scheduler.cancel(sequence)
    gate.open()
    rig.settle()
    assert engine.evaluated_tokens == 2 * SLICE
    assert not recorder.is_over
    again = rig.run(LONG)
    assert again.answer == reference(LONG)
    assert again.lookup.reused_tokens == 2 * SLICE


def test_a_prefill_cancelled_before_a_restart_is_continued_after_it(tmp_path):
    engine = FakeEngine()
    gate = Gate(engine, holds=lambda step: step == 2)
    with Rig(tmp_path, engine, prefill_slice=SLICE) as rig:
        sequence = rig.sequence(LONG)
        rig.scheduler.submit(sequence)
        gate.reached()
        rig.scheduler.cancel(sequence)
        gate.open()
        rig.settle()
    with Rig(tmp_path) as rig:
        answer = rig.run(LONG)
        assert answer.answer == reference(LONG)
        assert answer.lookup.cold_tokens == 3 * SLICE


def test_a_cancelled_answer_stops_within_one_step(rig, engine):
    gate = Gate(engine, holds=lambda step: step == 8)
    recorder = Recorder()
    sequence = rig.sequence(PROMPT, recorder, max_new=1000)
    rig.scheduler.submit(sequence)
    gate.reached()
    rig.scheduler.cancel(sequence)
    gate.open()
    rig.settle()
    assert len(recorder.tokens) <= 6
    assert rig.run(PROMPT).answer == reference(PROMPT)


def test_a_cancelled_sequence_that_waits_never_runs(tmp_path):
    engine = FakeEngine()
    gate = Gate(engine)
    with Rig(tmp_path, engine, parallel=1) as rig:
        first = rig.start(PROMPT)
        gate.reached()
        waiting = Recorder()
        sequence = rig.sequence(text(50, seed=5), waiting)
        rig.scheduler.submit(sequence)
        rig.scheduler.cancel(sequence)
        gate.open()
        first.wait()
        rig.settle()
        assert not waiting.is_over
        assert len(rig.scheduler._waiting) == 0
        assert engine.evaluated_tokens == len(PROMPT) + len(first.tokens) + len(CLOSING)


def test_a_sequence_cancelled_while_it_loads_lets_go_of_its_chunks(tmp_path, monkeypatch):
    with Rig(tmp_path) as rig:
        rig.run(PROMPT)
    with Rig(tmp_path) as rig:
        reading, go_on = threading.Event(), threading.Event()
        read = rig.store._disk.files.read

        def slow(expected):
            reading.set()
            assert go_on.wait(PATIENCE)
            return read(expected)

        monkeypatch.setattr(rig.store._disk.files, "read", slow)
        recorder = Recorder()
        sequence = rig.sequence(PROMPT, recorder)
        rig.scheduler.submit(sequence)
        assert reading.wait(PATIENCE)
        rig.scheduler.cancel(sequence)
        rig.settle()
        assert no_pins(rig)
        go_on.set()
        assert not recorder.is_over
        answer = rig.run(PROMPT)
        assert answer.answer == reference(PROMPT)
        assert answer.lookup.reused_tokens == len(PROMPT) - 1
        assert no_pins(rig)


def test_cancelling_what_is_over_changes_nothing(rig):
    recorder = Recorder()
    sequence = rig.sequence(PROMPT, recorder)
    rig.scheduler.submit(sequence)
    recorder.wait()
    rig.scheduler.cancel(sequence)
    rig.settle()
    assert rig.scheduler.counters.cancelled == 0
