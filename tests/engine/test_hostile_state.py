"""Stored bytes that are not what they were: llama.cpp believes what it is given, so it is never given them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest

from emberkeep.engine.base import Outcome
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.kv_layout import cell_count
from emberkeep.errors import EngineError
from helpers.chance import seed, times
from helpers.engines import KINDS, SNAPSHOT_KINDS, TOKENS, evaluate, exported

pytestmark = pytest.mark.slow

START, END = 10, 30


@pytest.fixture
def open_engine(open_either_way):
    return open_either_way


@dataclass(frozen=True)
class Case:
    """A payload of a state, and where it belongs: into sequence 1, which then ends at `start`."""

    engine: LlamaEngine
    payload: memoryview
    skeleton: np.ndarray
    start: int

    def bring_in(self, payload: memoryview) -> Outcome:
        if self.start == END:
            return self.engine.import_snapshot(1, END, payload)
        return self.engine.import_kv(1, START, END, [payload], START)

    def refuses(self, payload: memoryview) -> None:
        self.prepare()
        with pytest.raises(EngineError):
            self.bring_in(payload)

    def prepare(self) -> None:
        self.engine.trim(1, 0)
        before = exported(self.engine, 0, 0, self.start)
        assert self.engine.import_kv(1, 0, self.start, [before], 0) is Outcome.DONE


@pytest.fixture(params=KINDS)
def engine(request, open_engine) -> LlamaEngine:
    engine = open_engine(request.param, cells=512, sequences=2)
    evaluate(engine, 0, 0, END)
    return engine


def cases(engine: LlamaEngine) -> Iterator[Case]:
    unit = engine.capabilities.kv_unit
    if unit.has_ranges:
        yield Case(engine, exported(engine, 0, START, END), range_skeleton(engine), START)
    if unit.has_snapshots:
        snapshot = engine.export_snapshot(0)
        yield Case(engine, snapshot, snapshot_skeleton(engine, snapshot), END)


def range_skeleton(engine: LlamaEngine) -> np.ndarray:
    layout, cells = engine._context.layout, END - START
    mask = np.ones(layout.range_bytes(cells), np.uint8)
    mark_attention(mask[8:], layout.ranges, cells)
    return np.flatnonzero(mask)


def snapshot_skeleton(engine: LlamaEngine, snapshot: memoryview) -> np.ndarray:
    layout = engine._context.layout
    cells = cell_count(np.frombuffer(snapshot, np.uint8)[8:]) if layout.windows else 0
    mask = np.ones(len(snapshot), np.uint8)
    offset = 8 + mark_attention(mask[8:], layout.windows, cells)
    for _, row in layout.recurrent.tensors if layout.recurrent else ():
        start = offset + 20 + 12
        mask[start : start + row] = 0
        offset += 12 + row
    return np.flatnonzero(mask)


def mark_attention(mask: np.ndarray, parts, cells: int) -> int:
    """Rows, and what llama.cpp ignores or takes as data in cells, are no skeleton."""
    offset = 0
    for part in parts:
        part.cells(mask[offset:], cells)[:, 2:] = 0
        for _, rows in part.rows(mask[offset:], cells):
            rows[:] = 0
        offset += part.size(cells)
    return offset


def changed(payload: memoryview, offset: int, flip: int) -> memoryview:
    data = np.frombuffer(payload, np.uint8).copy()
    data[offset] ^= flip
    return memoryview(data)


def test_a_flipped_byte_in_the_skeleton_is_refused(engine):
    for case in cases(engine):
        for offset in case.skeleton.tolist():
            case.refuses(changed(case.payload, offset, 0x11))
        case.prepare()
        assert case.bring_in(case.payload) is Outcome.DONE


def test_bytes_at_random_are_refused_or_data(engine):
    """Nothing that can be done to a payload makes llama.cpp stop the process or read beyond it."""
    random = np.random.default_rng(seed(1))
    for case in cases(engine):
        data = bytes(case.payload)
        broken = [data[: random.integers(len(data))] for _ in range(times(40))]
        broken += [data + random.bytes(random.integers(1, 200)) for _ in range(times(10))]
        broken += [random.bytes(len(data)), data[8:], data[:8] + data[16:], data[:8] + data]
        for piece in broken:
            case.refuses(memoryview(piece))
        for offset in random.integers(len(data), size=times(60)).tolist():
            case.prepare()
            with suppress(EngineError):
                case.bring_in(changed(case.payload, offset, int(random.integers(1, 256))))


@pytest.mark.parametrize("kind", SNAPSHOT_KINDS)
def test_payloads_of_other_kinds_of_models_are_refused(open_engine, kind):
    engine = open_engine(kind)
    for other in KINDS.keys() - {kind}:
        source = open_engine(other)
        evaluate(source, 0, 0, END)
        unit = source.capabilities.kv_unit
        if unit.has_ranges:
            with pytest.raises(EngineError):
                engine.import_kv(0, 0, END, [exported(source, 0, 0, END)], 0)
        if unit.has_snapshots and not engine.capabilities.kv_unit.has_ranges:
            with pytest.raises(EngineError):
                engine.import_snapshot(0, END, source.export_snapshot(0))
    assert np.isfinite(evaluate(engine, 0, 0, 20, TOKENS)).all()


def test_an_unknown_layout_is_not_kept(open_engine, monkeypatch):
    def unknown(*_: object) -> None:
        raise EngineError("unknown")

    monkeypatch.setattr("emberkeep.engine.llamacpp.learning.learn_layout", unknown)
    engine = open_engine()
    evaluate(engine, 0, 0, 20)
    assert engine.capabilities.snapshot_bytes == engine.capabilities.kv_bytes_per_token == 0
    with pytest.raises(EngineError):
        engine.export_snapshot(0)
    with pytest.raises(EngineError):
        engine.import_snapshot(1, 20, memoryview(b""))
