"""Between two steps all state goes into a context with the other kind of attention, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count as counted
from itertools import pairwise

import numpy as np
import pytest

from emberkeep.engine.base import Outcome, Rows
from emberkeep.engine.llamacpp import context
from emberkeep.engine.llamacpp import live_context as module
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import Adapter
from emberkeep.errors import EngineError
from helpers import tiny_gguf
from helpers.engines import KINDS, SNAPSHOT_KINDS, TOKENS, always, evaluate, exported, few_with_flash, same

Open = Callable[..., LlamaEngine]
OTHER = TOKENS[::-1].copy()
TEXTS = [TOKENS, OTHER, TOKENS[300:].copy(), OTHER[300:].copy()]
"""Of sequence 0, 1, ..."""
Step = Sequence[tuple[int, int]]
"""Sequences, and how many tokens each goes on by. One of a single row is computed with flash attention."""


def is_with(engine: LlamaEngine) -> bool:
    return engine.stats()["flash_attention"] == "on"


def changes(engine: LlamaEngine) -> object:
    return engine.stats()["flash_attention_changes"]


class Moved:
    """What an engine with both ways must equal: one of each, and state that is exported and imported by hand."""

    def __init__(self, open_engine: Open, kind: str, **settings: object) -> None:
        self._open = lambda flash: open_engine(kind, tables=always(flash), **settings)
        self.engine = self._open(True)
        self._flash = True

    def evaluate(self, batch: Sequence[Rows]) -> None:
        flash = sum(len(rows.tokens) for rows in batch) == 1
        if flash != self._flash:
            self._flash, source = flash, self.engine
            self.engine = self._come_to(flash)
            for sequence in range(len(TEXTS)):
                move(source, self.engine, sequence)
        assert self.engine.evaluate(batch) is Outcome.DONE
        assert is_with(self.engine) == flash

    def _come_to(self, flash: bool) -> LlamaEngine:
        """An empty engine that is in this way. The way in which it begins is left while it is empty."""
        engine = self._open(flash)
        if not flash:
            engine._context.change_attention()
        return engine


def move(source: LlamaEngine, target: LlamaEngine, sequence: int) -> None:
    if end := source._context.cells[sequence].end:
        assert target.import_kv(sequence, 0, end, [exported(source, sequence, 0, end)], 0) is Outcome.DONE
        if source.capabilities.kv_unit.has_snapshots:
            assert target.import_snapshot(sequence, end, source.export_snapshot(sequence)) is Outcome.DONE


def batch_of(step: Step, ends: dict[int, int], outputs: int = 1) -> list[Rows]:
    """Moves `ends` on."""
    batch = []
    for sequence, count in step:
        start = ends.get(sequence, 0)
        ends[sequence] = start + count
        batch.append(Rows(sequence, start, TEXTS[sequence][start : start + count], min(outputs, count)))
    return batch


def whole(engine: LlamaEngine, sequence: int) -> tuple[bytes, bytes]:
    """Ranges and snapshot."""
    if not (end := engine._context.cells[sequence].end):
        return b"", b""
    has_snapshots = engine.capabilities.kv_unit.has_snapshots
    snapshot = bytes(engine.export_snapshot(sequence)) if has_snapshots else b""
    return bytes(exported(engine, sequence, 0, end)), snapshot


def assert_equal(engine: LlamaEngine, other: LlamaEngine, batch: Sequence[Rows] = ()) -> None:
    """Of the logits of the latest step, and of every byte of all sequences."""
    for index, rows in enumerate(batch):
        for row in range(rows.outputs):
            assert np.array_equal(engine.logits(index, row), other.logits(index, row))
    for sequence in range(len(TEXTS)):
        assert whole(engine, sequence) == whole(other, sequence)


HISTORIES: dict[str, list[Step]] = {
    "between prompt and answer": [[(0, 100)], [(0, 1)], [(0, 1)]],
    "in the middle of a prompt": [[(0, 64)], [(0, 1)], [(0, 64)], [(0, 30)], [(0, 1)]],
    "while decoding": [[(0, 1)]] * 30 + [[(0, 1), (1, 20)]] + [[(0, 1)]] * 3 + [[(0, 1), (1, 1)]] * 3,
    "with several": [
        [(0, 40), (1, 30)],
        [(2, 1)],
        [(0, 5), (2, 20), (3, 9)],
        [(3, 1)],
        [(1, 1)],
        [(0, 2), (1, 1)],
    ],
}


@pytest.mark.parametrize("steps", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_go_on_as_if_moved_by_hand(open_engine: Open, kind: str, steps: list[Step]) -> None:
    engine, moved = open_engine(kind, tables=few_with_flash()), Moved(open_engine, kind)
    ends: dict[int, int] = {}
    ways = []
    for step in steps:
        batch = batch_of(step, ends)
        assert engine.evaluate(batch) is Outcome.DONE
        moved.evaluate(batch)
        ways.append(is_with(engine))
        assert_equal(engine, moved.engine, batch)
    assert ways == [sum(count for _, count in step) == 1 for step in steps]
    assert changes(engine) == sum(before != after for before, after in pairwise([True, *ways])) > 0
    assert engine._context.cells.used == sum(ends.values())


def test_drafts_are_taken_back_across_changes(open_engine: Open) -> None:
    """A step with drafts is one of many rows; what is not accepted of it is trimmed before the next."""
    engine, moved = open_engine(tables=few_with_flash()), Moved(open_engine, "dense")
    ends = {0: 0}
    for count, kept in ((50, 50), (1, 1), (5, 2), (4, 4), (1, 1), (6, 1), (1, 1)):
        start = ends[0]
        batch = batch_of([(0, count)], ends, outputs=count)
        assert engine.evaluate(batch) is Outcome.DONE
        moved.evaluate(batch)
        assert_equal(engine, moved.engine, batch)
        ends[0] = start + kept
        for each in (engine, moved.engine):
            each.trim(0, ends[0])
        assert engine._context.cells.used == ends[0]
    assert changes(engine) == 6


@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "shared"])
def test_what_was_moved_can_be_spliced(open_engine: Open, is_shared: bool) -> None:
    engine, moved = open_engine(tables=few_with_flash()), Moved(open_engine, "dense")
    ends: dict[int, int] = {}
    for step in ([(0, 200)], [(1, 1)], [(1, 40)], [(1, 1)]):
        batch = batch_of(step, ends)
        engine.evaluate(batch)
        moved.evaluate(batch)
    for each in (engine, moved.engine):
        if is_shared:
            each.copy_kv(0, 2, 150)
        assert each.splice(0, 20, 120, OTHER[:10]) is Outcome.DONE
    assert_equal(engine, moved.engine)
    step = [Rows(0, 110, TOKENS[:8], outputs=1)]  # and changes with a splice behind it
    engine.evaluate(step)
    assert not is_with(engine)
    assert engine._context.cells.used == 118 + 42 + (150 - 20 if is_shared else 0)
    assert not is_shared or whole(engine, 2)[0] == bytes(exported(engine, 2, 0, 150))


# ── what is shared ──


def room(engine: LlamaEngine) -> int:
    """How many cells are free, found by taking them."""
    free = engine.capabilities.cells - engine._context.cells.used
    is_less = free > 0 and not engine._decode([Rows(7, 0, np.resize(TOKENS, free), outputs=0)])
    is_more = not is_less and engine._decode([Rows(6, 0, TOKENS[:1], outputs=0)])
    for sequence in (7, 6):
        engine.trim(sequence, 0)
    assert not is_less
    assert not is_more
    return free


def shared_family(engine: LlamaEngine) -> None:
    """Sequences 1 and 2 branch off from 0, and 3 from 1."""
    evaluate(engine, 0, 0, 160)
    engine.copy_kv(0, 1, 150)
    engine.copy_kv(0, 2, 160)
    evaluate(engine, 1, 150, 170, OTHER)
    engine.copy_kv(1, 3, 165)
    evaluate(engine, 3, 165, 180)


def test_what_is_shared_stays_shared(open_engine: Open) -> None:
    engine, fixed = open_engine(cells=256, tables=few_with_flash()), open_engine(cells=256, flash=False)
    for each in (engine, fixed):
        shared_family(each)
    used, branches = engine._context.cells.used, list(engine._context.cells.branches())
    assert used == 160 + 20 + 15
    assert (changes(engine), is_with(engine)) == (1, False)
    engine.evaluate([Rows(2, 160, TOKENS[160:161], outputs=1)])
    assert (changes(engine), is_with(engine)) == (2, True)
    assert engine._context.cells.used == used + 1
    assert list(engine._context.cells.branches()) == branches
    engine.trim(2, 160)
    assert room(engine) == 256 - used
    # There and back: not a byte of it is another one than before.
    engine.evaluate([Rows(2, 160, TOKENS[160:170], outputs=1)])
    engine.trim(2, 160)
    assert (changes(engine), is_with(engine)) == (3, False)
    assert room(engine) == 256 - used
    assert_equal(engine, fixed)


def test_sequences_that_shared_go_their_own_ways_after_a_change(open_engine: Open) -> None:
    engine = open_engine(cells=256, tables=few_with_flash())
    shared_family(engine)
    engine.evaluate([Rows(2, 160, TOKENS[160:161], outputs=1)])
    before = whole(engine, 3)
    engine.trim(1, 0)
    engine.trim(0, 100)
    assert whole(engine, 3) == before
    assert engine._context.cells.used == 161 + 30
    assert room(engine) == 256 - 191
    for position in range(100, 110):
        evaluate(engine, 0, position, position + 1, OTHER)
    assert whole(engine, 3) == before
    assert changes(engine) == 2
    text = np.concatenate([TOKENS[:150], OTHER[150:165], TOKENS[165:]])
    assert same(engine, evaluate(engine, 3, 180, 190, text), evaluate(open_engine(flash=False), 0, 0, 190, text))


def test_a_full_context_changes(open_engine: Open) -> None:
    engine = open_engine(cells=256, tables=few_with_flash())
    evaluate(engine, 0, 0, 250)
    engine.copy_kv(0, 1, 250)
    evaluate(engine, 1, 250, 255)
    assert engine.evaluate([Rows(0, 250, OTHER[:1], outputs=1)]) is Outcome.DONE
    assert is_with(engine)
    assert engine.evaluate([Rows(0, 251, OTHER[:1], outputs=1)]) is Outcome.NO_ROOM
    assert engine.evaluate([Rows(0, 251, OTHER[:2], outputs=1)]) is Outcome.NO_ROOM
    assert not is_with(engine)
    assert engine._context.cells.used == 256


@pytest.mark.parametrize("kind", SNAPSHOT_KINDS)
def test_copies_with_snapshots_go_on_as_copies(open_engine: Open, kind: str) -> None:
    """They come to cells of their own, if there is room for that."""
    engine, fixed = open_engine(kind, tables=few_with_flash()), open_engine(kind, flash=False)
    for each in (engine, fixed):
        evaluate(each, 0, 0, 100)
        each.copy_kv(0, 1, 100)
    engine.evaluate([Rows(2, 0, TOKENS[:1], outputs=1)])
    assert is_with(engine)
    engine.evaluate([Rows(2, 1, TOKENS[1:9], outputs=1)])
    assert changes(engine) == 3
    assert engine._context.cells.used == 209
    assert whole(engine, 0) == whole(engine, 1) == whole(fixed, 0)
    for sequence, text in ((1, np.concatenate([TOKENS[:100], OTHER])), (0, TOKENS)):
        found = evaluate(engine, sequence, 100, 120, text)
        assert same(engine, found, evaluate(open_engine(kind, flash=False), 0, 0, 120, text))


@pytest.mark.parametrize("kind", ["hybrid", "sliding window"])
def test_copies_that_would_not_fit_beside_each_other_stay(open_engine: Open, kind: str) -> None:
    engine = open_engine(kind, cells=256, tables=few_with_flash())
    evaluate(engine, 0, 0, 150)
    engine.copy_kv(0, 1, 150)
    engine.evaluate([Rows(2, 0, TOKENS[:1], outputs=1)])
    assert (changes(engine), is_with(engine)) == (1, False)
    engine.trim(1, 0)
    engine.evaluate([Rows(2, 1, TOKENS[1:2], outputs=1)])
    assert (changes(engine), is_with(engine)) == (2, True)


@pytest.mark.parametrize("kind", [kind for kind in SNAPSHOT_KINDS if kind != "recurrent"])
def test_a_sequence_that_waits_for_its_snapshot_is_not_moved(open_engine: Open, kind: str) -> None:
    source, engine = open_engine(kind, flash=True), open_engine(kind, tables=few_with_flash())
    evaluate(source, 0, 0, 60)
    engine.import_kv(0, 0, 60, [exported(source, 0, 0, 60)], 0)
    evaluate(engine, 1, 0, 20)
    assert is_with(engine)
    engine.import_snapshot(0, 60, source.export_snapshot(0))
    evaluate(engine, 1, 20, 40)
    assert not is_with(engine)
    assert same(engine, evaluate(engine, 0, 60, 70), evaluate(source, 0, 60, 70))


# ── what a context is opened with ──


def test_experts_are_counted_across_changes(open_engine: Open) -> None:
    engine, fixed = open_engine("moe", tables=few_with_flash()), open_engine("moe")
    for each in (engine, fixed):
        each.experts.track(True)
        for start, end in ((0, 40), (40, 41), (41, 60), (60, 61)):
            evaluate(each, 0, start, end)
    assert changes(engine) == 4
    assert engine.experts.stats() == fixed.experts.stats()
    assert engine.experts.stats().layers[0].tokens == 61


def test_counting_experts_begins_anew_in_the_way_it_is(open_engine: Open) -> None:
    engine = open_engine("moe", tables=few_with_flash())
    evaluate(engine, 0, 0, 40)
    engine.experts.track(True)
    assert (is_with(engine), engine._context.cells.used) == (False, 0)
    evaluate(engine, 0, 0, 30)
    assert changes(engine) == 1
    evaluate(fixed := open_engine("moe", flash=False), 0, 0, 30)
    assert whole(engine, 0) == whole(fixed, 0)


def test_adapters_are_there_after_a_change(open_engine: Open, tmp_path) -> None:
    adapters = [Adapter("digest", 1.0, tiny_gguf.lora(tmp_path / "lora.gguf"))]
    engine = open_engine(tables=few_with_flash(), adapters=adapters)
    moved = Moved(open_engine, "dense", adapters=adapters)
    plain = open_engine(tables=few_with_flash())
    ends: dict[int, int] = {}
    for step in ([(0, 50)], [(0, 1)], [(0, 10)]):
        batch = batch_of(step, ends)
        for each in (engine, moved, plain):
            each.evaluate(batch)
        assert_equal(engine, moved.engine, batch)
        assert not same(engine, engine.logits(0), plain.logits(0))


# ── when it fails ──


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Answers to the next attempts to open a context: False for out of memory."""
    answers: list[bool] = []
    opened = context.open_context

    def fail(*arguments: object) -> int:
        if answers and not answers.pop(0):
            raise EngineError("out of memory")
        return opened(*arguments)

    monkeypatch.setattr(module, "open_context", fail)
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_other_way_cannot_be_opened_everything_is_as_before(
    open_engine: Open, openings: list[bool], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    engine, fixed = open_engine(kind, tables=few_with_flash()), open_engine(kind)
    for each in (engine, fixed):
        for position in range(20):
            evaluate(each, 0, position, position + 1)
        evaluate(each, 1, 0, 1, OTHER)
        if each is engine:
            openings.append(False)
            each.copy_kv(0, 2, 20)
            each.evaluate([Rows(1, 1, OTHER[1:20], outputs=1)])
            each.trim(2, 0)
        else:
            each.evaluate([Rows(1, 1, OTHER[1:20], outputs=1)])
    assert_equal(engine, fixed, [Rows(1, 1, OTHER[1:20], outputs=1)])
    assert "the context stays as it is: out of memory" in caplog.text
    assert (changes(engine), is_with(engine)) == (0, True)
    openings.append(False)  # it is not tried again
    evaluate(engine, 0, 20, 40)
    assert openings == [False]
    assert engine.step_seconds(1, 0, 1) is not None


CALLS: dict[str, Callable[[LlamaEngine], object]] = {
    "evaluate": lambda engine: engine.evaluate([Rows(0, 0, TOKENS[:5], outputs=1)]),
    "go on": lambda engine: engine.evaluate([Rows(0, 30, TOKENS[:5], outputs=1)]),
    "logits": lambda engine: engine.logits(0),
    "export": lambda engine: engine.export_kv(0, (0, 30)).payloads(),
    "snapshot": lambda engine: engine.export_snapshot(0),
    "copy": lambda engine: engine.copy_kv(0, 1, 0),
    "copy all": lambda engine: engine.copy_kv(0, 1, 30),
    "trim": lambda engine: engine.trim(0, 0),
    "splice": lambda engine: engine.splice(0, 10, 20, TOKENS[:5]),
}


@pytest.mark.parametrize("kind", ["dense", *SNAPSHOT_KINDS])
def test_where_no_way_can_be_opened_every_call_is_an_error(
    open_engine: Open, openings: list[bool], kind: str
) -> None:
    """And not the end of the process."""
    engine = open_engine(kind, tables=few_with_flash())
    for position in range(30):
        evaluate(engine, 0, position, position + 1)
    state, snapshot = whole(engine, 0)
    openings += [False, False]
    with pytest.raises(MemoryError, match="out of memory"):
        engine.evaluate([Rows(0, 30, TOKENS[30:40], outputs=1)])
    for call in CALLS.values():
        with pytest.raises(EngineError):
            call(engine)
    with pytest.raises(EngineError):
        engine.import_kv(0, 0, 30, [memoryview(state)], 0)
        engine.import_snapshot(0, 30, memoryview(snapshot))
    assert engine.stats()["flash_attention_changes"] == 0
    engine.close()
    engine.close()


def fail_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = module.write_state, counted(1)
    monkeypatch.setattr(module, "write_state", lambda *state: next(calls) != 2 and write(*state))


def fail_to_rearrange(monkeypatch: pytest.MonkeyPatch) -> None:
    rearrange, calls = module.Layouts.rearrange, counted(1)

    def fail(layouts: module.Layouts, state: np.ndarray) -> np.ndarray:
        if next(calls) == 2:
            raise MemoryError
        return rearrange(layouts, state)

    monkeypatch.setattr(module.Layouts, "rearrange", fail)


@pytest.mark.parametrize("fail", [fail_to_write, fail_to_rearrange])
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_put_back_is_gone_and_everyone_learns_it(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, kind: str, fail: Callable[..., None]
) -> None:
    engine = open_engine(kind, cells=256, tables=few_with_flash())
    for sequence, text in enumerate(TEXTS[:2]):
        evaluate(engine, sequence, 0, 60, text)
    with monkeypatch.context() as patch:
        fail(patch)
        with pytest.raises(MemoryError):
            engine.evaluate([Rows(0, 60, TOKENS[60:61], outputs=1)])
    assert engine._context.cells.used == 0
    if engine._context.unit.has_ranges:
        assert room(engine) == 256
    for sequence in (0, 1):
        with pytest.raises(EngineError):
            engine.evaluate([Rows(sequence, 60, TOKENS[60:70], outputs=1)])
        with pytest.raises(EngineError):
            engine.export_kv(sequence, (0, 60)).payloads()
    fresh = open_engine(kind, cells=256, flash=False)
    assert np.array_equal(evaluate(engine, 0, 0, 250), evaluate(fresh, 0, 0, 250))
    assert whole(engine, 0) == whole(fresh, 0)


@pytest.mark.parametrize("error", [EngineError, MemoryError])
@pytest.mark.parametrize("kind", ["dense", "sliding window"])
def test_what_cannot_be_taken_out_stays(
    open_engine: Open,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    error: type[Exception],
) -> None:
    engine, fixed = open_engine(kind, tables=few_with_flash()), open_engine(kind, flash=False)
    for each in (engine, fixed):
        evaluate(each, 0, 0, 60)
        evaluate(each, 1, 0, 60, OTHER)
    read, calls = module.read_state, list[object]()

    def fail(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 2:
            raise error("no such thing")
        return read(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "read_state", fail)
        engine.evaluate([Rows(0, 60, TOKENS[60:61], outputs=1)])
    assert len(calls) == 2
    assert "the context stays as it is: no such thing" in caplog.text
    assert (changes(engine), is_with(engine)) == (1, False)
    evaluate(fixed, 0, 60, 61)
    assert_equal(engine, fixed)
    engine.evaluate([Rows(0, 61, TOKENS[61:62], outputs=1)])  # later it can
    assert is_with(engine)


def test_it_does_not_change_where_memory_for_the_copy_is_short(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All state is held twice for a moment, and without flash attention a step needs scores."""
    engine = open_engine(tables=few_with_flash())
    evaluate(engine, 0, 0, 1)
    scores = 256 * 1024 * tiny_gguf.HEADS * 4
    of_a_token = engine.capabilities.kv_bytes_per_token
    for free, flash in ((scores + of_a_token, True), (scores + 3 * of_a_token, False)):
        monkeypatch.setattr(module, "free_ram", lambda free=free: free)
        evaluate(engine, 1, 0, 2)
        assert is_with(engine) == flash
        engine.trim(1, 0)
    monkeypatch.setattr(module, "free_ram", lambda: 3 * of_a_token)
    evaluate(engine, 0, 1, 2)
    assert is_with(engine)
    monkeypatch.setattr(module, "free_ram", lambda: None)
    evaluate(engine, 0, 2, 4)
    assert not is_with(engine)
