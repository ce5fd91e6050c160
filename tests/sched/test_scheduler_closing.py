"""Closing loses nothing: neither a sequence nor what was computed."""

from __future__ import annotations

import threading

import pytest

from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import Overloaded
from helpers.scheduling import (
    LONG,
    PATIENCE,
    PROMPT,
    SLICE,
    Gate,
    Rig,
    reference,
    text,
)


def test_closing_keeps_what_was_computed(tmp_path):
    engine = FakeEngine()
    gate = Gate(engine, holds=lambda step: step == 2)
    rig = Rig(tmp_path, engine, prefill_slice=SLICE)
    recorder = rig.start(LONG)
    gate.reached()
    closing = threading.Thread(target=rig.close)
    closing.start()
    while not rig.scheduler._inbox.is_shut:
        pass
    gate.open()
    closing.join(PATIENCE)
    assert isinstance(recorder.wait().error, Overloaded)
    assert engine.is_closed
    with Rig(tmp_path) as again:
        answer = again.run(LONG)
        assert answer.answer == reference(LONG)
        assert answer.lookup.cold_tokens >= 3 * SLICE


def test_closing_lets_sequences_finish_when_it_is_given_time(tmp_path):
    rig = Rig(tmp_path, drain_s=PATIENCE)
    recorders = [rig.start(text(300, seed=seed)) for seed in range(6)]
    rig.scheduler.close()
    rig.store.close()
    assert [r.answer for r in recorders] == [reference(text(300, seed=seed)) for seed in range(6)]


def test_nothing_is_taken_after_closing(tmp_path):
    rig = Rig(tmp_path)
    rig.close()
    with pytest.raises(Overloaded, match="shutting down"):
        rig.start(PROMPT)


def test_sequences_submitted_while_closing_are_refused_or_answered_but_never_lost(tmp_path):
    rig = Rig(tmp_path)
    recorders, refused = [], []

    def submit() -> None:
        for seed in range(2000):
            try:
                recorders.append(rig.start(text(4, seed=seed), max_new=1))
            except Overloaded:
                refused.append(seed)
                if rig.scheduler._inbox.is_shut:
                    return

    thread = threading.Thread(target=submit)
    thread.start()
    while not recorders:
        pass
    rig.scheduler.close()
    thread.join(PATIENCE)
    rig.store.close()
    for recorder in recorders:
        recorder.wait()
