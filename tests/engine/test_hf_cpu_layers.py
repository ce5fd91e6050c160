"""Weights in panels, layers of the usual make and attention of several sequences: our own code on a CPU."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from emberkeep.engine.base import Outcome, Rows
from emberkeep.engine.hf.attention import AttentionOptions, Span
from emberkeep.engine.hf.cpu_layers import cpu_layers
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.model_loader import fingerprint
from emberkeep.engine.hf.network import Network, Step, learn
from emberkeep.engine.hf.own_steps import agree
from emberkeep.engine.hf.panels import PanelLinear, has_panels, pack
from emberkeep.engine.hf.pool import BLOCK, BlockTable, KvMemory, LayerShape, StreamShape
from emberkeep.types.models import AttentionTier
from helpers import tiny_hf
from helpers.engines import TOKENS, close, evaluate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch multiplies with another library here"),
]

FLASH, PLAIN = AttentionTier.FLASH, AttentionTier.PLAIN
USUAL = ["llama", "qwen2", "qwen3"]


@pytest.fixture
def packed(tmp_path):
    def make(family: str):
        model = tiny_hf.load(tiny_hf.write(tmp_path / family, family))
        pack(model.network, least=1)
        assert has_panels(model.network)
        return model

    return make


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_panels_multiply_as_the_weight_does(rows, has_bias):
    owner = torch.nn.Module()
    owner.query, owner.odd = torch.nn.Linear(48, 96, has_bias), torch.nn.Linear(48, 33, has_bias)
    owner.key = torch.nn.Linear(48, 32, has_bias)
    linear, x = [owner.query, owner.key], torch.randn(1, rows, 48)
    with torch.no_grad():
        expected = [part(x) for part in linear]
        pack(owner, least=1)
        parts = [owner.query, owner.key]
        assert all(isinstance(part, PanelLinear) for part in parts)
        assert type(owner.odd) is torch.nn.Linear
        for part, before, result in zip(parts, linear, expected, strict=True):
            torch.testing.assert_close(part(x), result)
            assert torch.equal(part.weight, before.weight)


@pytest.mark.parametrize("family", USUAL)
@pytest.mark.parametrize("in_panels", [True, False])
@torch.no_grad()
def test_layers_compute_what_their_own_code_computes(packed, hf_model, family, in_panels):
    network = Network((packed if in_panels else hf_model)(family).network)
    learned, rows = learn(network), torch.arange(70)
    memory = KvMemory(learned.layers, 96, learned.dtype, network.device)
    own = cpu_layers(network.layers, [learned.options[layer] for layer in range(len(network.layers))])
    assert own is not None
    step = Step(memory, [Span(0, 70, BlockTable(array("i", range(3)), 70), 0)], rows, tier=PLAIN)
    assert agree(network.layers, own, lambda: network.run(step, rows, rows, rows))
    assert agree(network.layers, own[::-1], lambda: network.run(step, rows, rows, rows)) is False


@torch.no_grad()
def test_layers_of_another_make_keep_their_own_code(hf_model):
    network = Network(hf_model("gemma2").network)
    options = learn(network).options
    assert cpu_layers(network.layers, [options[layer] for layer in range(len(network.layers))]) is None


@pytest.mark.parametrize("family", USUAL)
def test_state_of_panels_has_a_fingerprint_of_its_own_and_the_same_answers(packed, hf_model, family):
    models = packed(family), hf_model(family)
    assert len({fingerprint(model, [], "digest", FLASH) for model in models}) == 2
    answers = []
    for model in models:
        engine = HfEngine(model, tiny_hf.settings(), "digest")
        answers.append([evaluate(engine, 0, 0, 100), evaluate(engine, 0, 100, 130), evaluate(engine, 0, 130, 131)])
        engine.close()
    assert all(close(one, other) for one, other in zip(*answers, strict=True))


@pytest.mark.parametrize("rows", [(1, 1, 1, 1), (1, 3, 1, 2), (2, 1, 40, 4), (1, 9, 1, 1)])
@pytest.mark.parametrize("starts", [(50, 60, 70, 33), (5, 200, 90, 120), (1, 30, 31, 32)])
def test_sequences_beside_each_other_get_what_they_get_alone(packed, rows, starts):
    engine = HfEngine(packed("llama"), tiny_hf.settings(), "digest")
    alone = []
    for sequence, (start, count) in enumerate(zip(starts, rows, strict=True)):
        evaluate(engine, sequence, 0, start, TOKENS[sequence:])
        alone.append(evaluate(engine, sequence, start, start + count, TOKENS[sequence:]))
        engine.trim(sequence, start)
    parts = [
        (TOKENS[s:][start : start + count], start)
        for s, (start, count) in enumerate(zip(starts, rows, strict=True))
    ]
    assert engine.evaluate([Rows(s, start, tokens, 1) for s, (tokens, start) in enumerate(parts)]) is Outcome.DONE
    assert all(close(engine.logits(index), expected) for index, expected in enumerate(alone))
    engine.close()


@pytest.mark.parametrize("rows", [(1, 1, 1), (1, 2, 1)])
def test_what_lies_in_other_cells_reaches_no_sequence(rows):
    """Cells that are given back keep what was in them."""
    shape = LayerShape(StreamShape(2, 16), StreamShape(2, 16))
    starts, random = (40, 55, 62), torch.Generator().manual_seed(1)
    tables = [
        BlockTable(array("i", [2 * n, 2 * n + 9]), start + count)
        for n, (start, count) in enumerate(zip(starts, rows, strict=True))
    ]
    results = []
    for tier, nothing in ((FLASH, float("nan")), (PLAIN, 0.0)):
        memory = KvMemory([shape], 16 * BLOCK, torch.float32, torch.device("cpu"))
        for stream in (memory.keys[0], memory.values[0]):
            stream.fill_(nothing)
            for table in tables:
                cells = torch.from_numpy(table.cells(0, table.length))
                stream[cells] = torch.randn((table.length, 2, 16), generator=random.manual_seed(table.length))
        ends = np.cumsum(rows).tolist()
        spans = [Span(e - c, e, t, s) for e, c, t, s in zip(ends, rows, tables, starts, strict=True)]
        step = Step(memory, spans, torch.arange(ends[-1]), tier, layer=0)
        query = torch.randn((1, 4, ends[-1], 16), generator=random.manual_seed(7))
        results.append(step.attend(query, AttentionOptions(0.25)))
    torch.testing.assert_close(*results)
