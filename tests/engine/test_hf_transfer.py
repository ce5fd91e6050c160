"""Stored bytes of the Hugging Face engine that are not what they were: refused, or numbers like any others."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest

from emberkeep.engine.base import Engine, Outcome, Piece, Rows
from emberkeep.engine.hf.transfer import HEAD
from emberkeep.errors import EngineError
from helpers.chance import seed, times
from helpers.engines import TOKENS, broken_payloads, evaluate, exported

pytestmark = pytest.mark.slow

START, END = 10, 42
SHAPES = ["llama", "deepseek_v3", "gpt2"]
"""One shape for keys and values, two of them, and as many KV heads as heads."""


@pytest.fixture(params=SHAPES)
def engine(request, open_hf):
    engine = open_hf(request.param, cells=256, sequences=2)
    evaluate(engine, 0, 0, END)
    return engine


def refuses(engine: Engine, payload: memoryview) -> None:
    """And sequence 1, which ends where it should go on, stays as it is."""
    with pytest.raises(EngineError):
        engine.import_kv(1, START, END, [payload], START)


def changed(payload: memoryview, offset: int, flip: int) -> memoryview:
    data = bytearray(payload)
    data[offset] ^= flip
    return memoryview(data)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_whatever_is_done_to_a_payload_it_is_refused_or_data(engine, bits):
    before = exported(engine, 0, 0, START)
    (payload,) = engine.export_kv(0, (START, END), bits).payloads()
    assert engine.import_kv(1, 0, START, [before], 0) is Outcome.DONE
    random, size = np.random.default_rng(seed(1)), len(payload)
    for broken in broken_payloads(payload):
        refuses(engine, broken)
    for length in random.integers(size, size=times(30)).tolist():
        refuses(engine, payload[:length])
    refuses(engine, memoryview(bytes(payload) + random.bytes(40)))
    refuses(engine, memoryview(random.bytes(size)))
    assert exported(engine, 1, 0, START) == before
    if bits == 16:
        for bit in range(8 * HEAD.size):  # every one of the head counts
            refuses(engine, changed(payload, bit // 8, 1 << bit % 8))
    for offset in {*range(40), *range(size - 20, size), *random.integers(size, size=times(20)).tolist()}:
        with suppress(EngineError):
            engine.import_kv(1, START, END, [changed(payload, offset, int(random.integers(1, 256)))], START)
            engine.trim(1, START)
        assert exported(engine, 1, 0, START) == before
    assert engine.import_kv(1, START, END, [payload], START) is Outcome.DONE


@pytest.mark.parametrize("family", SHAPES)
def test_payloads_of_models_of_other_shapes_and_of_other_engines_are_refused(open_hf, open_engine, family):
    engine, theirs = open_hf(family), open_engine()
    for source in (*(open_hf(other) for other in SHAPES if other != family), theirs):
        evaluate(source, 0, 0, END)
        for bits in (16, 8):
            (payload,) = source.export_kv(0, (0, END), bits).payloads()
            with pytest.raises(EngineError):
                engine.import_kv(0, 0, END, [payload], 0)
    assert np.isfinite(evaluate(engine, 0, 0, END)).all()
    for bits in (16, 8):
        (payload,) = engine.export_kv(0, (0, END), bits).payloads()
        with pytest.raises(EngineError):
            theirs.import_kv(1, 0, END, [payload], 0)


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_state_goes_on_nearly_as_the_exact_one(open_hf, bits):
    source, target = open_hf(), open_hf()
    evaluate(source, 0, 0, 130)
    (payload,) = source.export_kv(0, (0, 128), bits).payloads()
    assert len(payload) < {8: 0.4, 4: 0.25}[bits] * len(exported(source, 0, 0, 128))
    assert target.import_kv(0, 0, 128, [payload], 0) is Outcome.DONE
    assert source.capabilities.packs == {16, 8, 4}
    with pytest.raises(EngineError, match="5 bits"):
        source.export_kv(0, (0, 20), 5)
    near, exact = evaluate(target, 0, 128, 130), evaluate(source, 1, 0, 130)
    assert 0 < np.abs(near - exact).max() < {8: 0.05, 4: 0.6}[bits] * np.abs(exact).max()


@pytest.mark.parametrize("gathers", [True, False], ids=["as on a GPU", "as on a CPU"])
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("borders", [(0, 16, 32, 48, 64, 80, 90), (0, 64, 90), tuple(range(0, 91, 3))])
def test_many_payloads_at_once_are_what_they_are_one_by_one(open_hf, family, borders, gathers):
    engine = open_hf(family, cells=512, sequences=3)
    evaluate(engine, 0, 0, 90)
    singly = [bytes(exported(engine, 0, *place)) for place in pairwise(borders)]
    engine._transfer._gathers = gathers
    payloads = engine.export_kv(0, borders).payloads()
    assert [bytes(payload) for payload in payloads] == singly
    assert engine.import_kv(1, 0, 90, payloads, 0) is Outcome.DONE
    assert [bytes(payload) for payload in engine.export_kv(1, borders).payloads()] == singly
    # From the middle of one to the middle of another, into blocks that lie apart.
    evaluate(engine, 2, 0, 5)
    assert engine.import_kv(2, 5, 85, payloads, 0) is Outcome.DONE
    assert bytes(exported(engine, 2, 5, 85)) == bytes(exported(engine, 0, 5, 85))


def test_one_that_does_not_fit_among_many_changes_nothing(open_hf):
    engine = open_hf("llama", cells=512, sequences=2)
    evaluate(engine, 0, 0, 90)
    first, second, third = engine.export_kv(0, (0, 30, 60, 90)).payloads()
    for wrong in ([first, third], [first, second[:-1], third], [first, second]):
        with pytest.raises(EngineError):
            engine.import_kv(1, 0, 90, wrong, 0)
    assert engine.import_kv(1, 0, 90, [first, second, third], 0) is Outcome.DONE


# ── beside the steps ──


class LateMark:
    def __init__(self, stream: LateStream, work) -> None:
        self._stream = stream
        self.work = work
        self.has_passed = False

    def wait(self) -> None:
        self._stream.finish(self)

    def hold_back(self) -> None:
        self._stream.finish(self)


class LateStream:
    """As a stream of a GPU that is as slow as can be: it does nothing before something waits for it."""

    def __init__(self) -> None:
        self._todo: deque[LateMark] = deque()

    def run(self, work, held) -> LateMark:
        self._todo.append(mark := LateMark(self, work))
        return mark

    def finish(self, mark: LateMark) -> None:
        while not mark.has_passed:
            following = self._todo.popleft()
            following.work()
            following.has_passed = True

    def let_go(self) -> None:
        pass

    def close(self) -> None:
        while self._todo:
            self.finish(self._todo[0])


def late(engine, gathers: bool = True):
    engine._transfer._stores, engine._transfer._loads = LateStream(), LateStream()
    engine._transfer._gathers = gathers
    return engine


OTHER = TOKENS[::-1].copy()


def trimmed(engine) -> None:
    engine.trim(0, 30)
    evaluate(engine, 0, 30, 90, OTHER)


def dropped(engine) -> None:
    engine.trim(0, 0)
    evaluate(engine, 1, 0, 90, OTHER)
    evaluate(engine, 0, 0, 90, OTHER)


def given_to_a_load(engine) -> None:
    evaluate(engine, 1, 0, 90, OTHER)
    payloads = engine.export_kv(1, (0, 90)).payloads()
    engine.trim(0, 0)
    assert engine.import_kv(0, 0, 90, payloads, 0) is Outcome.DONE
    evaluate(engine, 0, 90, 91)


def given_up_by_the_last_who_shared_it(engine) -> None:
    engine.copy_kv(0, 1, 70)
    engine.trim(0, 0)
    evaluate(engine, 1, 70, 90, OTHER)
    engine.trim(1, 0)
    dropped(engine)


def left_to_another_who_writes_there(engine) -> None:
    """Both go on in one step: the first leaves the block that they shared, and the other has it alone."""
    engine.copy_kv(0, 1, 88)
    rows = [Rows(0, 90, TOKENS[90:91], outputs=1), Rows(1, 88, OTHER[88:90], outputs=1)]
    assert engine.evaluate(rows) is Outcome.DONE


def cut_out(engine) -> None:
    assert engine.splice(0, 10, 50, TOKENS[:3]) is Outcome.DONE


@pytest.mark.parametrize(
    "meanwhile",
    [
        trimmed,
        dropped,
        given_to_a_load,
        given_up_by_the_last_who_shared_it,
        left_to_another_who_writes_there,
        cut_out,
    ],
)
@pytest.mark.parametrize("gathers", [True, False], ids=["as on a GPU", "as on a CPU"])
def test_what_is_copied_late_is_what_was_there(open_hf, meanwhile, gathers):
    engine = open_hf("llama", cells=192, sequences=2)
    evaluate(engine, 0, 0, 90)
    expected = [bytes(payload) for payload in engine.export_kv(0, (0, 40, 80, 90)).payloads()]
    export = late(engine, gathers).export_kv(0, (0, 40, 80, 90))
    assert not export.is_done
    meanwhile(engine)
    assert [bytes(payload) for payload in export.payloads()] == expected
    assert export.is_done


def test_a_step_waits_for_what_its_own_sequences_load_and_for_nothing_else(open_hf):
    engine, plain = late(open_hf("llama", cells=512, sequences=3)), open_hf("llama", cells=512, sequences=3)
    evaluate(plain, 0, 0, 90)
    payloads = plain.export_kv(0, (0, 40, 80, 90)).payloads()
    assert engine.import_kv(0, 0, 90, payloads, 0) is Outcome.DONE
    (loading,) = engine._loading.values()
    assert np.array_equal(evaluate(engine, 1, 0, 50), evaluate(plain, 1, 0, 50))
    assert not loading.has_passed
    assert np.array_equal(evaluate(engine, 0, 90, 91), evaluate(plain, 0, 90, 91))
    assert loading.has_passed


def shared(engine) -> None:
    engine.copy_kv(0, 1, 85)
    evaluate(engine, 1, 85, 88, OTHER)


def one_more(engine) -> None:
    evaluate(engine, 0, 90, 91)


def blended(engine) -> None:
    evaluate(engine, 1, 0, 40)
    piece = Piece(90, 130, exported(engine, 1, 0, 40), 0, 0)
    engine.blend(Rows(0, 90, OTHER[:41], outputs=1), [piece], 0.2)


@pytest.mark.parametrize("meanwhile", [shared, one_more, trimmed, dropped, cut_out, blended])
def test_what_is_loaded_late_is_there_for_all_who_need_it(open_hf, meanwhile):
    engine, plain = late(open_hf("llama", cells=512, sequences=2)), open_hf("llama", cells=512, sequences=2)
    evaluate(plain, 0, 0, 90)
    payloads = plain.export_kv(0, (0, 40, 80, 90)).payloads()
    for each in (engine, plain):
        each.trim(0, 0)
        assert each.import_kv(0, 0, 30, payloads[:1], 0) is Outcome.DONE
        assert each.import_kv(0, 30, 90, payloads, 0) is Outcome.DONE
        meanwhile(each)
    for sequence in (0, 1):
        if end := plain._tables[sequence].length:
            assert bytes(exported(engine, sequence, 0, end)) == bytes(exported(plain, sequence, 0, end))
