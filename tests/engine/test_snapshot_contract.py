"""What every engine promises whose state is, in part or as a whole, kept in snapshots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from emberkeep.engine.base import Engine, KvUnit, Outcome, Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError
from helpers.chance import seed, times
from helpers.engines import SNAPSHOT_KINDS, TOKENS, broken_payloads, evaluate, exported, few_with_flash
from helpers.engines import same as nearly_same

pytestmark = pytest.mark.slow

Make = Callable[..., Engine]
same = partial(nearly_same, noise=0.02)
FAKES = {"fake snapshot": KvUnit.SNAPSHOT, "fake both": KvUnit.BOTH}
OTHER = TOKENS[::-1].copy()
LENGTH = 300
"""Many times what a window sees, and more than there are window cells: they are used again and again."""
SHORT = 60
"""A few times what a window sees."""


LLAMA: dict[str, tuple[str, dict[str, object]]] = (
    {kind: (kind, {"flash": True}) for kind in SNAPSHOT_KINDS}
    | {f"{kind} without flash": (kind, {"flash": False}) for kind in SNAPSHOT_KINDS if kind != "recurrent"}
    | {f"{kind} with both": (kind, {"tables": few_with_flash()}) for kind in SNAPSHOT_KINDS}
)
"""Kinds of models, and whether flash attention is on, or changes all the time."""


@pytest.fixture(params=[*FAKES, *LLAMA, pytest.param("hf", marks=pytest.mark.slow)])
def make(request, open_engine, open_hf):
    def make_one(*, cells: int = 1024) -> Engine:
        if request.param in FAKES:
            unit = FAKES[request.param]
            return FakeEngine(cells=cells, context=cells, sequences=4, batch=64, kv_unit=unit)
        if request.param == "hf":
            return open_hf("lfm2", cells=cells, sequences=4, batch=64)
        kind, attention = LLAMA[request.param]
        return open_engine(kind, cells=cells, sequences=4, batch=64, **attention)

    return make_one


@pytest.fixture
def kind(request) -> str:
    return request.node.callspec.params["make"]


@pytest.fixture
def engine(make: Make) -> Engine:
    return make()


def saved(
    engine: Engine, sequence: int, end: int, *, start: int = 0
) -> tuple[list[int], list[memoryview], memoryview]:
    """Everything that restores [start, end) of a sequence that ends there."""
    borders = [*range(start, end, 128), end]
    return borders, engine.export_kv(sequence, borders).payloads(), engine.export_snapshot(sequence)


def restore(engine: Engine, sequence: int, save: tuple[list[int], list[memoryview], memoryview]) -> Outcome:
    borders, ranges, snapshot = save
    for (start, end), payload in zip(pairwise(borders), ranges, strict=True):
        if (outcome := engine.import_kv(sequence, start, end, [payload], start)) is not Outcome.DONE:
            return outcome
    return engine.import_snapshot(sequence, borders[-1], snapshot)


def test_capabilities_tell_ranges_from_snapshots(engine, kind):
    assert engine.capabilities.kv_unit.has_snapshots
    assert not engine.capabilities.can_shift
    evaluate(engine, 0, 0, LENGTH)
    size, promised = len(engine.export_snapshot(0)), engine.capabilities.snapshot_bytes
    assert 0 < size <= promised
    assert size == promised or kind == "hf"  # which cannot know how large a state can become
    ranges = engine.export_kv(0, (0, 128, LENGTH)).payloads()
    if not engine.capabilities.kv_unit.has_ranges:
        assert [len(payload) for payload in ranges] == [0, 0]
        assert engine.capabilities.kv_bytes_per_token == 0
    else:
        assert all(len(payload) for payload in ranges)


@pytest.mark.parametrize("length", [5, 100, LENGTH])
def test_state_that_went_out_and_in_gives_bit_equal_logits(make, length):
    source, target = make(), make()
    evaluate(source, 0, 0, length)
    assert restore(target, 0, saved(source, 0, length)) is Outcome.DONE
    assert np.array_equal(evaluate(target, 0, length, length + 8), evaluate(source, 0, length, length + 8))


def test_a_restored_conversation_goes_on_as_if_it_had_never_stopped(make):
    source, target = make(), make()
    evaluate(source, 0, 0, LENGTH)
    restore(target, 0, saved(source, 0, LENGTH))
    for position in range(LENGTH, LENGTH + 40):
        expected, found = (evaluate(engine, 0, position, position + 1) for engine in (source, target))
        assert found.argmax() == expected.argmax()
        assert same(target, found, expected)


def test_state_saved_turn_by_turn_is_restored_at_the_last_snapshot(make, kind):
    source, target = make(), make()
    ranges = []
    for start, end in ((0, 100), (100, 101), (101, LENGTH)):
        evaluate(source, 0, start, end)
        ranges.append((start, end, exported(source, 0, start, end)))
    snapshot = source.export_snapshot(0)
    for start, end, payload in ranges:
        target.import_kv(0, start, end, [payload], start)
    target.import_snapshot(0, LENGTH, snapshot)
    # After a change a window lies in other cells, and without flash attention sums follow their order.
    slight = 1e-5 if kind.endswith("with both") else 0
    found, expected = evaluate(target, 0, LENGTH, 310), evaluate(source, 0, LENGTH, 310)
    assert np.allclose(found, expected, rtol=0, atol=slight)


def test_an_export_leaves_the_sequence_as_it_is_and_repeats_its_bytes(engine, make):
    evaluate(engine, 0, 0, LENGTH)
    evaluate(engine, 1, 0, 100, OTHER)
    first = saved(engine, 0, LENGTH)
    assert saved(engine, 0, LENGTH) == first
    assert same(engine, evaluate(engine, 0, LENGTH, 310), evaluate(make(), 0, 0, 310))
    assert same(engine, evaluate(engine, 1, 100, 110, OTHER), evaluate(make(), 0, 0, 110, OTHER))


def test_one_export_gives_the_ranges_between_many_borders(engine):
    """Also when later parts of a sequence lie in front of earlier ones."""
    evaluate(engine, 1, 0, 100, OTHER)
    evaluate(engine, 0, 0, 150)
    engine.trim(1, 0)
    evaluate(engine, 0, 150, LENGTH)
    borders = (10, 74, 75, 160, LENGTH)
    assert engine.export_kv(0, borders).payloads() == [exported(engine, 0, *span) for span in pairwise(borders)]
    with pytest.raises(EngineError):
        engine.export_kv(0, (0, LENGTH + 1)).payloads()


def test_branches_go_on_from_one_snapshot(make):
    source, engine = make(), make()
    evaluate(source, 0, 0, SHORT)
    save = saved(source, 0, SHORT)
    restore(engine, 0, save)
    restore(engine, 2, save)
    branch = np.concatenate([TOKENS[:SHORT], OTHER])
    ours, theirs = evaluate(engine, 0, SHORT, 90), evaluate(engine, 2, SHORT, 90, branch)
    assert same(engine, ours, evaluate(source, 0, SHORT, 90))
    assert same(engine, theirs, evaluate(make(), 0, 0, 90, branch))
    assert not same(engine, ours, theirs)


def test_sequences_side_by_side_keep_their_own_state(make):
    """One is restored between the steps of others, then all go on in one batch."""
    source, engine = make(), make()
    evaluate(source, 0, 0, SHORT)
    evaluate(engine, 0, 0, 30, OTHER)
    evaluate(engine, 1, 0, 40)
    restore(engine, 2, saved(source, 0, SHORT))
    batch = [
        Rows(0, 30, OTHER[30:55], True),
        Rows(1, 40, TOKENS[40:41], True),
        Rows(2, SHORT, TOKENS[SHORT:90], True),
    ]
    assert engine.evaluate(batch) is Outcome.DONE
    together = [engine.logits(index).copy() for index in range(3)]
    assert same(engine, together[0], evaluate(make(), 0, 0, 55, OTHER))
    assert same(engine, together[1], evaluate(make(), 0, 0, 41))
    assert same(engine, together[2], evaluate(source, 0, SHORT, 90))


def test_ranges_and_a_snapshot_continue_what_was_evaluated(make):
    source, engine = make(), make()
    evaluate(source, 0, 0, SHORT)
    evaluate(engine, 0, 0, 25)
    payload = exported(source, 0, 10, SHORT)
    assert engine.import_kv(0, 25, SHORT, [payload], 10) is Outcome.DONE
    assert engine.import_snapshot(0, SHORT, source.export_snapshot(0)) is Outcome.DONE
    assert same(engine, evaluate(engine, 0, SHORT, 70), evaluate(source, 0, SHORT, 70))


def test_ranges_without_their_snapshot_are_not_evaluated(make):
    source, engine = make(), make()
    evaluate(source, 0, 0, 30)
    engine.import_kv(0, 0, 30, [exported(source, 0, 0, 30)], 0)
    with pytest.raises(EngineError):
        engine.evaluate([Rows(0, 30, TOKENS[30:40], outputs=1)])
    with pytest.raises(EngineError):
        engine.export_snapshot(0)
    engine.trim(0, 0)
    assert same(engine, evaluate(engine, 0, 0, 40), evaluate(source, 0, 30, 40))


def test_a_snapshot_of_other_tokens_gives_other_answers(make):
    """Engines cannot know: the store must compare all tokens."""
    source, engine = make(), make()
    evaluate(source, 0, 0, 30)
    evaluate(source, 1, 0, 30, OTHER)
    engine.import_kv(0, 0, 30, [exported(source, 0, 0, 30)], 0)
    engine.import_snapshot(0, 30, source.export_snapshot(1))
    assert not same(engine, evaluate(engine, 0, 30, 31), evaluate(source, 0, 30, 31))


@pytest.mark.parametrize("position", [29, 31, 15, 0])
def test_a_snapshot_is_refused_where_it_was_not_taken(make, position):
    source, engine = make(), make()
    evaluate(source, 0, 0, 31)
    payload = exported(source, 0, 0, 31)
    source.trim(0, 0)
    evaluate(source, 0, 0, 30)
    if position:
        engine.import_kv(0, 0, position, [payload], 0)
    with pytest.raises(EngineError):
        engine.import_snapshot(0, position, source.export_snapshot(0))
    engine.trim(0, 0)
    assert same(engine, evaluate(engine, 0, 0, 40), evaluate(source, 0, 30, 40))


def test_a_snapshot_needs_its_ranges(make):
    source, engine = make(), make()
    evaluate(source, 0, 0, 60)
    evaluate(engine, 1, 0, 50)
    snapshot = source.export_snapshot(0)
    with pytest.raises(EngineError):
        engine.import_snapshot(1, 60, snapshot)
    if engine.capabilities.kv_unit.has_ranges:
        with pytest.raises(EngineError):
            engine.import_snapshot(0, 60, snapshot)
    else:
        engine.import_snapshot(0, 60, snapshot)
        assert same(engine, evaluate(engine, 0, 60, 70), evaluate(source, 0, 60, 70))


def test_nothing_evaluated_is_no_snapshot(engine):
    with pytest.raises(EngineError):
        engine.export_snapshot(0)


def test_broken_payloads_are_refused_and_change_nothing(make):
    engine, source = make(), make()
    evaluate(source, 0, 0, 60)
    evaluate(engine, 0, 0, 20)
    ranges, snapshot = exported(source, 0, 20, 60), source.export_snapshot(0)
    for broken in filter(len, broken_payloads(ranges or snapshot)):
        with pytest.raises(EngineError):
            engine.import_kv(0, 20, 60, [broken], 20)
    for broken in [*broken_payloads(snapshot), ranges]:
        with pytest.raises(EngineError):
            engine.import_snapshot(0, 20, broken)
    assert same(engine, evaluate(engine, 0, 20, 30), evaluate(make(), 0, 0, 30))


def test_a_whole_copy_goes_its_own_way_and_outlives_its_source(engine, make):
    evaluate(engine, 0, 0, LENGTH)
    engine.copy_kv(0, 1, LENGTH)
    branch = np.concatenate([TOKENS[:LENGTH], OTHER])
    assert same(engine, evaluate(engine, 1, LENGTH, 320, branch), evaluate(make(), 0, 0, 320, branch))
    assert same(engine, evaluate(engine, 0, LENGTH, 310), evaluate(make(), 0, 0, 310))
    engine.trim(0, 0)
    evaluate(engine, 0, 0, 100, OTHER)
    assert same(engine, evaluate(engine, 1, 320, 325, branch), evaluate(make(), 0, 0, 325, branch))


def test_all_sequences_can_be_copies_of_a_long_one(make, kind):
    engine = make(cells=2048 if kind == "hf" else 1024)  # whose copies take room of their own
    evaluate(engine, 0, 0, LENGTH)
    for target in (1, 2, 3):
        engine.copy_kv(0, target, LENGTH)
    expected = evaluate(make(), 0, 0, 320)
    for sequence in range(4):
        assert same(engine, evaluate(engine, sequence, LENGTH, 320), expected)


def test_a_part_of_a_sequence_is_not_copied(engine):
    evaluate(engine, 0, 0, 60)
    for end in (30, 59, 61):
        with pytest.raises(EngineError):
            engine.copy_kv(0, 1, end)


def test_a_state_cannot_be_cut(engine, make):
    evaluate(engine, 0, 0, 60)
    for start in (1, 30, 59):
        with pytest.raises(EngineError, match="cut back"):
            engine.trim(0, start)
    with pytest.raises(EngineError):
        engine.splice(0, 20, 40, TOKENS[:5])
    engine.trim(0, 60)
    assert same(engine, evaluate(engine, 0, 60, 70), evaluate(make(), 0, 0, 70))
    engine.trim(0, 0)
    assert same(engine, evaluate(engine, 0, 0, 20), evaluate(make(), 0, 0, 20))


def test_an_import_without_room_says_so_and_stays_as_it_is(make):
    engine, source = make(cells=256), make()
    if not engine.capabilities.kv_unit.has_ranges:
        pytest.skip("a state of constant size always has room")
    evaluate(source, 0, 0, 128)
    save = saved(source, 0, 128)
    evaluate(engine, 0, 0, 200)
    assert restore(engine, 1, save) is Outcome.NO_ROOM
    assert same(engine, evaluate(engine, 0, 200, 210), evaluate(make(), 0, 0, 210))
    engine.trim(0, 0)
    assert restore(engine, 1, save) is Outcome.DONE
    assert same(engine, evaluate(engine, 1, 128, 140), evaluate(source, 0, 128, 140))


def test_conversations_that_come_and_go_are_answered_as_alone(make):
    """A long random history of evaluating, copying, saving, forgetting and restoring in few cells."""
    engine, random = make(cells=1024), np.random.default_rng(seed(5))
    known: dict[int, np.ndarray] = {}
    saves: list[tuple[np.ndarray, tuple[list[int], list[memoryview], memoryview]]] = []
    for _ in range(times(60)):
        slot = int(random.integers(4))
        tokens = known.get(slot, TOKENS[:0])
        move = random.choice(["go on", "go on", "save", "forget", "restore", "copy"])
        if move == "go on" and len(tokens) < 180:
            more = random.integers(40, 120, random.integers(1, 60), dtype=np.int32)
            known[slot] = np.concatenate([tokens, more])
            evaluate(engine, slot, len(tokens), len(known[slot]), known[slot])
        elif move == "save" and len(tokens):
            saves.append((tokens, saved(engine, slot, len(tokens))))
        elif move == "forget" or (move in ("restore", "copy") and len(tokens)):
            engine.trim(slot, 0)
            known.pop(slot, None)
        elif move == "restore" and saves:
            known[slot], save = saves[random.integers(len(saves))]
            assert restore(engine, slot, save) is Outcome.DONE
        elif move == "copy" and known:
            source = int(random.choice(list(known)))
            engine.copy_kv(source, slot, len(known[source]))
            known[slot] = known[source]
    assert saves
    for slot, tokens in known.items():
        whole = np.concatenate([tokens, TOKENS[:5]])
        assert same(
            engine,
            evaluate(engine, slot, len(tokens), len(whole), whole),
            evaluate(make(), 0, 0, len(whole), whole),
        )


@pytest.mark.parametrize("kind", ["dense", *SNAPSHOT_KINDS])
def test_an_engine_with_snapshots_does_not_run_ahead(open_engine, kind):
    """On a GPU either: they are taken where a step ends, and would be missing if that were put off."""
    engine = open_engine(kind)
    assert not engine.capabilities.runs_ahead  # on a CPU nothing does
    engine._model.offloads = True
    assert engine._learn_capabilities().runs_ahead is (kind == "dense")
    engine._model.offloads = False
