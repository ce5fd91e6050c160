"""What needs the engine for itself waits for running sequences, and new sequences wait for it; what only makes
later work quicker is done in gaps."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine, FakeTiers
from emberkeep.errors import EngineError, Overloaded
from emberkeep.sched import scheduler as module
from emberkeep.types.events import MissReason
from emberkeep.types.models import AttentionTier
from helpers.chance import seed, times
from helpers.scheduling import LONG, PATIENCE, PROMPT, Gate, Recorder, Rig, reference, text
from helpers.waiting import eventually

OTHER = text(300, seed=1)


def run_out_of_room() -> None:
    raise EngineError("there is no room for another context")


def test_running_sequences_finish_first_and_new_ones_wait(rig: Rig, engine: FakeEngine) -> None:
    gate = Gate(engine)
    running = rig.start(PROMPT)
    gate.reached()
    seen = rig.scheduler.when_idle(lambda: (running.is_over, rig.scheduler.stats()))
    waiting = rig.start(OTHER)
    gate.open()
    was_over, stats = seen.result(PATIENCE)
    assert was_over
    assert (stats["active"], stats["waiting"]) == (0, 1)
    assert running.answer == reference(PROMPT)
    assert waiting.answer == reference(OTHER)


def test_answers_are_right_however_often_the_engine_is_emptied(rig: Rig) -> None:
    recorders, emptied = [], []
    for number in range(12):
        recorders.append(rig.start(text(300, seed=number)))
        emptied.append(rig.scheduler.when_idle(lambda: rig.scheduler.stats()["resident_tokens"]))
    assert [recorder.answer for recorder in recorders] == [reference(text(300, seed=each)) for each in range(12)]
    assert [future.result(PATIENCE) for future in emptied] == [0] * 12


def test_the_engine_is_empty_and_what_it_held_comes_back_from_the_store(rig: Rig) -> None:
    first = rig.run(PROMPT)
    assert rig.scheduler.stats()["resident_tokens"] > 0
    assert rig.scheduler.when_idle(lambda: rig.scheduler.stats()["resident_tokens"]).result(PATIENCE) == 0
    turn = [*PROMPT, *first.answer, *OTHER]
    again = rig.run(turn)
    assert again.lookup.hot_tokens == 0
    assert again.lookup.reused_tokens >= len(PROMPT) + len(first.answer)
    assert again.answer == reference(turn)


def test_one_that_is_given_up_does_not_happen_and_holds_nothing_back(rig: Rig, engine: FakeEngine) -> None:
    gate, happened = Gate(engine), list[int]()
    rig.start(PROMPT)
    gate.reached()
    future = rig.scheduler.when_idle(lambda: happened.append(1))
    waiting = rig.start(OTHER)
    assert future.cancel()
    gate.open()
    assert waiting.answer == reference(OTHER)
    assert not happened


def test_an_error_ends_the_loop_and_is_told_to_every_request(rig: Rig, engine: FakeEngine) -> None:
    gate = Gate(engine)
    running = rig.start(PROMPT)
    gate.reached()
    future = rig.scheduler.when_idle(run_out_of_room)
    waiting = rig.start(OTHER)
    gate.open()
    with pytest.raises(EngineError, match="no room"):
        future.result(PATIENCE)
    assert running.answer == reference(PROMPT)
    assert isinstance(waiting.wait().error, EngineError)
    for late in (lambda: rig.start(OTHER), lambda: rig.scheduler.when_idle(lambda: None)):
        with pytest.raises(EngineError, match="has failed"):
            late()


def test_one_that_still_waits_when_the_loop_closes_fails(rig: Rig, engine: FakeEngine) -> None:
    gate = Gate(engine)
    rig.start(LONG)
    gate.reached()
    future = rig.scheduler.when_idle(lambda: None)
    closing = threading.Thread(target=rig.scheduler.close)
    closing.start()
    while not rig.scheduler._inbox.is_shut:
        pass
    gate.open()
    with pytest.raises(Overloaded):
        future.result(PATIENCE)
    closing.join(PATIENCE)


# ── in gaps ──


class Improving(FakeEngine):
    """Takes three calls to be as quick as it can be."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.rested = threading.Event()
        self.improved = threading.Event()
        self.error: Exception | None = None

    can_improve = True

    def improve(self, is_wanted: Callable[[], bool]) -> bool:
        self.calls += 1
        if self.error is not None:
            self.improved.set()
            raise self.error
        if self.calls < 3:
            return False
        self.improved.set()
        return True

    def rest(self) -> None:
        self.rested.set()
        if self.error is not None:
            raise self.error


@pytest.fixture
def gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rig, Improving]]:
    monkeypatch.setattr(module, "GAP_S", 0.01)
    monkeypatch.setattr(module, "REST_S", 0.01)
    engine = Improving()
    with Rig(tmp_path, engine) as opened:
        yield opened, engine


def answer(rig: Rig) -> Recorder:
    return rig.start(PROMPT, max_new=4).wait()


def test_an_engine_is_improved_in_gaps_until_it_says_that_all_is_done(gaps: tuple[Rig, Improving]) -> None:
    opened, engine = gaps
    assert engine.improved.wait(PATIENCE)
    answer(opened)
    assert engine.rested.wait(PATIENCE)
    assert engine.calls == 3


@pytest.mark.parametrize("error", [EngineError("injected"), MemoryError("injected")])
def test_what_fails_in_a_gap_fails_no_request(gaps: tuple[Rig, Improving], error: Exception) -> None:
    opened, engine = gaps
    engine.error = error
    assert engine.rested.wait(PATIENCE)
    first = answer(opened)
    engine.rested.clear()
    assert engine.rested.wait(PATIENCE)
    assert answer(opened).tokens == first.tokens
    assert opened.scheduler.failure() is None


