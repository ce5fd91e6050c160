"""How jobs wait, run, stop and fail."""

from __future__ import annotations

import threading
from pathlib import Path
from time import monotonic

import pytest

from emberkeep.engine.base import Outcome
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import DeadlineExceeded, EngineError, Overloaded
from emberkeep.sched.job import EndReason
from helpers.kv_building import check_books
from helpers.scheduling import CLOSING, PATIENCE, Gate, Recorder, Rig, reference, text

PROMPT = text(700)
LONG = text(2000)
SLICE = 128  # the smallest there is: the measured speed of a paused engine must not change it


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(cells=1 << 15)


@pytest.fixture
def rig(tmp_path: Path, engine: FakeEngine):
    with Rig(tmp_path, engine, prefill_slice=SLICE) as rig:
        yield rig
    check_books(rig.store)


def no_pins(rig: Rig) -> bool:
    return all(chunk.pins == 0 for chunk in rig.store._books)


# ── ending ──


def test_a_job_ends_after_max_new_tokens(rig):
    recorder = rig.run(PROMPT, max_new=3)
    assert recorder.answer == reference(PROMPT, max_new=3)
    assert recorder.ending.reason is EndReason.LENGTH
    assert recorder.ending.sampled_tokens == 3
    assert recorder.ending.prompt_tokens == 700


def test_a_job_ends_where_the_model_ends_its_turn(rig):
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
def test_a_stop_string_is_cut_out_of_the_state(rig, engine, kept):
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
def test_a_stop_string_over_a_chunk_border_is_cut_out_of_the_state(rig, kept):
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
    assert [report.processed for report in recorder.reports] == [*range(SLICE, 1900, SLICE), 1896, 1999, 2000]
    assert {report.total for report in recorder.reports} == {2000}
    rig.run(LONG[:1500])
    again = rig.run([*LONG[:1500], *text(300, seed=2)], want_progress=True)
    assert again.reports[0].cached == 1500
    assert again.reports[0].processed > 1500


def test_quiet_jobs_get_no_progress(rig):
    assert rig.run(LONG).reports == []


# ── cancelling ──


def test_a_cancelled_prefill_stops_within_one_slice_and_keeps_what_it_computed(rig, engine):
    gate = Gate(engine, holds=lambda step: step == 1)
    recorder = Recorder()
    job = rig.job(LONG, recorder)
    rig.loop.submit(job)
    gate.reached()
    rig.loop.cancel(job)
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
        job = rig.job(LONG)
        rig.loop.submit(job)
        gate.reached()
        rig.loop.cancel(job)
        gate.open()
        rig.settle()
    with Rig(tmp_path) as rig:
        answer = rig.run(LONG)
        assert answer.answer == reference(LONG)
        assert answer.lookup.cold_tokens == 3 * SLICE


def test_a_cancelled_answer_stops_within_one_step(rig, engine):
    gate = Gate(engine, holds=lambda step: step == 8)
    recorder = Recorder()
    job = rig.job(PROMPT, recorder, max_new=1000)
    rig.loop.submit(job)
    gate.reached()
    rig.loop.cancel(job)
    gate.open()
    rig.settle()
    assert len(recorder.tokens) <= 6
    assert rig.run(PROMPT).answer == reference(PROMPT)


def test_a_cancelled_job_that_waits_never_runs(tmp_path):
    engine = FakeEngine()
    gate = Gate(engine)
    with Rig(tmp_path, engine, parallel=1) as rig:
        first = rig.start(PROMPT)
        gate.reached()
        waiting = Recorder()
        job = rig.job(text(50, seed=5), waiting)
        rig.loop.submit(job)
        rig.loop.cancel(job)
        gate.open()
        first.wait()
        rig.settle()
        assert not waiting.is_over
        assert len(rig.loop._line) == 0
        assert engine.evaluated_tokens == len(PROMPT) + len(first.tokens) + len(CLOSING)


def test_a_job_cancelled_while_it_loads_lets_go_of_its_chunks(tmp_path, monkeypatch):
    with Rig(tmp_path) as rig:
        rig.run(PROMPT)
    with Rig(tmp_path) as rig:
        reading, go_on = threading.Event(), threading.Event()
        read = rig.store._cold.read

        def slow(expected):
            reading.set()
            assert go_on.wait(PATIENCE)
            return read(expected)

        monkeypatch.setattr(rig.store._cold, "read", slow)
        recorder = Recorder()
        job = rig.job(PROMPT, recorder)
        rig.loop.submit(job)
        assert reading.wait(PATIENCE)
        rig.loop.cancel(job)
        rig.settle()
        assert no_pins(rig)
        go_on.set()
        assert not recorder.is_over
        answer = rig.run(PROMPT)
        assert answer.answer == reference(PROMPT)
        assert answer.lookup.reused_tokens == len(PROMPT) - 1
        assert no_pins(rig)


