"""State of a context with flash attention in one without it, and back: what was computed does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from emberkeep.engine.base import Outcome
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.kv_layout import HEAD_BYTES, Attention, Layout, cell_count, counterpart
from emberkeep.errors import EngineError
from helpers.engines import KINDS, RANGE_KINDS, always, evaluate, exported, same

Open = Callable[..., LlamaEngine]
BORDERS = (0, 40, 41, 100)
END = BORDERS[-1]
WITH_VALUES = [kind for kind in KINDS if kind not in ("latent", "indexed", "recurrent")]
"""Latent ones hold keys only, and recurrent ones no attention at all."""


@pytest.fixture(params=[True, False], ids=["to without", "to with"])
def source_flash(request) -> bool:
    """How the state is computed that is then imported in the other way."""
    return request.param


def now(open_engine: Open, kind: str, flash: bool) -> LlamaEngine:
    """An engine with a choice that has come to this way."""
    engine = open_engine(kind, tables=always(flash))
    evaluate(engine, 0, 0, 2)
    engine.trim(0, 0)
    assert (engine._switch.has_choice, engine._switch.flash) == (True, flash)
    return engine


def bring_in(engine: LlamaEngine, ranges: list[memoryview], snapshot: memoryview | None) -> None:
    for start, end, payload in zip(BORDERS, BORDERS[1:], ranges, strict=False):
        assert engine.import_kv(0, start, end, [payload], start) is Outcome.DONE
    if snapshot is not None:
        assert engine.import_snapshot(0, END, snapshot) is Outcome.DONE


def taken_out(engine: LlamaEngine) -> tuple[list[memoryview], memoryview | None]:
    has_snapshots = engine.capabilities.kv_unit.has_snapshots
    return engine.export_kv(0, BORDERS).payloads(), engine.export_snapshot(0) if has_snapshots else None


def carried_over(
    open_engine: Open, kind: str, flash: bool
) -> tuple[list[memoryview], memoryview | None, LlamaEngine]:
    """State that was computed in this way, and an engine of the other way that has imported it."""
    source = open_engine(kind, flash=flash)
    evaluate(source, 0, 0, END)
    ranges, snapshot = taken_out(source)
    other = now(open_engine, kind, not flash)
    bring_in(other, ranges, snapshot)
    return ranges, snapshot, other


def numbers(layout: Layout, payload: memoryview, *, is_snapshot: bool = False) -> Iterator[np.ndarray]:
    """Cells, keys and values of each layer, by position, and what is recurrent."""
    state, offset = np.frombuffer(payload, np.uint8), HEAD_BYTES
    for part in layout.windows if is_snapshot else layout.ranges:
        cells = cell_count(state[offset:])
        table = part.cells(state[offset:], cells)
        order = np.argsort(table[:, 0])
        yield table[order]
        yield from (rows[:, order] for _, rows in part.rows(state[offset:], cells))
        offset += part.size(cells)
    yield state[offset:]


def have_same_numbers(
    own: LlamaEngine, mine: memoryview, theirs: memoryview, *, is_snapshot: bool = False
) -> bool:
    """`mine` was exported by `own`, `theirs` in the other way."""
    layout, other = own._context.layout, own._context._other_layout
    assert layout is not None
    assert other is not None
    ours = numbers(layout, mine, is_snapshot=is_snapshot)
    return all(
        np.array_equal(a, b) for a, b in zip(ours, numbers(other, theirs, is_snapshot=is_snapshot), strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_the_other_way_and_comes_back_as_it_was(
    open_engine: Open, kind: str, source_flash: bool
) -> None:
    ranges, snapshot, other = carried_over(open_engine, kind, source_flash)
    ranges_there, snapshot_there = taken_out(other)
    back = now(open_engine, kind, source_flash)
    bring_in(back, ranges_there, snapshot_there)
    for there, here in zip(ranges_there, ranges, strict=True):
        assert not other._context.unit.has_ranges or have_same_numbers(other, there, here)
    if snapshot is not None:
        assert have_same_numbers(other, snapshot_there, snapshot, is_snapshot=True)
    assert taken_out(back) == (ranges, snapshot)
    if kind in WITH_VALUES:
        assert (ranges_there, snapshot_there) != (ranges, snapshot)


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_as_it_would_have(open_engine: Open, kind: str, source_flash: bool) -> None:
    """Up to the rounding of the other way, from which the next token differs by far more."""
    source = open_engine(kind, flash=source_flash)
    evaluate(source, 0, 0, END)
    other = now(open_engine, kind, not source_flash)
    bring_in(other, *taken_out(source))
    found, expected = evaluate(other, 0, END, END + 8), evaluate(source, 0, END, END + 8)
    assert same(other, found, expected)
    assert not same(other, found, evaluate(source, 0, END + 8, END + 9))


def test_a_part_of_a_range_of_the_other_way_can_be_imported(open_engine: Open, source_flash: bool) -> None:
    """And what was given stays as it is."""
    source, other = open_engine(flash=source_flash), now(open_engine, "dense", not source_flash)
    evaluate(source, 0, 0, END)
    payload = exported(source, 0, 0, END)
    before = bytes(payload)
    assert other.import_kv(0, 0, 30, [payload], 0) is Outcome.DONE
    assert bytes(payload) == before
    assert other.import_kv(0, 30, 70, [exported(source, 0, 20, END)], 20) is Outcome.DONE
    assert have_same_numbers(other, exported(other, 0, 0, 70), exported(source, 0, 0, 70))


# ── packed ──


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", [*RANGE_KINDS, "hybrid", "sliding window"])
def test_packed_state_has_the_same_rows_in_both_ways(
    open_engine: Open, kind: str, bits: int, source_flash: bool
) -> None:
    source = open_engine(kind, flash=source_flash)
    evaluate(source, 0, 0, END)
    (payload,) = source.export_kv(0, (0, END), bits).payloads()
    same_way, other = open_engine(kind, flash=source_flash), now(open_engine, kind, not source_flash)
    for engine in (same_way, other):
        assert engine.import_kv(0, 0, END, [payload], 0) is Outcome.DONE
    assert have_same_numbers(other, exported(other, 0, 0, END), exported(same_way, 0, 0, END))


# ── what is refused ──


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "recurrent"])  # whose state is the same
def test_state_of_the_other_way_is_refused_without_a_choice(
    open_engine: Open, kind: str, source_flash: bool
) -> None:
    source, fixed = open_engine(kind, flash=source_flash), open_engine(kind, flash=not source_flash)
    evaluate(source, 0, 0, END)
    with pytest.raises(EngineError, match="another model layout"):
        fixed.import_kv(0, 0, END, [exported(source, 0, 0, END)], 0)


@pytest.mark.parametrize("kind", [kind for kind in WITH_VALUES if kind != "hybrid window"])
def test_a_range_that_claims_to_be_of_the_other_way_is_refused(
    open_engine: Open, kind: str, source_flash: bool
) -> None:
    """One bit says which of both it is; what follows must agree with it."""
    source, target = open_engine(kind, flash=source_flash), now(open_engine, kind, source_flash)
    evaluate(source, 0, 0, END)
    payload = np.frombuffer(exported(source, 0, 0, END), np.uint8).copy()
    payload[HEAD_BYTES + 8 + END * source._context.layout.ranges[0].cell_bytes] ^= 1
    with pytest.raises(EngineError, match="another model layout"):
        target.import_kv(0, 0, END, [memoryview(payload)], 0)


@pytest.mark.parametrize("kind", ["sliding window", "hybrid window"])
def test_a_snapshot_that_claims_to_be_of_the_other_way_is_refused(
    open_engine: Open, kind: str, source_flash: bool
) -> None:
    source, target = open_engine(kind, flash=source_flash), now(open_engine, kind, source_flash)
    evaluate(source, 0, 0, END)
    snapshot = np.frombuffer(source.export_snapshot(0), np.uint8).copy()
    cells = cell_count(snapshot[HEAD_BYTES:])
    snapshot[HEAD_BYTES + 8 + cells * source._context.layout.windows[0].cell_bytes] ^= 1
    target.import_kv(0, 0, END, [exported(source, 0, 0, END)], 0)
    with pytest.raises(EngineError, match="another model layout"):
        target.import_snapshot(0, END, memoryview(snapshot))


def test_anything_at_all_is_of_one_way_or_the_other(open_engine: Open, source_flash: bool) -> None:
    """Which way bytes are in is asked before they are checked."""
    engine = now(open_engine, "dense", source_flash)
    layouts, random = engine._context.layouts, np.random.default_rng(0)
    for length in [*range(80), 1000]:
        for state in (random.integers(256, size=length), np.zeros(length), np.full(length, 255)):
            assert layouts.of(state.astype(np.uint8)) in (layouts.own, layouts.other)
            with suppress(EngineError):
                engine.import_kv(0, 0, 1, [memoryview(state.astype(np.uint8))], 0)
                pytest.fail("was imported")


# ── where there is no other way ──


def test_quantised_values_have_no_other_way(open_engine: Open) -> None:
    engine = open_engine("wide", kv_type="q8_0", tables=always(False))
    assert counterpart(engine._context.layout) is None
    assert not engine._switch.has_choice
    evaluate(engine, 0, 0, 20)
    assert engine.stats()["flash_attention"] == "on"
    assert engine.fingerprint == open_engine("wide", kv_type="q8_0").fingerprint


def test_a_layout_that_is_not_as_it_should_be_is_no_choice(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with flash attention then and stays so, with the fingerprint of that."""
    import emberkeep.engine.llamacpp.learning as module

    probe = module.probe_layout
    layouts = []

    def odd(*arguments: object) -> Layout:
        layouts.append(probe(*arguments))
        part: Attention = layouts[-1].ranges[0]
        return layouts[-1] if len(layouts) == 1 else replace(layouts[-1], ranges=(replace(part, extra=b"?"),))

    with monkeypatch.context() as patch:
        patch.setattr(module, "probe_layout", odd)
        engine = open_engine(tables=always(False))
    assert len(layouts) == 2
    evaluate(engine, 0, 0, 20)
    assert engine.stats()["flash_attention"] == "on"
    assert engine.capabilities.wide_rows is not None
    assert engine.fingerprint == open_engine().fingerprint
