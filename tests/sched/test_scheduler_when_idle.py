"""What needs the engine for itself waits for running sequences, and new sequences wait for it."""

from __future__ import annotations

import threading

import pytest

from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError, Overloaded
from helpers.scheduling import LONG, PATIENCE, PROMPT, Gate, Rig, reference, text

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
    for seed in range(12):
        recorders.append(rig.start(text(300, seed=seed)))
        emptied.append(rig.scheduler.when_idle(lambda: rig.scheduler.stats()["resident_tokens"]))
    assert [recorder.answer for recorder in recorders] == [reference(text(300, seed=seed)) for seed in range(12)]
    assert [future.result(PATIENCE) for future in emptied] == [0] * 12


def test_it_happens_at_once_when_nothing_runs(rig: Rig) -> None:
    assert rig.scheduler.when_idle(lambda: "done").result(PATIENCE) == "done"


def test_the_engine_is_empty_and_what_it_held_comes_back_from_the_store(rig: Rig) -> None:
    first = rig.run(PROMPT)
    assert rig.scheduler.stats()["resident_tokens"] > 0
    assert rig.scheduler.when_idle(lambda: rig.scheduler.stats()["resident_tokens"]).result(PATIENCE) == 0
    turn = [*PROMPT, *first.answer, *OTHER]
    again = rig.run(turn)
    assert again.lookup.hot_tokens == 0
    assert again.lookup.reused_tokens >= len(PROMPT) + len(first.answer)
    assert again.answer == reference(turn)


def test_several_happen_in_order(rig: Rig, engine: FakeEngine) -> None:
    gate, order = Gate(engine), list[int]()
    rig.start(PROMPT)
    gate.reached()
    futures = [rig.scheduler.when_idle(lambda number=number: order.append(number)) for number in range(3)]
    gate.open()
    for future in futures:
        future.result(PATIENCE)
    assert order == [0, 1, 2]


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
