"""What is particular to the Hugging Face engine: its pool, number formats, failures, fingerprints."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from emberkeep.engine.base import Outcome, Rows
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.pool import BLOCK, KvMemory
from emberkeep.errors import EngineError
from helpers import tiny_hf
from helpers.engines import TOKENS, evaluate, exported
from helpers.scheduling import Recorder, Rig

pytestmark = pytest.mark.slow

OTHERS = TOKENS[::-1].copy()


def pool(engine: HfEngine) -> dict[str, int]:
    return engine.stats()["pool"]


# ── the pool ──


def test_conversations_over_one_prompt_keep_it_once(open_hf):
    engine = open_hf(cells=512, sequences=4)
    evaluate(engine, 0, 0, 4 * BLOCK)
    for sequence in (1, 2, 3):
        engine.copy_kv(0, sequence, 4 * BLOCK)
        evaluate(engine, sequence, 4 * BLOCK, 4 * BLOCK + 1, OTHERS)
    assert pool(engine)["used_blocks"] == 4 + 3
    assert pool(engine)["shared_blocks"] == 4
    assert pool(engine)["references"] == 4 + 3 * 5
    assert pool(engine)["copied_blocks"] == 0


def test_as_many_tokens_fit_as_there_are_cells_however_they_are_shared_out(open_hf):
    engine = open_hf(cells=256, sequences=8)
    lengths = [BLOCK + 1] * 7
    lengths.append(256 - sum(lengths))
    batch = [Rows(sequence, 0, TOKENS[:length], False) for sequence, length in enumerate(lengths)]
    assert engine.evaluate(batch) is Outcome.DONE


# ── failures ──


def test_a_step_that_cannot_be_taken_changes_no_sequence(open_hf):
    """It goes on elsewhere than the state ends, has no room for all of it, or a token that the model lacks."""
    engine = open_hf(cells=4 * BLOCK, sequences=2)
    evaluate(engine, 0, 0, 50)
    used = pool(engine)["used_blocks"]
    follows, unknown = Rows(0, 50, TOKENS[50:60], True), np.array([100_000], np.int32)
    for batch, reason in (
        ([Rows(0, 49, TOKENS[50:60], True)], "cannot go on at 49"),
        ([Rows(0, 51, TOKENS[50:60], True)], "cannot go on at 51"),
        ([follows, Rows(1, 0, unknown, True)], "The model failed"),
    ):
        with pytest.raises(EngineError, match=reason):
            engine.evaluate(batch)
    assert engine.evaluate([follows, Rows(1, 0, OTHERS[:180], True)]) is Outcome.NO_ROOM
    assert pool(engine)["used_blocks"] == used
    with pytest.raises(EngineError):
        engine.export_kv(0, (0, 51)).payloads()
    after = evaluate(engine, 0, 50, 60)
    engine.trim(0, 0)
    evaluate(engine, 0, 0, 50)
    assert np.array_equal(after, evaluate(engine, 0, 50, 60))


# ── number formats, fingerprints ──


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_goes_out_and_in_to_the_bit(tmp_path, dtype):
    model = tiny_hf.load(tiny_hf.write(tmp_path / "m", "qwen3"), dtype=dtype)
    engine = HfEngine(model, tiny_hf.settings(), "digest")
    evaluate(engine, 0, 0, 90)
    payload = exported(engine, 0, 0, 90)
    assert len(payload) == 16 + 90 * engine.capabilities.kv_bytes_per_token
    engine.import_kv(1, 0, 90, [payload], 0)
    assert exported(engine, 1, 0, 90) == payload
    assert np.array_equal(evaluate(engine, 1, 90, 91), evaluate(engine, 0, 90, 91))
    assert engine.splice(1, 5, 20, OTHERS[:3]) is Outcome.DONE
    assert np.isfinite(evaluate(engine, 1, 79, 80, OTHERS)).all()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_the_fingerprint_knows_the_shape_and_the_number_format(hf_model, open_hf, tmp_path):
    halved, settings = tiny_hf.load(tiny_hf.write(tmp_path / "m"), dtype="bfloat16"), tiny_hf.settings()
    engines = [
        # First: where mkldnn cannot multiply bfloat16, torch switches it off for the rest of the process.
        HfEngine(halved, settings, "digest"),
        open_hf("llama"),
        open_hf("qwen3"),
        open_hf("llama", digest="other"),
    ]
    assert len({engine.fingerprint for engine in engines}) == len(engines)
    assert HfEngine(hf_model("llama"), settings, "digest").fingerprint == engines[1].fingerprint


# ── in the loop ──


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_conversations_are_answered_as_without_a_cache(open_hf, tmp_path, family):
    """Turns, a branch and a repeat, against evaluation of everything afresh."""
    prompt, closing = TOKENS[:200].tolist(), (258,)
    with Rig(tmp_path, open_hf(family), prefill_slice=256) as rig:
        first = rig.run(prompt, max_new=6, closing=closing)
        turn = [*prompt, *first.answer, 258, *TOKENS[300:330].tolist()]
        branch = [*prompt[:150], *TOKENS[330:360].tolist()]
        for tokens in (turn, branch, prompt):
            cached = rig.run(tokens, max_new=6, closing=closing)
            fresh = rig.run(tokens, max_new=6, closing=closing, use_cache=False)
            assert cached.answer == fresh.answer
            assert cached.lookup.reused_tokens >= 150
            assert fresh.lookup.reused_tokens == 0
        assert rig.scheduler.counters.failed == 0


def test_more_conversations_than_the_pool_holds_are_all_answered(open_hf, tmp_path):
    engine = open_hf(cells=256, sequences=8)
    prompts = [np.roll(TOKENS, n)[: 90 + n].tolist() for n in range(6)]
    with Rig(tmp_path, engine, parallel=4, prefill_slice=128) as rig:
        more = {"max_new": 6, "closing": (258,)}
        expected = [rig.run(prompt, use_cache=False, **more).answer for prompt in prompts]
        recorders = [rig.start(prompt, Recorder(), **more) for prompt in prompts]
        assert [recorder.answer for recorder in recorders] == expected
        assert rig.scheduler.counters.failed == 0


@pytest.fixture
def pools(monkeypatch):
    """Those that are still held, though nobody has collected garbage."""
    held = weakref.WeakSet()

    def opened(*given):
        held.add(pool := KvMemory(*given))
        return pool

    monkeypatch.setattr("emberkeep.engine.hf.engine.KvMemory", opened)
    gc.disable()
    yield held
    gc.enable()


def test_a_model_whose_batches_would_be_wrong_is_refused(tmp_path, monkeypatch, pools):
    """Its own code, run over one sequence alone, is what the engine must agree with. Its memory is free at
    once: the model is run otherwise then."""
    model = tiny_hf.load(tiny_hf.write(tmp_path / "m"))
    layer = model.network.model.layers[1].self_attn
    right = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *a, **k: (torch.flip(right(*a, **k)[0], [1]), None))
    with pytest.raises(EngineError, match="batch of several sequences"):
        HfEngine(model, tiny_hf.settings(), "digest")
    assert not pools


def test_nothing_of_a_closed_engine_waits_to_be_collected(hf_model, pools):
    engine = HfEngine(hf_model("llama"), tiny_hf.settings(), "digest")
    evaluate(engine, 0, 0, 50)
    engine.close()
    assert not pools
    left = weakref.ref(engine)
    del engine
    assert left() is None
