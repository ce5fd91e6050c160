"""A loop that ends by an error of its own: every request is told at once. And what it waits for may never come."""

from __future__ import annotations

from operator import attrgetter

import pytest

from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError
from emberkeep.sched.engine_thread import EngineThread
from helpers.kv_building import check_ledger
from helpers.scheduling import PATIENCE, PROMPT, Gate, HeldDisk, Rig, no_pins, reference, text
from helpers.waiting import eventually

SKELETON = ["_take_commands", "_has_work", "_act_when_idle", "_admit", "_steps", "after_step", "_check_slots"]


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
    for told in (running, waiting):
        assert "has failed" in str(told.wait().error)
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

    def once() -> None:
        woken.append(1)
        if len(woken) == 1:
            raise MemoryError

    rig.scheduler._admit = breaks(RuntimeError("a bug"))
    rig.scheduler.after_step = once
    told = rig.start(PROMPT).wait()
    rig.scheduler._running.result(PATIENCE)
    assert told.error is not None
    assert len(woken) == 2
    rig.close()


def test_a_flush_that_fails_once_harms_no_request() -> None:
    with Rig() as rig:
        failed = []

        def once() -> None:
            if not failed:
                failed.append(1)
                raise MemoryError

        rig.scheduler.after_step = once
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
