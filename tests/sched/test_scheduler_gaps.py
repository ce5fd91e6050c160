"""What only makes later work quicker is done when nothing waits, and memory is given back when nothing has run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError
from emberkeep.sched import steps as module
from helpers.scheduling import PATIENCE, Recorder, Rig
from helpers.waiting import eventually

PROMPT = list(range(40, 90))


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
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rig, Improving]]:
    monkeypatch.setattr(module, "GAP_S", 0.01)
    monkeypatch.setattr(module, "REST_S", 0.01)
    engine = Improving()
    with Rig(tmp_path, engine) as opened:
        yield opened, engine


def answer(rig: Rig) -> Recorder:
    recorder = Recorder()
    rig.scheduler.submit(rig.sequence(PROMPT, recorder, max_new=4))
    return recorder.wait()


def test_an_engine_is_improved_in_gaps_until_it_says_that_all_is_done(rig: tuple[Rig, Improving]) -> None:
    opened, engine = rig
    assert engine.improved.wait(PATIENCE)
    answer(opened)
    assert engine.rested.wait(PATIENCE)
    assert engine.calls == 3


@pytest.mark.parametrize("error", [EngineError("injected"), MemoryError("injected")])
def test_what_fails_in_a_gap_fails_no_request(rig: tuple[Rig, Improving], error: Exception) -> None:
    opened, engine = rig
    engine.error = error
    assert engine.rested.wait(PATIENCE)
    first = answer(opened)
    engine.rested.clear()
    assert engine.rested.wait(PATIENCE)
    assert answer(opened).tokens == first.tokens
    assert opened.scheduler.failure() is None


@pytest.mark.parametrize(("cells", "kept"), [(None, 112), (112, 112), (111, 58), (57, 0)])
def test_conversations_that_would_hold_memory_are_given_up_and_the_latest_stays(
    rig: tuple[Rig, Improving], cells: int | None, kept: int
) -> None:
    opened, engine = rig
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
def test_what_is_given_up_later_is_given_back_too(rig: tuple[Rig, Improving], is_forgotten: bool) -> None:
    opened, engine = rig
    answer(opened)
    assert engine.rested.wait(PATIENCE)
    engine.rested.clear()
    scheduler = opened.scheduler
    (scheduler.forget({""}) if is_forgotten else scheduler.drop_idle([], 0.0)).result(PATIENCE)
    assert engine.rested.wait(PATIENCE)


def test_an_engine_that_is_as_quick_as_it_can_be_keeps_its_conversation(rig: tuple[Rig, Improving]) -> None:
    opened, engine = rig
    engine.can_improve = False
    answer(opened)
    assert engine.rested.wait(PATIENCE)
    assert engine.calls == 0
    assert opened.scheduler.call(lambda: len(opened.scheduler._slots.idle)).result(PATIENCE) == 1