@pytest.mark.parametrize(("cells", "kept"), [(None, 112), (112, 112), (111, 58), (57, 0)])
def test_conversations_that_would_hold_memory_are_given_up_and_the_latest_stays(
    gaps: tuple[Rig, Improving], cells: int | None, kept: int
) -> None:
    opened, engine = gaps
    assert engine.improved.wait(PATIENCE)
    engine.capabilities = replace(engine.capabilities, resting_cells=cells)
    recorders = Recorder(), Recorder()
    early = opened.sequence(list(range(40, 90)), recorders[0], max_new=2)
    late = opened.sequence(list(range(140, 190)), recorders[1], max_new=6)
    opened.scheduler.call(lambda: list(map(opened.scheduler.submit, (early, late))))  # side by side
    for recorder in recorders:
        recorder.wait()

    def resident() -> int:
        tokens: int = opened.scheduler.stats()["resident_tokens"]
        return tokens

    assert eventually(lambda: resident() == kept)


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_what_is_given_up_later_is_given_back_too(gaps: tuple[Rig, Improving], is_forgotten: bool) -> None:
    opened, engine = gaps
    answer(opened)
    assert engine.rested.wait(PATIENCE)
    engine.rested.clear()
    scheduler = opened.scheduler
    (scheduler.forget({""}) if is_forgotten else scheduler.drop_idle([], 0.0)).result(PATIENCE)
    assert engine.rested.wait(PATIENCE)


def test_an_engine_that_is_as_quick_as_it_can_be_keeps_its_conversation(gaps: tuple[Rig, Improving]) -> None:
    opened, engine = gaps
    engine.can_improve = False
    answer(opened)
    assert engine.rested.wait(PATIENCE)
    assert engine.calls == 0
    assert opened.scheduler.call(lambda: len(opened.scheduler._slots.idle)).result(PATIENCE) == 1


# ── attention is switched only then ──

FLASH, PLAIN = FakeTiers.available


def engine_of(tier: AttentionTier = FLASH, kv_unit: KvUnit = KvUnit.RANGE) -> FakeEngine:
    engine = FakeEngine(cells=1 << 15, kv_unit=kv_unit)
    engine.attention = FakeTiers()
    assert engine.attention is not None
    engine.attention.switch(tier)
    return engine


def switch(rig: Rig, tier: AttentionTier) -> None:
    attention = rig.scheduler.engine.attention
    assert attention is not None
    rig.scheduler.when_idle(lambda: attention.switch(tier)).result(PATIENCE)


def expected(tokens: list[int], tier: AttentionTier, kv_unit: KvUnit = KvUnit.RANGE) -> list[int]:
    return reference(tokens, engine=engine_of(tier, kv_unit))


def test_what_the_other_tier_computes_is_reused_in_the_engine_and_not_stored(tmp_path: Path) -> None:
    with Rig(tmp_path, engine_of()) as rig:
        rig.run(PROMPT, is_kept=False)
        switch(rig, PLAIN)
        first = rig.run(PROMPT)
        assert (first.lookup.cached_tokens, first.lookup.reason) == (0, MissReason.OTHER_MODEL)
        answer = first.answer
        turn = [*PROMPT, *answer, *text(40, seed=3)]
        again = rig.run(turn)
        assert again.answer == expected(turn, PLAIN)
        assert again.lookup.hot_tokens >= len(PROMPT)
        rig.store.flush()
        assert rig.store.held_bytes() == (0, 0)
    assert not list(tmp_path.rglob("*.kv"))


def test_back_at_the_first_tier_its_state_comes_back_from_the_store(tmp_path: Path) -> None:
    with Rig(tmp_path, engine_of()) as rig:
        answer = rig.run(PROMPT).answer
        switch(rig, PLAIN)
        rig.run(text(300, seed=8))
        switch(rig, FLASH)
        turn = [*PROMPT, *answer, *text(40, seed=3)]
        again = rig.run(turn)
        assert again.answer == expected(turn, FLASH)
        assert again.lookup.hot_tokens == 0
        assert again.lookup.reused_tokens >= len(PROMPT) + len(answer)


def test_an_answer_under_way_is_finished_by_the_tier_that_began_it(tmp_path: Path) -> None:
    engine = engine_of()
    gate = Gate(engine, holds=lambda step: step == 8)  # in the middle of the answer
    with Rig(tmp_path, engine) as rig:
        running = rig.start(PROMPT)
        gate.reached()
        switched = rig.scheduler.when_idle(lambda: rig.scheduler.engine.attention.switch(PLAIN))
        gate.open()
        switched.result(PATIENCE)
        assert running.answer == expected(PROMPT, FLASH)


@pytest.mark.parametrize("kv_unit", list(KvUnit))
def test_whatever_is_switched_when_every_answer_is_that_of_its_tier_alone(tmp_path: Path, kv_unit: KvUnit) -> None:
    """Also by a process that finds what this one has stored."""
    draw = random.Random(seed(14))
    conversations = [text(200, seed=seed) for seed in range(3)]
    for opened in (FLASH, PLAIN, FLASH):
        with Rig(tmp_path, engine_of(opened, kv_unit)) as rig:
            for _ in range(times(12)):
                if draw.random() < 0.4:
                    switch(rig, draw.choice((FLASH, PLAIN)))
                chosen = draw.choice(conversations)
                tier = rig.scheduler.engine.attention.tier
                answer = rig.run(chosen).answer
                assert answer == expected(chosen, tier, kv_unit)
                if len(chosen) < 600:
                    chosen += [*answer, *text(30, seed=len(chosen))]
