"""Models whose state is kept as a whole: each sequence by itself, as the model's authors wrote it."""

from __future__ import annotations

import functools
from contextlib import suppress

import numpy as np
import pytest
import torch

from emberkeep.engine.base import KvUnit, Outcome, Rows
from emberkeep.engine.hf.whole_engine import HfWholeEngine
from emberkeep.errors import EngineError
from helpers import tiny_hf
from helpers.chance import seed, times
from helpers.engines import TOKENS, close, evaluate
from helpers.scheduling import Rig

pytestmark = pytest.mark.slow

LENGTH = 30
OTHERS = TOKENS[::-1].copy()


@pytest.fixture(params=tiny_hf.WHOLE)
def family(request) -> str:
    return request.param


@functools.cache
def reference(family: str) -> np.ndarray:
    tokens = torch.from_numpy(TOKENS[:LENGTH].astype(np.int64))[None]
    with torch.no_grad():
        return tiny_hf.build(family)(input_ids=tokens, use_cache=False).logits[0].numpy()


def test_slices_beside_other_sequences_give_what_the_model_itself_gives(open_hf, family):
    engine = open_hf(family, sequences=4)
    assert isinstance(engine, HfWholeEngine)
    assert engine.capabilities.kv_unit is KvUnit.SNAPSHOT
    for start, end in ((0, 13), (13, 14), (14, LENGTH)):
        batch = [Rows(1, start, OTHERS[start:end], False), Rows(0, start, TOKENS[start:end], True)]
        assert engine.evaluate(batch) is Outcome.DONE
        assert close(engine.logits(1), reference(family)[end - 1])


def test_state_that_went_out_and_in_goes_on_as_if_it_had_never_stopped(open_hf, family):
    source, target = open_hf(family, sequences=2), open_hf(family, sequences=2)
    evaluate(source, 0, 0, 20)
    payload = source.export_snapshot(0)
    assert target.import_snapshot(1, 20, payload) is Outcome.DONE
    assert target.export_snapshot(1) == payload
    restored = evaluate(target, 1, 20, LENGTH)
    assert np.array_equal(restored, evaluate(source, 0, 20, LENGTH))
    assert close(restored, reference(family)[-1])


@pytest.mark.parametrize("family", ["mamba", "lfm2", "llama4_text"])
def test_whatever_is_done_to_a_snapshot_it_is_refused_or_data(open_hf, family):
    engine = open_hf(family, cells=256, sequences=2)
    evaluate(engine, 0, 0, 20)
    payload = bytes(engine.export_snapshot(0))
    random, size = np.random.default_rng(seed(1)), len(payload)
    broken = [payload[:length] for length in random.integers(size - 64, size=times(20)).tolist()]
    for data in (*broken, random.bytes(size), b"", payload[16:]):
        with pytest.raises(EngineError):
            engine.import_snapshot(1, 20, memoryview(data))
        engine.trim(1, 0)
    described = 16 + int.from_bytes(payload[8:12], "little")
    for offset in (
        *range(16),
        *random.integers(16, described, times(60)),
        *random.integers(described, size, times(8)),
    ):
        data = bytearray(payload)
        data[offset] ^= int(random.integers(1, 256))
        with suppress(EngineError):
            engine.import_snapshot(1, 20, memoryview(data))
        with suppress(EngineError):
            engine.evaluate([Rows(1, 20, TOKENS[20:21], True)])
        engine.trim(1, 0)
    assert engine.import_snapshot(1, 20, memoryview(payload)) is Outcome.DONE
    assert np.array_equal(evaluate(engine, 1, 20, 21), evaluate(engine, 0, 20, 21))


@pytest.mark.parametrize("family", ["lfm2", "mamba"])
def test_snapshots_of_other_models_are_refused(open_hf, family):
    engine = open_hf(family)
    for other in {"lfm2", "mamba", "llama4_text"} - {family}:
        source = open_hf(other)
        evaluate(source, 0, 0, 20)
        with pytest.raises(EngineError):
            engine.import_snapshot(0, 20, source.export_snapshot(0))
    assert np.isfinite(evaluate(engine, 0, 0, 20)).all()


@pytest.mark.parametrize("family", ["lfm2", "bloom"])
def test_conversations_are_answered_as_without_a_cache(open_hf, tmp_path, family):
    prompt, more = TOKENS[:200].tolist(), {"max_new": 6, "closing": (258,)}
    with Rig(tmp_path, open_hf(family), prefill_slice=256) as rig:
        first = rig.run(prompt, **more)
        turn = [*prompt, *first.answer, 258, *TOKENS[300:330].tolist()]
        for tokens in (turn, prompt[:150], turn):
            cached = rig.run(tokens, **more)
            fresh = rig.run(tokens, use_cache=False, **more)
            assert cached.answer == fresh.answer
        assert rig.scheduler.counters.failed == 0
        assert cached.lookup.reused_tokens >= len(prompt)
    with Rig(tmp_path, open_hf(family), prefill_slice=256) as rig:
        assert rig.run(turn, **more).lookup.cold_tokens >= len(prompt)
