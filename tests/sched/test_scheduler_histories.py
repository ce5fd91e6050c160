"""Whatever happens in whatever order, every answer is that of an engine that has seen nothing else. And of many
sequences at once: who runs, who waits and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.engine.base import KvUnit, Outcome, Payload, Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import DeadlineExceeded
from emberkeep.types.lineage import Lineage
from helpers.chance import examples
from helpers.kv_building import check_ledger, chunks_of
from helpers.scheduling import (
    CLOSING,
    ENDLESS,
    LONG,
    PROMPT,
    SLICE,
    DeviceEngine,
    Gate,
    HeldDisk,
    LateEngine,
    Recorder,
    Rig,
    no_pins,
    reference,
    text,
)

pytestmark = pytest.mark.usefixtures("quick_disk")

SHARED = text(140)


@dataclass
class Talk:
    namespace: str
    history: list[int] = field(default_factory=lambda: list(SHARED))


actions = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 3), st.integers(1, 180)),
        st.tuples(st.just("say at once"), st.integers(0, 3), st.integers(1, 180)),
        st.tuples(st.just("edit"), st.integers(0, 3), st.integers(0, 600)),
        st.tuples(st.just("cancel"), st.integers(0, 3), st.integers(1, 400)),
        st.tuples(st.just("stop"), st.integers(0, 3), st.integers(0, 6)),
        st.tuples(st.just("uncached"), st.integers(0, 3), st.integers(1, 50)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
    ),
    min_size=2,
    max_size=10,
)


@examples(30)
@given(
    actions,
    st.sampled_from([FakeEngine, LateEngine, DeviceEngine]),
    st.sampled_from([700, 1 << 15]),
    st.sampled_from([3_000, 1 << 30]),
    st.integers(1, 4),
)
def test_any_history_gives_the_answers_of_a_fresh_engine(tmp_path_factory, history, kind, cells, warm, parallel):
    folder = tmp_path_factory.mktemp("kv")

    def new_rig() -> Rig:
        engine = kind(cells=max(cells, 700), sequences=2 * parallel)
        return Rig(folder, engine, parallel=parallel, prefill_slice=64, warm=warm)

    rig = new_rig()
    talks = [Talk("alice"), Talk("alice"), Talk("bob"), Talk("")]
    checks: list[tuple[Recorder, list[int], int | None]] = []
    try:
        for number, (action, who, size) in enumerate(history):
            talk = talks[who]
            if action == "restart":
                _check(rig, checks)
                rig.close()
                rig = new_rig()
                continue
            if action == "edit":
                position = size % len(talk.history)
                talk.history[position] = 32 + (talk.history[position] + 1) % 90
                continue
            prompt = (talk.history + text(size, seed=number))[-(640):]
            recorder = Recorder(_stopping(action, size))
            sequence = rig.sequence(prompt, recorder, namespace=talk.namespace, use_cache=action != "uncached")
            rig.scheduler.submit(sequence)
            if action == "cancel":
                rig.scheduler.cancel(sequence)
                continue
            checks.append((recorder, prompt, size if action == "stop" else None))
            if action != "say at once":
                recorder.wait()
                talk.history = [*prompt, *recorder.tokens, *CLOSING]
        _check(rig, checks)
        check_ledger(rig.store)
    finally:
        rig.close()


def _stopping(action: str, size: int):
    if action != "stop":
        return lambda tokens: None
    return lambda tokens: size if len(tokens) == 6 else None


def _check(rig: Rig, checks: list[tuple[Recorder, list[int], int | None]]) -> None:
    for recorder, prompt, stopped in checks:
        expected = reference(prompt)
        assert recorder.answer == (expected if stopped is None else expected[:6])
    checks.clear()
    rig.settle()


SIZES = [32, 100, 128, 500, 1024]


@examples(24)
@given(
    unit=st.sampled_from(KvUnit),
    runs=st.lists(
        st.tuples(st.sampled_from(SIZES), st.integers(0, 3), st.integers(1, 900), st.booleans()),
        min_size=2,
        max_size=6,
    ),
)
def test_no_history_of_sizes_gives_wrong_state(tmp_path_factory, unit, runs):
    """Each run opens the store with another size, for a prompt that parts from others anywhere."""
    folder = tmp_path_factory.mktemp("kv")
    for size, branch, shared, from_store in runs:
        prompt = [*PROMPT[:shared], *text(150, seed=100 + branch)]
        engine = FakeEngine(cells=1 << 15, kv_unit=unit)
        with Rig(folder, engine, chunk_tokens=size) as rig:
            answer = rig.run(prompt, from_store=from_store).answer
            assert answer == reference(prompt, engine=FakeEngine(cells=1 << 15, kv_unit=unit))
            check_ledger(rig.store)


def test_what_is_packed_is_not_packed_again(tmp_path):
    """Errors would add up."""
    packed = Lineage(bits=8)
    with Rig(tmp_path, chunk_tokens=64) as rig:
        rig.run(text(128), namespace=packed, max_new=0, closing=())
        stored = {chunk.key for chunk in chunks_of(rig.store)}
    with Rig(tmp_path, chunk_tokens=256) as rig:
        found = rig.run([*text(128), *text(400, seed=3)], namespace=packed, from_store=True)
        assert found.lookup.cold_tokens == 128
        rig.store.flush()
        chunks = {chunk.key: chunk for chunk in chunks_of(rig.store)}
        assert stored <= chunks.keys()
        later = [chunk for key, chunk in chunks.items() if key not in stored]
        assert min(chunk.start for chunk in later) == 128


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
