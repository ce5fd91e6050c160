"""What engines export in fewer bits: smaller, nearly the same when it comes back, and checked before it does."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from emberkeep.engine.base import Engine, KvUnit, Outcome
from emberkeep.engine.fake import FakeEngine
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.errors import EngineError
from helpers.chance import seed, times
from helpers.engines import KINDS, RANGE_KINDS, TOKENS, broken_payloads, evaluate, exported

pytestmark = pytest.mark.slow

WITH_RANGES = [*RANGE_KINDS, "hybrid", "sliding window"]
NEAR = {8: 0.15, 4: 2.0}
"""How far logits may be off, of which other tokens change several."""


@pytest.fixture
def open_engine(open_either_way):
    return open_either_way


def packed(engine: Engine, start: int, end: int, bits: int) -> memoryview:
    (payload,) = engine.export_kv(0, (start, end), bits).payloads()
    return payload


@pytest.mark.parametrize(
    ("kind", "bits"),
    # With an index a random model looks at other tokens because of the smallest difference.
    [*((kind, 8) for kind in WITH_RANGES if kind != "indexed"), ("dense", 4), ("sliding window", 4)],
)
def test_packed_state_goes_on_nearly_as_the_exact_one(open_engine, kind, bits):
    source, target = open_engine(kind, cells=512, sequences=2), open_engine(kind, cells=512, sequences=2)
    evaluate(source, 0, 0, 130)
    payload = packed(source, 0, 128, bits)
    assert target.import_kv(0, 0, 128, [payload], 0) is Outcome.DONE
    assert target.import_kv(0, 128, 130, [exported(source, 0, 128, 130)], 128) is Outcome.DONE
    if source.capabilities.kv_unit.has_snapshots:
        assert target.import_snapshot(0, 130, source.export_snapshot(0)) is Outcome.DONE
    difference = np.abs(evaluate(target, 0, 130, 140) - evaluate(source, 0, 130, 140)).max()
    assert difference < NEAR[bits]


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_says_in_which_bits_it_exports(open_engine, kind):
    packs = open_engine(kind).capabilities.packs
    assert packs == ({16, 8, 4} if kind in WITH_RANGES else {16})


def test_the_fake_engine_packs_what_is_by_range():
    assert FakeEngine().capabilities.packs == {16, 8, 4}
    assert FakeEngine(kv_unit=KvUnit.SNAPSHOT).capabilities.packs == {16}


@pytest.mark.parametrize(("bits", "share"), [(8, 0.6), (4, 0.35)])
def test_fewer_bits_are_fewer_bytes(open_engine, bits, share):
    """A tiny model has few channels, and what stands beside its rows counts for more."""
    for engine in (open_engine(), FakeEngine()):
        evaluate(engine, 0, 0, 128)
        assert len(packed(engine, 0, 128, bits)) < share * len(exported(engine, 0, 0, 128))


@pytest.mark.parametrize("bits", [8, 4])
def test_state_of_the_fake_engine_is_another_one_after_packing(bits):
    source, target = FakeEngine(), FakeEngine()
    evaluate(source, 0, 0, 128)
    assert target.import_kv(0, 0, 128, [packed(source, 0, 128, bits)], 0) is Outcome.DONE
    assert not np.array_equal(evaluate(target, 0, 128, 129), evaluate(source, 0, 128, 129))


@pytest.mark.parametrize(("start", "end"), [(0, 64), (30, 100), (63, 64)])
def test_a_part_of_a_packed_payload_can_be_imported(open_engine, start, end):
    source, target = open_engine(), open_engine()
    evaluate(source, 0, 0, 128)
    payload = packed(source, 0, 128, 8)
    if start:
        target.import_kv(0, 0, start, [payload], 0)
    assert target.import_kv(0, start, end, [payload], 0) is Outcome.DONE
    fresh = open_engine()
    evaluate(fresh, 0, 0, end)
    assert np.abs(evaluate(target, 0, end, end + 10) - evaluate(fresh, 0, end, end + 10)).max() < NEAR[8]


@pytest.fixture(params=["dense", "several positions", "sliding window"])
def llama(request, open_engine) -> LlamaEngine:
    return open_engine(request.param, cells=512, sequences=2)


@pytest.mark.parametrize("bits", [8, 4])
def test_broken_packed_payloads_are_refused(llama, bits):
    for engine in (llama, FakeEngine()):
        evaluate(engine, 0, 0, 100)
        payload = packed(engine, 0, 100, bits)
        for broken in broken_payloads(payload):
            with pytest.raises(EngineError):
                engine.import_kv(1, 0, 100, [broken], 0)
        with pytest.raises(EngineError):
            engine.import_kv(1, 0, 99, [payload], 1)
        assert engine.import_kv(1, 0, 100, [payload], 0) is Outcome.DONE


def test_flipped_bytes_in_a_packed_payload_are_refused_or_data(llama):
    """llama.cpp never gets to see a size, a position or a type that it did not write itself."""
    evaluate(llama, 0, 0, 20)
    payload = packed(llama, 0, 20, 8)
    random = np.random.default_rng(seed(1))
    beside = range(max(len(payload) - 2000, 0), len(payload))
    for offset in {*random.integers(len(payload), size=times(200)).tolist(), *range(64), *beside}:
        data = np.frombuffer(payload, np.uint8).copy()
        data[offset] ^= int(random.integers(1, 256))
        with suppress(EngineError):
            llama.import_kv(1, 0, 20, [memoryview(data)], 0)
        llama.trim(1, 0)
    assert np.isfinite(evaluate(llama, 1, 0, 30, TOKENS)).all()