def test_others_run_while_one_loads(tmp_path, monkeypatch):
    with Rig(tmp_path) as rig:
        rig.run(PROMPT)
    with Rig(tmp_path) as rig:
        go_on, read = threading.Event(), rig.store._cold.read
        monkeypatch.setattr(rig.store._cold, "read", lambda expected: go_on.wait(PATIENCE) and read(expected))
        loading = rig.start(PROMPT)
        other = text(100, seed=6)
        assert rig.start(other).answer == reference(other)
        assert not loading.is_over
        go_on.set()
        assert loading.answer == reference(PROMPT)


def test_cancelling_what_is_over_changes_nothing(rig):
    recorder = Recorder()
    job = rig.job(PROMPT, recorder)
    rig.loop.submit(job)
    recorder.wait()
    rig.loop.cancel(job)
    rig.settle()
    assert rig.loop.counters.cancelled == 0


# ── limits ──


def test_more_jobs_than_may_wait_are_refused(tmp_path):
    engine = FakeEngine()
    gate = Gate(engine)
    with Rig(tmp_path, engine, parallel=1, waiting=2) as rig:
        rig.start(PROMPT)
        gate.reached()
        waiting = [rig.start(text(20, seed=seed)) for seed in (1, 2)]
        with pytest.raises(Overloaded, match="2 requests are waiting") as refused:
            rig.start(text(20, seed=3))
        assert refused.value.retry_after > 0
        gate.open()
        assert [r.answer for r in waiting] == [reference(text(20, seed=seed)) for seed in (1, 2)]
        assert rig.run(text(20, seed=3)).answer == reference(text(20, seed=3))


def test_a_job_that_waited_too_long_fails(tmp_path):
    engine = FakeEngine()
    gate = Gate(engine)
    with Rig(tmp_path, engine, parallel=1) as rig:
        running = rig.start(PROMPT)
        gate.reached()
        late = rig.start(text(20, seed=1), deadline=monotonic() - 1)
        gate.open()
        assert isinstance(late.wait().error, DeadlineExceeded)
        assert running.answer == reference(PROMPT)


def test_a_job_that_loads_for_too_long_fails_when_nothing_else_happens(tmp_path, monkeypatch):
    with Rig(tmp_path) as rig:
        rig.run(PROMPT)
    with Rig(tmp_path) as rig:
        go_on, read = threading.Event(), rig.store._cold.read
        monkeypatch.setattr(rig.store._cold, "read", lambda expected: go_on.wait(PATIENCE) and read(expected))
        loading = rig.start(PROMPT, deadline=monotonic() + 0.05)
        assert isinstance(loading.wait().error, DeadlineExceeded)
        go_on.set()
        rig.settle()
        assert no_pins(rig)


def test_a_running_job_that_takes_too_long_fails_and_keeps_what_it_computed(rig, engine):
    gate = Gate(engine, holds=lambda step: step == 1)
    recorder = Recorder()
    job = rig.job(LONG, recorder, deadline=monotonic() + 1000)
    rig.loop.submit(job)
    gate.reached()
    job.deadline = monotonic() - 1
    gate.open()
    assert isinstance(recorder.wait().error, DeadlineExceeded)
    assert rig.run(LONG).lookup.reused_tokens == 2 * SLICE


def test_jobs_that_do_not_fit_together_run_one_after_the_other(tmp_path):
    engine = FakeEngine(cells=1000, context=1000)
    prompts = [text(600, seed=seed) for seed in range(4)]
    with Rig(tmp_path, engine) as rig:
        recorders = [rig.start(prompt) for prompt in prompts]
        assert [r.answer for r in recorders] == [reference(prompt) for prompt in prompts]
        assert rig.loop.counters.failed == 0


def test_a_turn_that_is_being_closed_still_counts_as_room_taken(tmp_path):
    """Two conversations that each nearly fill the engine, one right behind the other."""
    engine = FakeEngine(cells=1000, context=1000)
    one, other = text(960, seed=1), text(960, seed=2)
    with Rig(tmp_path, engine) as rig:
        second = Recorder()
        first = Recorder(then=lambda _: rig.start(other, second, closing=()) and None)
        assert rig.start(one, first, closing=(10,) * 20).answer == reference(one)
        assert second.answer == reference(other)


# ── failing ──


