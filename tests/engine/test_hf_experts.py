"""Counting the experts of tiny mixtures: what the model's own router scores say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from emberkeep.engine.base import Outcome, Piece, Rows
from emberkeep.engine.hf.residency import Placing
from emberkeep.engine.hf.whole_engine import open_engine
from emberkeep.errors import EngineError
from emberkeep.types.models import LayerExperts, Residency
from helpers import tiny_hf

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(3).integers(40, 120, 60, dtype=np.int32)
USED = {"jamba": 1, "llama4_text": 1}
PAGED, WHOLE = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"), ("jamba", "qwen3_next", "llama4_text")


@pytest.fixture(scope="session")
def counted(tmp_path_factory):
    """An engine whose experts are counted, over a model of its own: hooks stay on what they are put on."""
    engines = []

    def make(family: str = "mixtral", placing: Placing | None = None) -> Any:
        folder = tiny_hf.write(tmp_path_factory.mktemp(family), family)
        engines.append(open_engine(tiny_hf.load(folder, placing=placing), tiny_hf.settings(batch=64), "digest"))
        engines[-1].experts.track(True)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def mixture(counted):
    return counted()


@torch.no_grad()
def expected(family: str, tokens: np.ndarray = TOKENS) -> tuple[LayerExperts, ...]:
    """Of the scores that transformers tells, the highest: as many as the model uses."""
    network = tiny_hf.build(family)
    output = network(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True)
    layers = [
        (index, layer)
        for index, layer in enumerate(network.model.layers)
        if any("experts" in n for n, _ in layer.named_modules())
    ]
    assert len(output.router_logits) == len(layers)
    found = []
    for (index, layer), scores in zip(layers, output.router_logits, strict=True):
        corrections = [b for n, b in layer.named_buffers() if n.endswith("e_score_correction_bias")]
        scores = scores.flatten(0, -2)
        if corrections:  # chosen by another number than the one that is told
            scores = scores.sigmoid() + corrections[0]
        chosen = scores.topk(USED.get(family, 2)).indices
        found.append(
            LayerExperts(
                index, len(tokens), tuple(torch.bincount(chosen.flatten(), minlength=scores.shape[1]).tolist())
            )
        )
    return tuple(found)


def evaluate(engine: Any, start: int, end: int, *, sequence: int = 0) -> np.ndarray:
    assert engine.evaluate([Rows(sequence, start, TOKENS[start:end], outputs=1)]) is Outcome.DONE
    return engine.logits(0).copy()


@pytest.mark.parametrize("family", [*PAGED, *WHOLE, *tiny_hf.MIXTURES])
def test_counts_are_those_of_the_routers_scores(counted, family):
    engine = counted(family)
    before = engine.experts.stats()
    assert (before.enabled, before.experts_used, before.layers) == (True, USED.get(family, 2), ())
    for start, end in ((0, 37), (37, 59), (59, 60)):
        evaluate(engine, start, end)
    assert engine.experts.stats().layers == expected(family)


def test_sequences_of_one_step_are_all_counted(mixture):
    batch = [Rows(0, 0, TOKENS[:20], outputs=0), Rows(1, 0, TOKENS[:5], outputs=1)]
    assert mixture.evaluate(batch) is Outcome.DONE
    first, second = expected("mixtral", TOKENS[:20]), expected("mixtral", TOKENS[:5])
    together = [tuple(np.add(a.counts, b.counts)) for a, b in zip(first, second, strict=True)]
    assert [layer.counts for layer in mixture.experts.stats().layers] == together


def test_off_counts_nothing_keeps_what_was_counted_and_leaves_no_hook(mixture):
    """Switching empties the engine, and changes no answer and no fingerprint."""
    before, name = evaluate(mixture, 0, 20), mixture.fingerprint
    counted = mixture.experts.stats().layers
    mixture.experts.track(False)
    assert mixture.stats()["pool"]["used_blocks"] == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in mixture._network.model.modules())
    np.testing.assert_array_equal(evaluate(mixture, 0, 20), before)
    assert mixture.fingerprint == name
    assert mixture.experts.stats().layers == counted
    mixture.experts.track(True)
    evaluate(mixture, 0, 20)
    assert [layer.tokens for layer in mixture.experts.stats().layers] == [40] * len(counted)
    mixture.experts.reset()
    assert mixture.experts.stats().layers == ()


def test_a_step_that_failed_is_not_counted(mixture, monkeypatch):
    network = mixture._network.model
    monkeypatch.setattr(network.lm_head, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(EngineError, match="broken"):
        evaluate(mixture, 0, 20)
    monkeypatch.undo()
    evaluate(mixture, 0, 20)
    assert mixture.experts.stats().layers == expected("mixtral", TOKENS[:20])


@pytest.mark.parametrize("residency", [Residency.STREAM, Residency.FFN])
def test_weights_that_pass_are_counted_alike(counted, residency):
    engine = counted("qwen3_moe", Placing(residency))
    evaluate(engine, 0, 60)
    assert engine.stats()["streaming"]["streamed_units"] == 3
    assert engine.experts.stats().layers == expected("qwen3_moe")


def test_what_is_repaired_is_counted_in_the_layers_that_compute_it(mixture):
    evaluate(mixture, 0, 32)
    (payload,) = mixture.export_kv(0, [0, 32]).payloads()
    mixture.experts.reset()
    piece = Piece(0, 32, payload, payload_start=0, source=0)
    rows = Rows(1, 0, TOKENS[:40], outputs=1)
    assert mixture.blend(rows, [piece], 0.25).outcome is Outcome.DONE
    tokens = [layer.tokens for layer in mixture.experts.stats().layers]
    assert tokens[0] == 40 and tokens[-1] == 8 + 8


def test_a_dense_model_has_none(open_hf):
    assert open_hf("llama").experts is None
    assert open_hf("mamba").experts is None


def test_what_was_counted_can_be_asked_for_after_the_end(counted):
    engine = counted("olmoe")
    evaluate(engine, 0, 20)
    engine.close()
    assert engine.experts.stats().layers == expected("olmoe", TOKENS[:20])
