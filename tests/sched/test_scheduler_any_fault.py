"""Any method may fail at any time, with any error: one request fails, and nothing wrong stays behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from emberkeep.engine.base import Engine, KvUnit, Rows
from emberkeep.errors import EngineError, StepFailed
from emberkeep.kv.store import KvStore
from emberkeep.sched.admission import Calibration
from emberkeep.sched.moved_state import CacheBlend, ContextShift
from emberkeep.sched.prefix_cache import PrefixCache
from emberkeep.sched.sampling import Sampler
from emberkeep.sched.sequence_state import SequenceOutput
from emberkeep.sched.slots import SlotAffinity
from emberkeep.sched.steps import Planner
from emberkeep.types.request import Sampling
from helpers.chance import times
from helpers.faulty_crowd import (
    ERRORS,
    SHARED,
    Crowd,
    Faults,
    answers_again,
    crowd_of,
    leaks,
    methods,
    new_rig,
    prepare,
)
from helpers.scheduling import Rig

pytestmark = pytest.mark.usefixtures("quick_disk")

CALLS = range(1, 1 + times(2))
UNITS = [KvUnit.RANGE, KvUnit.BOTH]
PARTS: dict[type, Callable[[Rig], object]] = {
    Engine: lambda rig: rig.engine,
    KvStore: lambda rig: rig.store,
    PrefixCache: lambda rig: rig.scheduler._parts.cache,
    CacheBlend: lambda rig: rig.scheduler._parts.cache.blend,
    ContextShift: lambda rig: rig.scheduler._parts.cache.shift,
    Planner: lambda rig: rig.scheduler._steps._planner,
    SlotAffinity: lambda rig: rig.scheduler._slots._affinity,
    Calibration: lambda rig: rig.scheduler.calibration,
}
"""Whatever does something for one sequence."""
NEVER_FAIL = {
    (Calibration, "stats"),
    (PrefixCache, "release"),
    (SlotAffinity, "forget"),
    (Engine, "payload_buffer"),
    (Engine, "improve"),
    (Engine, "rest"),
    (Engine, "step_seconds"),
    (KvStore, "read_into"),
    (KvStore, "resize_ram"),
    *(
        (KvStore, name)
        for name in ("beginning", "bring_in", "forget_here", "prefetch", "resumable", "share", "was_late")
    ),
}
"""Cleaning up, requests that this test does not make, what no sequence asks for, and what only hosts do that share
their state."""
PLACES = [(part, name) for part in PARTS for name in methods(part) if (part, name) not in NEVER_FAIL]


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Callable[[KvUnit], Path]:
    """A folder of its own for every caller, with the same in it."""
    prepared: dict[KvUnit, Path] = {}

    def copied(unit: KvUnit) -> Path:
        if unit not in prepared:
            prepared[unit] = tmp_path_factory.mktemp(unit)
            prepare(prepared[unit], unit)
        folder = tmp_path_factory.mktemp("kv")
        shutil.copytree(prepared[unit], folder, dirs_exist_ok=True)
        return folder

    return copied


@contextmanager
def watched(folder: Path, unit: KvUnit) -> Iterator[tuple[Rig, Crowd, dict[type, Faults]]]:
    """A rig that is closed whatever happens, with everything in it that may fail."""
    with new_rig(folder, unit) as rig:
        faults = {part: Faults(of(rig), methods(part)) for part, of in PARTS.items()}
        yield rig, crowd_of(rig), faults


def run(crowd: Crowd, faults: dict[type, Faults]) -> None:
    for fault in faults.values():
        fault.is_armed = True
    crowd.run()
    for fault in faults.values():
        fault.is_armed = False


def check(rig: Rig, crowd: Crowd) -> None:
    """One failed at most, all others got the answer of an engine without faults, and nothing is held."""
    assert all(asked.is_right() for asked in crowd.asked)
    assert sum(asked.recorder.error is not None for asked in crowd.asked) <= 1
    assert leaks(rig) == []
    assert answers_again(rig) == []
    assert rig.scheduler.failure() is None


def fails(stored, unit: KvUnit, part: type, name: str, at: int, error: Exception, *, restart: bool) -> bool:
    """Whether the method was called that often."""
    folder = stored(unit)
    with watched(folder, unit) as (rig, crowd, faults):
        faults[part].fail(name, at, error)
        run(crowd, faults)
        check(rig, crowd)
    if restart:
        with new_rig(folder, unit) as again:
            assert answers_again(again) == []
    shutil.rmtree(folder)
    return faults[part].has_failed


def test_the_crowd_comes_by_everything_that_may_fail(stored):
    """A method that is new is either called here, or named among those that the loop does not call."""
    called: set[tuple[type, str]] = set()
    for unit in UNITS:
        with watched(stored(unit), unit) as (rig, crowd, faults):
            run(crowd, faults)
            assert all(asked.recorder.error is None for asked in crowd.asked)
            check(rig, crowd)
            called |= {(part, name) for part, fault in faults.items() for name in fault.calls}
    assert set(PLACES) - called == set()


@pytest.mark.parametrize(("part", "name"), PLACES)
def test_one_request_fails_at_most_and_nothing_is_left_behind(stored, part: type, name: str) -> None:
    assert any(fails(stored, unit, part, name, 1, RuntimeError("injected"), restart=False) for unit in UNITS)


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("part", "name"), PLACES)
def test_the_same_at_any_call_with_any_error(stored, unit: KvUnit, part: type, name: str) -> None:
    for error in ERRORS:
        for at in CALLS:
            if not fails(stored, unit, part, name, at, error, restart=True):
                break


@pytest.mark.parametrize("name", [name for name in methods(SequenceOutput) if name != "failed"])
def test_a_consumer_that_fails_is_told_alone(stored, name: str) -> None:
    with watched(stored(KvUnit.RANGE), KvUnit.RANGE) as (rig, crowd, faults):
        special = {"kept_tokens": crowd.asked[5], "progress": crowd.asked[6], "scored": crowd.asked[7]}
        asked = special.get(name, crowd.asked[2])
        consumer = Faults(asked.recorder, methods(SequenceOutput))
        consumer.fail(name, 1, RuntimeError("injected"))
        consumer.is_armed = True
        run(crowd, faults)
        assert consumer.has_failed
        assert isinstance(asked.recorder.error, EngineError)
        check(rig, crowd)


def test_who_could_not_be_told_is_told_again_and_nothing_of_foreign_errors(stored) -> None:
    with watched(stored(KvUnit.RANGE), KvUnit.RANGE) as (rig, crowd, faults):
        faults[Engine].fail("evaluate", 1, RuntimeError("/home/secret"))
        consumer = Faults(crowd.asked[0].recorder, methods(SequenceOutput))
        consumer.fail("failed", 1, MemoryError("injected"))
        consumer.is_armed = True
        run(crowd, faults)
        assert consumer.has_failed
        assert isinstance(crowd.asked[0].recorder.error, EngineError)
        assert "secret" not in str(crowd.asked[0].recorder.error)
        check(rig, crowd)


def test_a_sampler_that_fails_concerns_its_own_request(stored) -> None:
    with watched(stored(KvUnit.RANGE), KvUnit.RANGE) as (rig, crowd, faults):
        # One that wants to see the logits: what is likeliest the engine tells by itself.
        crowd.asked[2].sequence.sampler = Sampler(Sampling(temperature=0), top_logprobs=0)
        sampler = Faults(crowd.asked[2].sequence.sampler, methods(Sampler))
        sampler.fail("sample", 2, MemoryError("injected"))
        sampler.is_armed = True
        run(crowd, faults)
        assert crowd.asked[2].recorder.error is not None
        check(rig, crowd)


def test_one_that_fails_whenever_it_takes_part_in_a_step_does_not_end_the_others(stored) -> None:
    """As one whose slice needs more memory than there is: alone it fails too, and the others never notice."""

    def is_its_own(rows: Rows) -> bool:
        tokens = bad.sequence.prompt.tokens[rows.start : rows.start + len(rows.tokens)]
        is_prompt = len(tokens) > 1 and rows.start + len(tokens) > len(SHARED)
        return is_prompt and np.array_equal(rows.tokens, tokens)

    def run_out_of_memory(batch: Sequence[Rows]) -> None:
        if any(is_its_own(rows) for rows in batch):
            raise StepFailed("out of memory")

    for unit in UNITS:
        with watched(stored(unit), unit) as (rig, crowd, faults):
            bad = crowd.asked[3]
            rig.engine.on_evaluate = run_out_of_memory
            run(crowd, faults)
            rig.engine.on_evaluate = None
            assert isinstance(bad.recorder.error, StepFailed)
            check(rig, crowd)
