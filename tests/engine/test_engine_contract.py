"""What every engine whose state is by range promises: the fake one, and the others over tiny random models."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from emberkeep.engine.base import Engine, KvUnit, Outcome, Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EngineError
from helpers.engines import NOISE, TOKENS, broken_payloads, evaluate, exported, few_with_flash, same

Make = Callable[..., Engine]


LLAMA: dict[str, dict[str, object]] = {
    "llama.cpp": {"flash": True},
    "llama.cpp without flash": {"flash": False},
    "llama.cpp with both": {"tables": few_with_flash()},
}


@pytest.fixture(params=["fake", *LLAMA, pytest.param("hf", marks=pytest.mark.slow)])
def make(request, open_engine, open_hf):
    """Makes engines with a few cells."""

    def make_one(*, cells: int = 1024, weights: str = "w") -> Engine:
        if request.param == "fake":
            return FakeEngine(cells=cells, context=cells, sequences=4, batch=256, weights=weights)
        if request.param == "hf":
            return open_hf(cells=cells, sequences=4, digest=weights)
        return open_engine(cells=cells, sequences=4, digest=weights, **LLAMA[request.param])

    return make_one


@pytest.fixture
def engine(make: Make) -> Engine:
    return make()


def test_capabilities_describe_a_range_engine(engine):
    assert engine.capabilities.kv_unit is KvUnit.RANGE
    assert engine.capabilities.can_shift
    assert engine.capabilities.max_sequences == 4
    assert engine.capabilities.kv_bytes_per_token > 0
    assert engine.capabilities.snapshot_bytes == 0
    assert len(evaluate(engine, 0, 0, 5)) == engine.vocab.size


@pytest.mark.parametrize("position", [0, 100, 198])
def test_a_single_other_token_changes_the_logits(engine, position):
    """By much more than the noise that `same` allows."""
    other = TOKENS.copy()
    other[position] += 1
    difference = np.abs(evaluate(engine, 0, 0, 200) - evaluate(engine, 1, 0, 200, other)).max()
    assert difference > 3 * NOISE


def test_evaluating_in_slices_equals_evaluating_at_once(engine):
    whole = evaluate(engine, 0, 0, 200)
    evaluate(engine, 1, 0, 128)
    assert same(engine, evaluate(engine, 1, 128, 200), whole)


def test_sequences_of_one_batch_get_their_own_logits(engine):
    other = TOKENS[::-1].copy()
    alone = evaluate(engine, 0, 0, 50), evaluate(engine, 1, 0, 60, other)
    engine.trim(0, 0)
    engine.trim(1, 0)
    rows = [Rows(0, 0, TOKENS[:50], True), Rows(2, 0, TOKENS[:30], False), Rows(1, 0, other[:60], True)]
    assert engine.evaluate(rows) is Outcome.DONE
    assert same(engine, engine.logits(0).copy(), alone[0])
    assert same(engine, engine.logits(2).copy(), alone[1])


def test_the_last_tokens_of_several_sequences_each_have_logits(engine):
    other = TOKENS[::-1].copy()
    alone = [evaluate(engine, 0, start, start + 1) for start in range(4)]
    beside = [evaluate(engine, 1, start, start + 1, other) for start in range(2)]
    engine.trim(0, 0)
    engine.trim(1, 0)
    rows = [Rows(0, 0, TOKENS[:4], outputs=3), Rows(2, 0, TOKENS[:9], outputs=0), Rows(1, 0, other[:2], outputs=2)]
    assert engine.evaluate(rows) is Outcome.DONE
    for row in range(3):
        assert same(engine, engine.logits(0, row).copy(), alone[1 + row])
    for row in range(2):
        assert same(engine, engine.logits(2, row).copy(), beside[row])


def test_the_likeliest_tokens_are_those_of_the_logits(engine):
    engine.evaluate([Rows(0, 0, TOKENS[:20], outputs=3), Rows(1, 0, TOKENS[20:50], outputs=1)])
    for index, rows in ((0, 3), (1, 1)):
        best = [engine.likeliest(index, row) for row in range(rows)]
        assert best == [int(engine.logits(index, row).argmax()) for row in range(rows)]


def test_a_draft_that_is_taken_back_leaves_nothing(make):
    """The same steps give the same bytes, whether other tokens stood there meanwhile or not."""
    speculative, plain = make(), make()
    for engine in (speculative, plain):
        evaluate(engine, 0, 0, 100)
    assert speculative.evaluate([Rows(0, 100, TOKENS[300:309], outputs=9)]) is Outcome.DONE
    speculative.trim(0, 100)
    for start, end in ((100, 101), (101, 140)):
        after = [evaluate(engine, 0, start, end) for engine in (speculative, plain)]
        assert np.array_equal(*after)
    assert exported(speculative, 0, 0, 140) == exported(plain, 0, 0, 140)


def test_as_many_rows_have_logits_as_an_engine_says(make):
    engine = make()
    most = engine.capabilities.outputs
    assert most > engine.capabilities.max_sequences
    assert engine.evaluate([Rows(0, 0, TOKENS[:most], outputs=most)]) is Outcome.DONE
    assert engine.logits(0, most - 1).shape == (engine.vocab.size,)


@pytest.mark.parametrize("borders", [(0, 200), (0, 128, 130, 200)], ids=["at once", "by ranges"])
def test_state_that_went_out_and_in_gives_bit_equal_logits(make, borders):
    source, target = make(), make()
    evaluate(source, 0, 0, 200)
    for start, end in pairwise(borders):
        assert target.import_kv(0, start, end, [exported(source, 0, start, end)], start) is Outcome.DONE
    assert np.array_equal(evaluate(target, 0, 200, 208), evaluate(source, 0, 200, 208))


def test_an_export_leaves_the_sequence_as_it_is_and_repeats_its_bytes(engine):
    evaluate(engine, 0, 0, 100)
    first = bytes(exported(engine, 0, 20, 90))
    assert bytes(exported(engine, 0, 20, 90)) == first
    assert same(engine, evaluate(engine, 0, 100, 110), evaluate(engine, 1, 0, 110))


def test_one_export_gives_the_ranges_between_many_borders(engine):
    evaluate(engine, 0, 0, 100)
    one_by_one = [exported(engine, 0, start, end) for start, end in ((10, 74), (74, 75), (75, 100))]
    assert engine.export_kv(0, (10, 74, 75, 100)).payloads() == one_by_one


def test_an_export_holds_what_was_there_when_it_was_asked_for(engine):
    evaluate(engine, 0, 0, 100)
    before = [bytes(payload) for payload in engine.export_kv(0, (0, 64, 100)).payloads()]
    export, dropped = engine.export_kv(0, (0, 64, 100)), engine.export_kv(0, (0, 64, 100))
    engine.trim(0, 20)
    evaluate(engine, 0, 20, 110, TOKENS[::-1].copy())
    del dropped
    evaluate(engine, 1, 0, 100, TOKENS[::-1].copy())
    assert [bytes(payload) for payload in export.payloads()] == before


def test_nothing_is_exported_beyond_the_end(engine):
    evaluate(engine, 0, 0, 100)
    with pytest.raises(EngineError):
        engine.export_kv(0, (0, 50, 101)).payloads()
    with pytest.raises(EngineError):
        engine.export_kv(1, (0, 50)).payloads()


def test_there_are_no_snapshots_of_a_state_that_is_by_range(engine):
    evaluate(engine, 0, 0, 100)
    with pytest.raises(EngineError):
        engine.export_snapshot(0)
    with pytest.raises(EngineError):
        engine.import_snapshot(0, 100, memoryview(b""))


@pytest.mark.parametrize(("start", "end"), [(0, 64), (0, 1), (30, 100), (63, 64), (0, 100)])
def test_a_part_of_a_payload_can_be_imported(make, start, end):
    source, target = make(), make()
    evaluate(source, 0, 0, 100)
    payload = exported(source, 0, 0, 100)
    if start:
        target.import_kv(0, 0, start, [payload], 0)
    assert target.import_kv(0, start, end, [payload], 0) is Outcome.DONE
    fresh = make()
    evaluate(fresh, 0, 0, end)
    assert same(target, evaluate(target, 0, end, end + 10), evaluate(fresh, 0, end, end + 10))


def test_an_import_after_evaluation_continues_it(make):
    source, target = make(), make()
    evaluate(source, 0, 0, 200)
    payload = exported(source, 0, 64, 192)
    evaluate(target, 0, 0, 100)
    assert target.import_kv(0, 100, 180, [payload], 64) is Outcome.DONE
    fresh = evaluate(make(), 0, 0, 190)
    assert same(target, evaluate(target, 0, 180, 190), fresh)


def test_a_copy_shares_a_prefix_and_goes_its_own_way(engine):
    evaluate(engine, 0, 0, 100)
    engine.copy_kv(0, 1, 60)
    other = np.concatenate([TOKENS[:60], TOKENS[200:260]])
    copied = evaluate(engine, 1, 60, 120, other)
    assert same(engine, copied, evaluate(engine, 2, 0, 120, other))
    assert same(engine, evaluate(engine, 0, 100, 110), evaluate(engine, 3, 0, 110))


def test_copies_take_no_room(make):
    engine = make(cells=256)
    evaluate(engine, 0, 0, 200)
    for target in (1, 2, 3):
        engine.copy_kv(0, target, 200)
    assert engine.evaluate([Rows(1, 200, TOKENS[200:240], False)]) is Outcome.DONE


def test_a_copy_outlives_its_source(engine):
    evaluate(engine, 0, 0, 100)
    engine.copy_kv(0, 1, 100)
    engine.trim(0, 0)
    evaluate(engine, 0, 0, 80, TOKENS[::-1].copy())
    assert same(engine, evaluate(engine, 1, 100, 110), evaluate(engine, 2, 0, 110))


@pytest.mark.parametrize("start", [0, 1, 50, 99, 100, 150])
def test_trimmed_positions_are_forgotten(engine, start):
    evaluate(engine, 0, 0, 100)
    engine.trim(0, start)
    end = min(start, 100)
    other = np.concatenate([TOKENS[:end], TOKENS[300:320]])
    assert same(engine, evaluate(engine, 0, end, end + 20, other), evaluate(engine, 1, 0, end + 20, other))


def test_an_engine_without_room_says_so_and_stays_as_it_is(make):
    engine = make(cells=256)
    evaluate(engine, 0, 0, 200)
    assert engine.evaluate([Rows(1, 0, TOKENS[:250], False)]) is Outcome.NO_ROOM
    assert same(engine, evaluate(engine, 0, 200, 210), evaluate(make(), 0, 0, 210))
    engine.trim(0, 0)
    assert engine.evaluate([Rows(1, 0, TOKENS[:250], False)]) is Outcome.DONE


def test_an_import_without_room_says_so_and_stays_as_it_is(make):
    engine, source = make(cells=256), make()
    evaluate(source, 0, 0, 250)
    payload = exported(source, 0, 0, 250)
    evaluate(engine, 0, 0, 200)
    assert engine.import_kv(1, 0, 250, [payload], 0) is Outcome.NO_ROOM
    assert same(engine, evaluate(engine, 0, 200, 210), evaluate(make(), 0, 0, 210))
    engine.trim(0, 0)
    assert engine.import_kv(1, 0, 250, [payload], 0) is Outcome.DONE


def test_state_that_lies_scattered_over_the_cells_is_exported_in_order(make):
    """Sequences come and go, so that a later part of one lies before an earlier part of it."""
    engine, target = make(cells=256), make()
    evaluate(engine, 0, 0, 100)
    evaluate(engine, 1, 0, 100)
    engine.trim(0, 0)
    evaluate(engine, 1, 100, 200)
    for start, end in ((0, 50), (50, 150), (150, 200)):
        assert target.import_kv(0, start, end, [exported(engine, 1, start, end)], start) is Outcome.DONE
    assert same(target, evaluate(target, 0, 200, 210), evaluate(make(), 0, 0, 210))


def test_payloads_of_another_shape_are_refused_and_change_nothing(make):
    engine, source = make(), make()
    evaluate(source, 0, 0, 100)
    evaluate(engine, 0, 0, 20)
    for payload in broken_payloads(exported(source, 0, 20, 100)):
        with pytest.raises(EngineError):
            engine.import_kv(0, 20, 100, [payload], 20)
    assert same(engine, evaluate(engine, 0, 20, 30), evaluate(make(), 0, 0, 30))


@pytest.mark.parametrize(
    ("start", "end", "payload_start"),
    [
        (20, 100, 0),
        (20, 100, 19),
        (20, 100, 21),
        (20, 101, 20),
        (0, 80, 20),
        (25, 100, 20),
        (20, 20, 20),
        (20, 10, 20),
    ],
    ids=["zero", "too early", "too late", "beyond", "from nothing", "a gap", "empty", "backwards"],
)
def test_payloads_at_another_place_are_refused_and_change_nothing(make, start, end, payload_start):
    engine, source = make(), make()
    evaluate(source, 0, 0, 100)
    evaluate(engine, 0, 0, 20)
    with pytest.raises(EngineError):
        engine.import_kv(0, start, end, [exported(source, 0, 20, 100)], payload_start)
    assert same(engine, evaluate(engine, 0, 20, 30), evaluate(make(), 0, 0, 30))


def test_the_fingerprint_has_32_bytes_and_changes_with_the_weights(make):
    one, same_again, other = make(weights="a"), make(weights="a"), make(weights="b")
    assert len(one.fingerprint) == 32
    assert one.fingerprint == same_again.fingerprint != other.fingerprint


def test_closing_twice_is_harmless(make):
    engine = make()
    engine.close()
    engine.close()


def test_tokens_and_pieces_belong_together(engine):
    vocab = engine.vocab
    tokens = vocab.tokenize("hello, world.")
    assert b"".join(vocab.pieces[t] for t in tokens).strip() == b"hello, world."
    assert len(vocab.pieces) == vocab.size
    assert all(0 <= token < vocab.size for token in vocab.eog)
    assert vocab.eos in vocab.eog
