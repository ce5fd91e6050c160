"""State that is still on its way to the device holds up nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from emberkeep.engine.base import Outcome, Payload, Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.types.sampling import Sampling
from helpers.scheduling import PROMPT, SLICE, Gate, Rig, reference, text

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
