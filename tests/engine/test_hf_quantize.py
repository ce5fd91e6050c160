"""Weights that are rounded when they are loaded: smaller, close to what they were, and never mixed with others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from emberkeep.engine.base import Outcome, Rows
from emberkeep.engine.hf.checkpoint import Checkpoint
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.model_loader import HfModel
from emberkeep.engine.hf.quantize import Int4Linear, Int8Linear, round_linear
from emberkeep.engine.hf.residency import Placing, is_rounded, rounded_bytes
from emberkeep.engine.hf.whole_engine import open_engine
from emberkeep.errors import EngineError
from emberkeep.runtime.placement import layer_sizes
from emberkeep.types.models import Quantization, Residency
from helpers import tiny_hf
from helpers.tiny_hf import quantise

pytestmark = pytest.mark.slow

INT8, INT4 = Quantization.INT8, Quantization.INT4
TOKENS = np.random.default_rng(5).integers(40, 120, 64, dtype=np.int32)
ERROR = {INT8: 4 / 127 / 12**0.5, INT4: 6 / 15 / 12**0.5}
"""As a share of the weights: what steps cost in a range of 4 deviations, or of 6 on both sides."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_hf.write(tmp_path_factory.mktemp("llama"), "llama")


def loaded(folder: Path, kind: Quantization = Quantization.NONE, placing: Placing | None = None) -> HfModel:
    return tiny_hf.load(folder, placing=placing, quantization=kind)


def evaluated(model: HfModel) -> tuple[np.ndarray, bytes]:
    """The logits after every token, and the fingerprint."""
    engine = open_engine(model, tiny_hf.settings(), "digest")
    assert isinstance(engine, HfEngine)
    rows = []
    for at, token in enumerate(TOKENS):
        assert engine.evaluate([Rows(0, at, np.array([token], np.int32), outputs=1)]) is Outcome.DONE
        rows.append(engine.logits(0).copy())
    name = engine.fingerprint
    engine.close()
    return np.array(rows), name


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("kind", [INT8, INT4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(96, 64), (48, 576), (32, 96)])
def test_a_rounded_weight_is_close_to_what_it_was(kind, dtype, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.05
    rounded = round_linear(weight, None, kind, dtype)
    error = (rounded.dequantized().float() - weight).norm() / weight.norm()
    assert 0 < error < ERROR[kind]
    assert sum(b.nbytes for b in rounded.buffers()) == rounded_bytes(kind, *shape, dtype.itemsize)


@pytest.mark.parametrize("kind", [INT8, INT4])
def test_rows_of_nothing_but_zeros_stay_so_and_outliers_do_not_overflow(kind):
    weight = torch.zeros(64, 64)
    weight[1, 3], weight[2, 5] = 1e4, -1e-6
    found = round_linear(weight, None, kind, torch.float16).dequantized()
    assert torch.isfinite(found).all()
    assert not found[0].any()
    assert found[1, 3] == pytest.approx(1e4, rel=0.01)


@pytest.mark.parametrize("kind", [INT8, INT4])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
def test_a_product_is_that_of_the_rounded_weight(kind, rows):
    random = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(96, 160, generator=random), torch.randn(96, generator=random)
    rounded, x = round_linear(weight, bias, kind, torch.float32), torch.randn(2, rows, 160, generator=random)
    for given in (x, x.transpose(0, 1)):
        torch.testing.assert_close(
            rounded(given), linear(given, rounded.dequantized(), bias), rtol=1e-4, atol=1e-4
        )


def test_rows_that_kernels_would_compute_wrong_are_left_as_they_are():
    assert is_rounded(64, 96)
    assert not is_rounded(64, 33 * 3)
    assert not is_rounded(1, 4096)


def test_answers_are_those_of_the_rounded_weights_and_state_has_a_fingerprint_of_its_own(folder):
    """The more bits, the closer to the model as it is."""
    usual, name = evaluated(loaded(folder))
    assert evaluated(loaded(folder))[1] == name
    names, near = {name}, []
    for kind in (INT8, INT4):
        rounded, plain = loaded(folder, kind), loaded(folder)
        for place, part in rounded.network.named_modules():
            if isinstance(part, Int8Linear | Int4Linear):
                plain.network.get_submodule(place).weight.data = part.dequantized()
        logits, name = evaluated(rounded)
        np.testing.assert_allclose(logits, evaluated(plain)[0], rtol=1e-3, atol=1e-3)
        near.append(similarity(usual, logits))
        names.add(name)
    assert 1 > near[0] > 0.999 > near[1] > 0.8
    assert len(names) == 3


@pytest.mark.parametrize("kind", [INT8, INT4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "deepseek_v3"])
def test_weights_take_less_memory_and_the_headers_tell_how_much(tmp_path, family, kind):
    folder = tiny_hf.write(tmp_path / family, family)
    plain, rounded = loaded(folder), loaded(folder, kind)
    assert rounded.parameters == plain.parameters
    assert rounded.weights_bytes < plain.weights_bytes
    held = [*rounded.network.parameters(), *rounded.network.buffers()]
    assert sum(t.nbytes for t in held) < sum(
        t.nbytes for t in (*plain.network.parameters(), *plain.network.buffers())
    )
    assert not any(type(p) is nn.Linear and is_rounded(*p.weight.shape) for p in rounded.network.model.modules())
    assert layer_sizes(folder, "float32", kind).all == pytest.approx(rounded.weights_bytes, rel=0.02)


@pytest.mark.parametrize("kind", [INT8, INT4])
@pytest.mark.parametrize("residency", [Residency.STREAM, Residency.FFN])
def test_rounded_weights_can_pass_through_a_device(folder, kind, residency):
    model = loaded(folder, kind, Placing(residency))
    assert model.stream is not None and model.stream.plan.passing_bytes < loaded(folder).weights_bytes / 2
    np.testing.assert_allclose(evaluated(model)[0], evaluated(loaded(folder, kind))[0], rtol=1e-4, atol=1e-4)


def test_weights_that_files_have_under_other_names_are_rounded_too(folder, monkeypatch):
    """As those of mixtures, or of GGUF files: transformers loads them, by way of RAM."""
    directly = loaded(folder, INT8)
    monkeypatch.setattr(Checkpoint, "_check_names", lambda self, _: (_ for _ in ()).throw(self._has_to_fit("so")))
    by_ram = loaded(folder, INT8)
    for name, part in directly.network.named_modules():
        if isinstance(part, Int8Linear):
            other = by_ram.network.get_submodule(name)
            assert torch.equal(part.codes, other.codes) and torch.equal(part.scales, other.scales)


def test_a_mixture_keeps_its_experts(tmp_path):
    model = loaded(tiny_hf.write(tmp_path, "qwen3_moe"), INT8)
    layer = model.network.model.layers[0]
    assert isinstance(layer.self_attn.q_proj, Int8Linear)
    assert layer.mlp.experts.down_proj.dtype == torch.float32
    assert evaluated(model)[0].shape == (len(TOKENS), tiny_hf.VOCAB)


def test_weights_that_are_in_few_bits_already_are_refused(folder, tmp_path):
    packed, _ = quantise(folder, tmp_path, group=32)
    with pytest.raises(EngineError, match="in few bits already: leave --quantization out"):
        loaded(packed, INT4)


def test_a_model_without_linear_parts_says_so(tmp_path):
    with pytest.raises(EngineError, match="no weights that --quantization int8 could round"):
        loaded(tiny_hf.write(tmp_path, "gpt2"), INT8)
