"""How an answer ends, is cancelled or fails, and what stays of it; how the loop closes, or ends by an error of its
own: every request is told at once."""

from __future__ import annotations

import threading
from operator import attrgetter

import pytest

from emberkeep.engine.base import Outcome
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError, Overloaded, StepFailed
from emberkeep.sched.engine_thread import EngineThread
from emberkeep.sched.sequence_state import EndReason
from helpers.kv_building import check_ledger
from helpers.scheduling import (
    CLOSING,
    LONG,
    PATIENCE,
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
from helpers.waiting import eventually


@pytest.mark.parametrize("prompt", [PROMPT, [70]])
def test_a_sequence_ends_after_max_new_tokens(rig, prompt):
    recorder = rig.run(prompt, max_new=3)
    assert recorder.answer == reference(prompt, max_new=3)
    assert recorder.ending.reason is EndReason.LENGTH
    assert recorder.ending.timings.predicted_n == 3
    assert recorder.ending.lookup.prompt_tokens == len(prompt)


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


@pytest.mark.parametrize("kept", [0, 1, 4, 6, 7])
def test_a_stop_string_is_trimmed_off_the_state(rig, engine, kept):
    stop = Recorder(lambda tokens: kept if len(tokens) == 7 else None)
    rig.run(PROMPT, stop)
    assert stop.ending.reason is EndReason.STOPPED
    assert stop.ending.timings.predicted_n == kept
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
    assert rig.run(LONG).reports == []  # who does not ask for it gets none


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
    rig.close()
    assert [r.answer for r in recorders] == [reference(text(300, seed=seed)) for seed in range(6)]
    assert rig.scheduler.failure() is None
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


def test_a_cancelled_prefill_stops_within_one_slice_and_keeps_what_it_computed(rig, engine):
    cancelled = rig.cancel_at(Gate(engine, holds=lambda step: step == 1), LONG)
    assert engine.evaluated_tokens == 2 * SLICE
    assert not cancelled.is_over
    again = rig.run(LONG)
    assert again.answer == reference(LONG)
    assert again.lookup.reused_tokens == 2 * SLICE


def test_a_cancelled_answer_stops_within_one_step(rig, engine):
    cancelled = rig.cancel_at(Gate(engine, holds=lambda step: step == 8), PROMPT, max_new=1000)
    assert len(cancelled.tokens) <= 6
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


def test_a_sequence_cancelled_while_it_loads_lets_go_of_its_chunks(stored):
    with Rig(stored) as rig:
        disk, recorder = HeldDisk(rig.store), Recorder()
        sequence = rig.sequence(PROMPT, recorder)
        rig.scheduler.submit(sequence)
        disk.reached()
        rig.scheduler.cancel(sequence)
        rig.settle()
        assert no_pins(rig)
        disk.open()
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


def fail_once(engine: FakeEngine, at: int, error: Exception) -> None:
    steps = iter(range(1000))

    def on_evaluate(batch):
        if next(steps) == at:
            raise error

    engine.on_evaluate = on_evaluate


def test_a_failed_step_fails_its_sequences_and_the_loop_goes_on_with_what_was_there_before(rig, engine):
    fail_once(engine, 2, EngineError("the accelerator is on fire"))
    assert isinstance(rig.run(LONG).error, EngineError)
    again = rig.run(LONG)
    assert again.lookup.reused_tokens == 2 * SLICE
    assert again.answer == reference(LONG)
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


def test_memory_that_runs_out_while_loading_costs_the_reuse_and_no_file(stored):
    class Exhausted(FakeEngine):
        def import_kv(self, *place):
            raise StepFailed("no memory")

    with Rig(stored, Exhausted()) as rig:
        assert rig.run(PROMPT).answer == reference(PROMPT)
        assert rig.store.counters.damaged_chunks == 0
    with Rig(stored) as rig:
        assert rig.run(PROMPT).lookup.cold_tokens > 0


SKELETON = ["_take_commands", "_has_work", "_act_when_idle", "_admit", "_steps", "flush", "_check_slots"]


def breaks(error: BaseException):
    def action(*arguments: object, **named: object) -> None:
        raise error

    return action


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("name", SKELETON)
def test_every_waiting_request_is_told_and_no_new_one_is_taken(tmp_path, name: str, error: BaseException) -> None:
    engine = FakeEngine()
    gate = Gate(engine)
    rig = Rig(tmp_path, engine, parallel=1)
    running = rig.start(PROMPT)
    gate.reached()
    waiting, call, between = rig.start(text(20)), rig.scheduler.call(lambda: 1), rig.scheduler.when_idle(lambda: 1)
    owner, method = (rig.scheduler._steps, "run") if name == "_steps" else (rig.scheduler, name)
    setattr(owner, method, breaks(error))
    gate.open()
    for recorder in (running, waiting):
        assert "has failed" in str(recorder.wait().error)
    with pytest.raises(EngineError, match="has failed"):
        between.result(PATIENCE)
    assert isinstance(call.exception(PATIENCE), EngineError | None)  # it may have been its turn before
    for late in (
        lambda: rig.start(PROMPT),
        lambda: rig.scheduler.call(lambda: 1),
        lambda: rig.scheduler.forget({""}),
    ):
        with pytest.raises(EngineError, match="start again; the log says why"):
            late()
    rig.scheduler._running.result(PATIENCE)
    assert type(error).__name__ in str(rig.scheduler.failure())
    assert engine.is_closed
    assert no_pins(rig)
    rig.close()
    with Rig(tmp_path) as again:
        assert again.run(PROMPT).answer == reference(PROMPT)
        check_ledger(again.store)


def test_a_slot_that_cannot_be_emptied_ends_the_loop_and_is_not_shared() -> None:
    class Sticky(FakeEngine):
        def trim(self, sequence: int, start: int) -> None:
            raise RuntimeError("a bug")

    rig = Rig(engine=Sticky())
    assert rig.run(PROMPT).answer == reference(PROMPT)
    second = rig.start(text(50, seed=8)).wait()
    rig.scheduler._running.result(PATIENCE)
    assert second.error is not None or second.answer == reference(text(50, seed=8))
    assert rig.scheduler.failure() is not None
    rig.close()


def test_those_who_cannot_be_woken_are_woken_again() -> None:
    """At the end of everything, what was told must get through."""
    rig, woken = Rig(), []

    def once(hurry: bool) -> None:
        woken.append(1)
        if len(woken) == 1:
            raise MemoryError

    rig.scheduler._admit = breaks(RuntimeError("a bug"))
    rig.scheduler.flush = once
    ended = rig.start(PROMPT).wait()
    rig.scheduler._running.result(PATIENCE)
    assert ended.error is not None
    assert len(woken) == 2
    rig.close()


def test_a_flush_that_fails_once_harms_no_request() -> None:
    with Rig() as rig:
        failed = []

        def once(hurry: bool) -> None:
            if not failed:
                failed.append(1)
                raise MemoryError

        rig.scheduler.flush = once
        assert rig.run(PROMPT).answer == reference(PROMPT)
        assert failed


# ── what it waits for ──
def test_a_disk_that_never_answers_is_not_waited_for(stored, monkeypatch) -> None:
    monkeypatch.setattr("emberkeep.sched.sequence.PATIENCE_S", 0.05)
    with Rig(stored) as rig:
        disk = HeldDisk(rig.store)
        found = rig.run(PROMPT)
        assert found.answer == reference(PROMPT)
        assert found.lookup.cold_tokens == 0
        disk.open()


def test_the_engines_thread_survives_what_it_is_given() -> None:
    thread = EngineThread()
    thread._tasks.put(breaks(SystemExit(1)))
    assert thread.submit(lambda: 7).result(PATIENCE) == 7
    thread.end()


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("_ledger.use", MemoryError()),  # by a lookup
        ("_ledger.shrink_ram", MemoryError()),  # before a read
        ("_disk.reader._threads.submit", RuntimeError("no more threads")),
        ("_disk.files.read", RuntimeError("a bug")),
        ("_ledger.enter_payload", MemoryError()),  # after it
    ],
)
def test_a_store_that_fails_costs_one_request_at_most_and_leaves_no_pin(stored, monkeypatch, place, error) -> None:
    owner, _, method = place.rpartition(".")
    with Rig(stored) as rig:
        monkeypatch.setattr(attrgetter(owner)(rig.store), method, breaks(error))
        first = rig.run(PROMPT)
        assert isinstance(first.error, EngineError) or first.answer == reference(PROMPT)
        monkeypatch.undo()
        assert eventually(lambda: not rig.store.loading)
        assert no_pins(rig)
        rig.scheduler.forget({""}).result(PATIENCE)
        assert rig.run([*PROMPT, *text(5)]).answer == reference([*PROMPT, *text(5)])
