"""Stored bytes of the Hugging Face engine that are not what they were: refused, or numbers like any others."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest

from emberkeep.engine.base import Engine, Outcome
from emberkeep.engine.hf.transfer import HEAD
from emberkeep.errors import EngineError
from helpers.engines import broken_payloads, evaluate, exported

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
    random, size = np.random.default_rng(1), len(payload)
    for broken in broken_payloads(payload):
        refuses(engine, broken)
    for length in random.integers(size, size=30).tolist():
        refuses(engine, payload[:length])
    refuses(engine, memoryview(bytes(payload) + random.bytes(40)))
    refuses(engine, memoryview(random.bytes(size)))
    assert exported(engine, 1, 0, START) == before
    for offset in {*range(40), *range(size - 20, size), *random.integers(size, size=20).tolist()}:
        with suppress(EngineError):
            engine.import_kv(1, START, END, [changed(payload, offset, int(random.integers(1, 256)))], START)
            engine.trim(1, START)
        assert exported(engine, 1, 0, START) == before
    assert engine.import_kv(1, START, END, [payload], START) is Outcome.DONE


def test_every_bit_of_the_head_counts(engine):
    assert engine.import_kv(1, 0, START, [exported(engine, 0, 0, START)], 0) is Outcome.DONE
    payload = exported(engine, 0, START, END)
    for bit in range(8 * HEAD.size):
        refuses(engine, changed(payload, bit // 8, 1 << bit % 8))


@pytest.mark.parametrize("family", SHAPES)
def test_payloads_of_models_of_other_shapes_are_refused(open_hf, family):
    engine = open_hf(family)
    for other in {*SHAPES} - {family}:
        source = open_hf(other)
        evaluate(source, 0, 0, END)
        for bits in (16, 8, 4):
            (payload,) = source.export_kv(0, (0, END), bits).payloads()
            with pytest.raises(EngineError):
                engine.import_kv(0, 0, END, [payload], 0)
    assert np.isfinite(evaluate(engine, 0, 0, 20)).all()


def test_payloads_of_llama_cpp_are_refused_and_the_other_way_round(open_hf, open_engine):
    ours, theirs = open_hf(), open_engine()
    for engine, other in ((ours, theirs), (theirs, ours)):
        evaluate(other, 0, 0, END)
        for bits in (16, 8):
            (payload,) = other.export_kv(0, (0, END), bits).payloads()
            with pytest.raises(EngineError):
                engine.import_kv(1, 0, END, [payload], 0)


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_state_goes_on_nearly_as_the_exact_one(open_hf, bits):
    source, target = open_hf(), open_hf()
    evaluate(source, 0, 0, 130)
    (payload,) = source.export_kv(0, (0, 128), bits).payloads()
    assert len(payload) < {8: 0.4, 4: 0.25}[bits] * len(exported(source, 0, 0, 128))
    assert target.import_kv(0, 0, 128, [payload], 0) is Outcome.DONE
    near, exact = evaluate(target, 0, 128, 130), evaluate(source, 1, 0, 130)
    assert 0 < np.abs(near - exact).max() < {8: 0.05, 4: 0.6}[bits] * np.abs(exact).max()


def test_bits_that_are_not_offered_are_refused(open_hf):
    engine = open_hf()
    evaluate(engine, 0, 0, 20)
    assert engine.capabilities.packs == {16, 8, 4}
    with pytest.raises(EngineError, match="5 bits"):
        engine.export_kv(0, (0, 20), 5).payloads()


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
