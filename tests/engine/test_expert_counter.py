"""Counting the experts of a tiny mixture whose router can be predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

from emberkeep.engine.base import Outcome, Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.engine.llamacpp import context
from emberkeep.engine.llamacpp.context import GraphExpertCounter, LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import llama
from emberkeep.errors import EngineError
from emberkeep.types.models import LayerExperts
from helpers import tiny_gguf
from helpers.scheduling import PATIENCE, Rig

TOKENS = np.random.default_rng(3).integers(40, 120, 400, dtype=np.int32)
OTHER = TOKENS[::-1].copy()
LAST = tiny_gguf.LAYERS - 1
Open = Callable[..., LlamaEngine]


@pytest.fixture(scope="session")
def mixture(tmp_path_factory):
    return tiny_gguf.moe(tmp_path_factory.mktemp("tiny") / "moe.gguf")


@pytest.fixture
def open_engine(mixture) -> Iterator[Open]:
    engines = []

    def make(path=mixture) -> LlamaEngine:
        settings = LlamaSettings(context=1024, cells=1024, sequences=4, batch=256, threads=1)
        engines.append(LlamaEngine(LlamaModel(path), settings, "digest"))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(open_engine: Open) -> LlamaEngine:
    return open_engine()


@pytest.fixture
def tracked(engine: LlamaEngine) -> LlamaEngine:
    engine.experts.track(True)
    return engine


def evaluate(engine: LlamaEngine, start: int, end: int, *, sequence: int = 0, logits: bool = True) -> np.ndarray:
    assert engine.evaluate([Rows(sequence, start, TOKENS[start:end], logits)]) is Outcome.DONE
    return engine.logits(0).copy() if logits else np.empty(0)


def predicted(layer: int, tokens: Iterable[int]) -> LayerExperts:
    routed = [int(token) for token in tokens]
    chosen = Counter(expert for token in routed for expert in tiny_gguf.chosen_experts(token, layer))
    return LayerExperts(layer, len(routed), tuple(chosen[expert] for expert in range(tiny_gguf.EXPERTS)))


def test_every_token_is_counted_where_the_router_sent_it(tracked):
    evaluate(tracked, 0, 100, logits=False)
    evaluate(tracked, 100, 101, logits=False)
    evaluate(tracked, 101, 200, logits=False)
    assert tracked.experts.stats().layers == (predicted(0, TOKENS[:200]),)


def test_the_last_layer_counts_the_tokens_that_logits_are_wanted_after(tracked):
    evaluate(tracked, 0, 100, logits=False)
    evaluate(tracked, 100, 200)
    evaluate(tracked, 200, 201)
    assert tracked.experts.stats().layers == (predicted(0, TOKENS[:201]), predicted(LAST, TOKENS[[199, 200]]))


def test_all_sequences_of_a_step_are_counted(tracked):
    tracked.evaluate([Rows(0, 0, TOKENS[:30], True), Rows(1, 0, OTHER[:50], False), Rows(2, 0, OTHER[:1], True)])
    everything = [*TOKENS[:30], *OTHER[:50], *OTHER[:1]]
    assert tracked.experts.stats().layers == (predicted(0, everything), predicted(LAST, [TOKENS[29], OTHER[0]]))


def test_a_model_says_how_many_experts_it_has_before_anything_is_counted(engine):
    stats = engine.experts.stats()
    assert (stats.experts, stats.experts_used) == (tiny_gguf.EXPERTS, tiny_gguf.EXPERTS_USED)
    assert (stats.enabled, stats.layers) == (False, ())


def test_frequencies_are_shares_of_the_tokens(tracked):
    evaluate(tracked, 0, 100)
    for layer in tracked.experts.stats().layers:
        assert sum(layer.frequencies) == pytest.approx(tiny_gguf.EXPERTS_USED)
        assert layer.frequencies == tuple(count / layer.tokens for count in layer.counts)


def test_a_step_without_room_is_not_counted(tracked):
    for sequence in range(4):
        evaluate(tracked, 0, 250, sequence=sequence)
    before = tracked.experts.stats()
    assert tracked.evaluate([Rows(0, 250, TOKENS[250:350], False)]) is Outcome.NO_ROOM
    assert tracked.experts.stats() == before


def test_without_tracking_there_is_no_callback(monkeypatch, open_engine):
    asked = []
    see = GraphExpertCounter._see
    monkeypatch.setattr(GraphExpertCounter, "_see", lambda *about: asked.append(1) or see(*about))
    engine = open_engine()

    def questions() -> int:
        asked.clear()
        engine.trim(0, 0)
        evaluate(engine, 0, 10)
        return len(asked)

    assert questions() == 0
    engine.experts.track(True)
    assert questions() > 10
    engine.experts.track(False)
    assert questions() == 0
    assert engine.experts.stats().layers == (predicted(0, TOKENS[:10]), predicted(LAST, TOKENS[9:10]))


def test_counting_changes_no_bit_of_the_logits(engine):
    before = [evaluate(engine, 0, 200), evaluate(engine, 200, 201)]
    engine.experts.track(True)
    assert np.array_equal([evaluate(engine, 0, 200), evaluate(engine, 200, 201)], before)
    engine.experts.track(False)
    assert np.array_equal([evaluate(engine, 0, 200), evaluate(engine, 200, 201)], before)


def test_counts_outlive_a_pause_and_end_with_a_reset(tracked):
    evaluate(tracked, 0, 100, logits=False)
    tracked.experts.track(False)
    evaluate(tracked, 0, 50)
    tracked.experts.track(True)
    evaluate(tracked, 0, 60, logits=False)
    assert tracked.experts.stats().layers == (predicted(0, [*TOKENS[:100], *TOKENS[:60]]),)
    tracked.experts.reset()
    assert tracked.experts.stats().layers == ()
    evaluate(tracked, 60, 70, logits=False)
    assert tracked.experts.stats().layers == (predicted(0, TOKENS[60:70]),)


def test_asking_for_what_is_so_already_leaves_the_sequences_alone(tracked):
    evaluate(tracked, 0, 100)
    tracked.experts.track(True)
    evaluate(tracked, 100, 110)
    assert tracked.experts.stats().layers[0].tokens == 110


def test_what_goes_wrong_while_counting_does_not_touch_the_answer(monkeypatch, tracked, caplog):
    expected = evaluate(tracked, 0, 100)
    tracked.trim(0, 0)
    tracked.experts.reset()

    def fail(tensor):
        raise MemoryError

    monkeypatch.setattr(context, "_read_experts", fail)
    assert np.array_equal(evaluate(tracked, 0, 100), expected)
    assert tracked.experts.stats().layers == ()
    assert "not counted" in caplog.text


def test_a_context_that_cannot_be_opened_again_is_an_error_and_can_be_closed(monkeypatch, engine):
    monkeypatch.setattr(llama(), "llama_init_from_model", lambda *_: None)
    with pytest.raises(EngineError, match="make room"):
        engine.experts.track(True)
    engine.close()


@pytest.mark.parametrize("write", [tiny_gguf.dense, tiny_gguf.recurrent])
def test_other_models_have_no_experts(open_engine, tmp_path, write):
    assert open_engine(write(tmp_path / "other.gguf")).experts is None
    assert FakeEngine().experts is None


def test_a_conversation_goes_on_across_the_switch_from_what_was_stored(open_engine, tmp_path):
    prompt = TOKENS[:200].tolist()
    with Rig(tmp_path, open_engine()) as rig:
        for enabled in (True, False):
            first = rig.run(prompt, max_new=8, closing=(2,))
            rig.scheduler.when_idle(lambda enabled=enabled: rig.engine.experts.track(enabled)).result(PATIENCE)
            prompt = [*prompt, *first.answer, 2, *TOKENS[300:330].tolist()]
            resumed = rig.run(prompt, max_new=8, closing=(2,))
            assert resumed.lookup.hot_tokens == 0
            assert resumed.lookup.reused_tokens == len(prompt) - 30
            assert resumed.answer == rig.run(prompt, max_new=8, use_cache=False).answer
        assert rig.scheduler.counters.failed == 0


def test_reused_tokens_are_not_counted(open_engine, tmp_path):
    prompt = TOKENS[:200].tolist()
    with Rig(tmp_path, open_engine()) as rig:
        rig.run(prompt, max_new=0, closing=())
        rig.scheduler.when_idle(lambda: rig.engine.experts.track(True)).result(PATIENCE)
        rig.run([*prompt, *OTHER[:20].tolist()], max_new=0, closing=())
        assert rig.engine.experts.stats().layers == (predicted(0, OTHER[:20]),)