def fail_once(engine: FakeEngine, at: int, error: Exception) -> None:
    steps = iter(range(1000))

    def on_evaluate(batch):
        if next(steps) == at:
            raise error

    engine.on_evaluate = on_evaluate


def test_a_failed_step_fails_its_jobs_and_the_loop_goes_on(rig, engine):
    fail_once(engine, 1, EngineError("the accelerator is on fire"))
    assert isinstance(rig.run(LONG).error, EngineError)
    assert rig.run(LONG).answer == reference(LONG)
    assert rig.loop.counters.failed == 1


def test_what_waits_for_a_job_that_fails_runs_itself(rig, engine):
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


def test_a_memory_that_stays_full_fails_the_job_and_not_the_loop(tmp_path):
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
        def export_kv(self, sequence, start, end):
            raise EngineError("no")

    with Rig(tmp_path, Mute()) as rig:
        assert rig.run(PROMPT).answer == reference(PROMPT)
        assert rig.run(text(50)).answer == reference(text(50))


def test_a_sampler_that_fails_concerns_its_own_request(rig):
    class Broken:
        def sample(self, logits, pieces):
            raise ZeroDivisionError

    broken, recorder = rig.job(PROMPT), Recorder()
    broken.sampler, broken.consumer = Broken(), recorder
    rig.loop.submit(broken)
    other = rig.start(text(90, seed=2))
    assert isinstance(recorder.wait().error, EngineError)
    assert other.answer == reference(text(90, seed=2))


def test_a_loop_that_breaks_tells_everybody_and_takes_nothing_more(tmp_path):
    engine = FakeEngine()
    gate = Gate(engine)
    rig = Rig(tmp_path, engine, parallel=1)
    running = rig.start(PROMPT)
    gate.reached()
    waiting = rig.start(text(20))
    held = engine.on_evaluate

    def explode(batch):
        held(batch)
        raise RuntimeError("a bug")

    engine.on_evaluate = explode
    gate.open()
    assert isinstance(running.wait().error, EngineError)
    assert isinstance(waiting.wait().error, EngineError)
    rig.loop._running.result(PATIENCE)
    assert engine.is_closed
    with pytest.raises(Overloaded):
        rig.start(PROMPT)
    rig.close()


# ── closing ──


def test_closing_keeps_what_was_computed(tmp_path):
    engine = FakeEngine()
    gate = Gate(engine, holds=lambda step: step == 2)
    rig = Rig(tmp_path, engine, prefill_slice=SLICE)
    recorder = rig.start(LONG)
    gate.reached()
    closing = threading.Thread(target=rig.close)
    closing.start()
    while not rig.loop._stopping:
        pass
    gate.open()
    closing.join(PATIENCE)
    assert isinstance(recorder.wait().error, Overloaded)
    assert engine.is_closed
    with Rig(tmp_path) as again:
        answer = again.run(LONG)
        assert answer.answer == reference(LONG)
        assert answer.lookup.cold_tokens >= 3 * SLICE


def test_closing_lets_jobs_finish_when_it_is_given_time(tmp_path):
    rig = Rig(tmp_path)
    recorders = [rig.start(text(300, seed=seed)) for seed in range(6)]
    rig.loop.close(drain_seconds=PATIENCE)
    rig.store.close()
    assert [r.answer for r in recorders] == [reference(text(300, seed=seed)) for seed in range(6)]


def test_nothing_is_taken_after_closing(tmp_path):
    rig = Rig(tmp_path)
    rig.close()
    with pytest.raises(Overloaded, match="shutting down"):
        rig.start(PROMPT)


def test_jobs_submitted_while_closing_are_refused_or_answered_but_never_lost(tmp_path):
    rig = Rig(tmp_path)
    recorders, refused = [], []

    def submit() -> None:
        for seed in range(2000):
            try:
                recorders.append(rig.start(text(4, seed=seed), max_new=1))
            except Overloaded:
                refused.append(seed)
                if rig.loop._stopping:
                    return

    thread = threading.Thread(target=submit)
    thread.start()
    while not recorders:
        pass
    rig.loop.close()
    thread.join(PATIENCE)
    rig.store.close()
    for recorder in recorders:
        recorder.wait()


def test_stats_can_be_asked_for_from_any_thread_while_jobs_come_and_go(rig):
    recorders = [rig.start(text(30, seed=seed), max_new=2) for seed in range(40)]
    while not all(recorder.is_over for recorder in recorders):
        stats = rig.loop.stats()
        assert stats["active"] <= 4
    rig.settle()
    stats = rig.loop.stats()
    assert stats["jobs"] == 40
    assert stats["evaluated_tokens"] == rig.engine.evaluated_tokens
    assert stats["waiting"] == stats["active"] == 0
