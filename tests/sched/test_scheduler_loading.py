"""State that is still on its way holds up nobody else, and comes from any tier."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from emberkeep.engine.base import KvUnit, Outcome, Payload, Rows
from emberkeep.engine.fake import FakeEngine, FakeTiers
from emberkeep.types.events import MissReason
from emberkeep.types.models import AttentionTier
from emberkeep.types.request import Sampling
from helpers.chance import seed, times
from helpers.scheduling import PATIENCE, PROMPT, SLICE, Gate, Rig, reference, text

ENDLESS = Sampling(temperature=0, logit_bias=dict.fromkeys(FakeEngine().vocab.eog, -1e9))
OTHER = text(40, seed=8)


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


@pytest.fixture
def engine() -> SlowLoads:
    return SlowLoads()


@pytest.fixture
def rig(tmp_path: Path, engine: SlowLoads):
    with Rig(tmp_path, engine, prefill_slice=SLICE) as rig:
        yield rig


def test_others_go_on_while_state_is_loaded(rig, engine):
    answer = rig.run(PROMPT).answer
    gate = Gate(engine, holds=lambda step: step == 4)
    writing = rig.start(OTHER, sampling=ENDLESS, max_new=30)
    gate.reached()
    begin = len(engine.steps)
    found = rig.start(PROMPT, from_store=True)
    gate.open()
    assert found.wait().answer == answer
    assert found.lookup.reused_tokens == len(PROMPT) - 1
    first = next(number for number, step in enumerate(engine.steps[begin:]) if len(step) > 1)
    assert first >= SlowLoads.STEPS
    assert writing.wait().answer == reference(OTHER, sampling=ENDLESS, max_new=30)


def test_who_is_alone_does_not_wait_for_others(rig, engine):
    """The device is told at once, and does one after the other."""
    answer = rig.run(PROMPT).answer
    assert rig.run(PROMPT, from_store=True).answer == answer


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


def test_each_tier_has_answers_and_a_fingerprint_of_its_own() -> None:
    assert engine_of(FLASH).fingerprint != engine_of(PLAIN).fingerprint
    assert expected(PROMPT, FLASH) != expected(PROMPT, PLAIN)


def test_nothing_that_another_tier_computed_is_used(tmp_path: Path) -> None:
    with Rig(tmp_path, engine_of()) as rig:
        first = rig.run(PROMPT)
        switch(rig, PLAIN)
        other = rig.run(PROMPT)
        assert first.answer == expected(PROMPT, FLASH)
        assert other.answer == expected(PROMPT, PLAIN)
        assert other.lookup.cached_tokens == 0
        assert other.lookup.reason is MissReason.OTHER_MODEL


def test_what_the_other_tier_computes_is_reused_in_the_engine_and_not_stored(tmp_path: Path) -> None:
    with Rig(tmp_path, engine_of()) as rig:
        switch(rig, PLAIN)
        answer = rig.run(PROMPT).answer
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
