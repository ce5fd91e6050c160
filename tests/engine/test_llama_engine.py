"""What is particular to llama.cpp: hostile state, other kinds of models, fingerprints."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

from emberkeep.engine.base import KvUnit, Outcome, Rows
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.errors import EngineError, ModelBroken, ModelNotFound
from helpers import tiny_gguf
from helpers.engines import KINDS, RANGE_KINDS, SNAPSHOT_KINDS, TOKENS, evaluate, exported
from helpers.scheduling import Recorder, Rig


@pytest.fixture(params=[True, False], ids=["flash", "no flash"])
def flash(request) -> bool:
    return request.param


@pytest.mark.parametrize("kind", RANGE_KINDS)
def test_ranges_that_went_out_and_in_give_bit_equal_logits(open_engine, kind):
    source, target = open_engine(kind), open_engine(kind)
    evaluate(source, 0, 0, 700)
    borders = (0, 128, 130, 512, 700)
    for start, end, payload in zip(borders, borders[1:], source.export_kv(0, borders).payloads(), strict=False):
        assert target.import_kv(0, start, end, [payload], start) is Outcome.DONE
    assert np.array_equal(evaluate(target, 0, 700, 708), evaluate(source, 0, 700, 708))


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("is_key", [True, False])
def test_a_cell_that_holds_no_number_spoils_no_other_sequence(open_engine, number, is_key):
    """With flash attention others do not notice; without, the step fails and nothing of it is left."""
    engine, other = open_engine(), open_engine()
    evaluate(engine, 0, 0, 20)
    spoiled = np.frombuffer(exported(engine, 0, 0, 20), np.uint8).copy()
    layout = engine._context.layout
    for run, rows in layout.rows(spoiled, 20):
        if run.is_key == is_key:
            rows.view("<f2")[:] = number
    engine.trim(0, 0)
    engine.import_kv(0, 0, 20, [memoryview(spoiled)], 0)
    step = [Rows(1, 0, TOKENS[:30], outputs=0)]
    if engine._settings.flash:
        engine.evaluate(step)
    else:
        with pytest.raises(FloatingPointError):
            engine.evaluate(step)
        with pytest.raises(EngineError):  # what others held is gone, and they learn it
            engine.evaluate([Rows(0, 20, TOKENS[20:30], outputs=1)])
        engine.trim(1, 0)
        engine.evaluate(step)
    assert np.array_equal(evaluate(engine, 1, 30, 40), (evaluate(other, 1, 0, 30), evaluate(other, 1, 30, 40))[1])


@pytest.mark.parametrize("kind", ["dense", "sliding window"])
def test_requests_beside_one_that_spoils_a_step_are_answered_as_alone(open_engine, tmp_path, monkeypatch, kind):
    """Without flash attention the engine is emptied then; conversations that were idle in it start anew."""
    engine = open_engine(kind, flash=False)
    idle, prompts = TOKENS[:100].tolist(), [TOKENS[100 * n :][:90].tolist() for n in (2, 4)]
    with Rig(tmp_path, engine, parallel=2) as rig:
        alone = [rig.run(prompt, max_new=6, use_cache=False).answer for prompt in prompts]
        rest = rig.run(idle, max_new=4, closing=())
        look, together = engine._check_numbers, []

        def spoil(row: int) -> None:
            together.append(len(engine._first_outputs) == 2)
            is_second = together[-1] and sum(together) == 2
            with monkeypatch.context() as patch:
                if is_second:
                    patch.setattr("emberkeep.engine.llamacpp.engine.isnan", lambda number: True)
                look(row)

        monkeypatch.setattr(engine, "_check_numbers", spoil)
        recorders = [rig.start(prompt, max_new=6, use_cache=False) for prompt in prompts]
        for recorder in recorders:
            recorder.wait()
        assert [recorder.answer for recorder in recorders] == alone
        assert sum(together) > 2  # they went on alone, and then together again
        turn = [*idle, *rest.answer, *TOKENS[600:620].tolist()]
        first = rig.start(turn, max_new=4)
        first.wait()
        again = rig.run(turn, max_new=4)
        assert again.answer == rig.run(turn, max_new=4, use_cache=False).answer


def test_a_payload_of_another_model_shape_is_refused(open_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_gguf, "LAYERS", 3)
    settings = LlamaSettings(context=256, cells=256, sequences=2, batch=64, threads=1)
    deeper = LlamaEngine(LlamaModel(tiny_gguf.dense(tmp_path / "deeper.gguf")), settings, "d")
    evaluate(deeper, 0, 0, 30)
    payload = exported(deeper, 0, 0, 30)
    deeper.close()
    with pytest.raises(EngineError):
        open_engine().import_kv(0, 0, 30, [payload], 0)


def test_the_fingerprint_changes_when_the_cells_make_the_model_rotate_differently(open_engine):
    assert open_engine(cells=512).fingerprint == open_engine(cells=1024).fingerprint
    assert open_engine(cells=1024).fingerprint != open_engine(cells=2048).fingerprint


def test_a_model_with_one_set_of_rope_factors_has_one_fingerprint_for_all_contexts(open_engine):
    one, other = (open_engine(cells=cells, rope_switches=False) for cells in (1024, 2048))
    assert one.fingerprint == other.fingerprint


def test_each_kind_of_model_says_how_its_state_can_be_kept(open_engine):
    units = {kind: open_engine(kind).capabilities.kv_unit for kind in KINDS}
    assert units == {
        **dict.fromkeys(RANGE_KINDS, KvUnit.RANGE),
        "recurrent": KvUnit.SNAPSHOT,
        "hybrid": KvUnit.BOTH,
        "sliding window": KvUnit.BOTH,
        "hybrid window": KvUnit.BOTH,
    }


def test_what_llama_cpp_would_rotate_wrongly_is_not_moved(open_engine):
    """It knows only of tokens with several positions that it cannot."""
    engines = {kind: open_engine(kind) for kind in RANGE_KINDS}
    can = {kind for kind, engine in engines.items() if engine.capabilities.can_shift}
    assert can == {"dense", "latent"}
    for kind in RANGE_KINDS.keys() - can:
        evaluate(engines[kind], 0, 0, 60)
        before = exported(engines[kind], 0, 0, 60)
        with pytest.raises(EngineError, match="cut out"):
            engines[kind].splice(0, 20, 40, TOKENS[:5])
        assert exported(engines[kind], 0, 0, 60) == before


@pytest.mark.parametrize("kind", ["dense", *SNAPSHOT_KINDS])
def test_conversations_are_answered_as_without_a_cache(open_engine, tmp_path, kind):
    """Turns, a branch and a repeat, against evaluation of everything afresh."""
    prompt = TOKENS[:200].tolist()
    with Rig(tmp_path, open_engine(kind), prefill_slice=256) as rig:
        first = rig.run(prompt, max_new=10, closing=(2,))
        turn = [*prompt, *first.answer, 2, *TOKENS[300:330].tolist()]
        branch = [*prompt[:150], *TOKENS[330:360].tolist()]
        for tokens in (turn, branch, prompt, turn):
            cached = rig.run(tokens, max_new=10, closing=(2,))
            fresh = rig.run(tokens, max_new=10, closing=(2,), use_cache=False)
            assert cached.answer == fresh.answer
        assert rig.scheduler.counters.failed == 0


@pytest.mark.parametrize("kind", ["dense", *SNAPSHOT_KINDS])
def test_the_next_turn_continues_in_the_engine(open_engine, tmp_path, kind):
    prompt = TOKENS[:100].tolist()
    with Rig(tmp_path, open_engine(kind)) as rig:
        first = rig.run(prompt, max_new=6, closing=(2, 50))
        turn = [*prompt, *first.answer, 2, 50, *TOKENS[300:320].tolist()]
        assert rig.run(turn, max_new=1).lookup.hot_tokens == len(turn) - 20


@pytest.mark.parametrize("kind", ["dense", *SNAPSHOT_KINDS])
def test_after_a_stop_string_the_next_answer_is_right(open_engine, tmp_path, kind):
    prompt = TOKENS[:100].tolist()
    with Rig(tmp_path, open_engine(kind)) as rig:
        stop = Recorder(lambda tokens: 2 if len(tokens) == 4 else None)
        rig.run(prompt, stop, max_new=20)
        assert stop.ending.timings.predicted_n == 2
        turn = [*prompt, *stop.tokens[:2], *TOKENS[300:320].tolist()]
        cached = rig.run(turn, max_new=8)
        assert cached.answer == rig.run(turn, max_new=8, use_cache=False).answer
        assert rig.scheduler.counters.failed == 0


def test_a_restart_of_a_real_engine_reuses_everything(open_engine, tmp_path):
    prompt = TOKENS[:300].tolist()
    with Rig(tmp_path, open_engine()) as rig:
        first = rig.run(prompt, max_new=10)
    with Rig(tmp_path, open_engine()) as rig:
        again = rig.run(prompt, max_new=10)
        assert again.lookup.cold_tokens == 299
        assert again.answer == first.answer


def test_state_of_other_weights_is_a_miss(open_engine, tmp_path):
    prompt = TOKENS[:300].tolist()
    with Rig(tmp_path, open_engine(digest="one")) as rig:
        rig.run(prompt)
    with Rig(tmp_path, open_engine(digest="two")) as rig:
        assert rig.run(prompt).lookup.reused_tokens == 0


def test_many_conversations_in_a_small_engine_are_answered_as_alone(open_engine, tmp_path):
    """Cells are scattered, given up and reloaded all the time."""
    engine = open_engine(cells=512)
    prompts = [[*TOKENS[:40].tolist(), *TOKENS[40 + 30 * n :][:110].tolist()] for n in range(8)]
    with Rig(tmp_path, engine, parallel=3, prefill_slice=64) as rig:
        for _ in range(3):
            recorders = [rig.start(prompt, max_new=6, closing=()) for prompt in prompts]
            for recorder in recorders:
                recorder.wait()
        rig.settle()
        assert rig.store.counters.damaged_chunks == 0
        assert rig.scheduler.counters.failed == 0
        for prompt in prompts:
            cached = rig.run(prompt, max_new=6)
            assert cached.lookup.reused_tokens == len(prompt) - 1
            assert cached.answer == rig.run(prompt, max_new=6, use_cache=False).answer


def test_a_missing_or_broken_model_file_is_an_error(tmp_path):
    with pytest.raises(ModelNotFound):
        LlamaModel(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(200))
    with pytest.raises(ModelBroken, match="cannot load bad"):
        LlamaModel(tmp_path / "bad.gguf")


def test_no_text_is_tokenized_with_a_model_that_is_being_freed(tmp_path, monkeypatch):
    model = LlamaModel(tiny_gguf.dense(tmp_path / "tiny.gguf"))
    vocab, inside, may_go_on = model.vocab, Event(), Event()
    tokenize = vocab._tokenize

    def slowly(text, parse_special):
        inside.set()
        assert may_go_on.wait(10)
        return tokenize(text, parse_special)

    monkeypatch.setattr(vocab, "_tokenize", slowly)
    with ThreadPoolExecutor(2) as threads:
        ids = threads.submit(vocab.tokenize, "abc")
        assert inside.wait(10)
        closing = threads.submit(vocab.close)
        while not vocab._in_use._ended:
            pass
        with pytest.raises(EngineError, match="unloaded meanwhile"):
            vocab.tokenize("abc")
        assert not closing.done()
        may_go_on.set()
        assert ids.result()
        closing.result()
    model.close()


def test_a_model_tells_how_much_of_it_is_loaded(tmp_path):
    reported: list[float] = []
    LlamaModel(tiny_gguf.dense(tmp_path / "tiny.gguf"), report=reported.append).close()
    assert reported == sorted(reported)
    assert reported[-1] == 1
