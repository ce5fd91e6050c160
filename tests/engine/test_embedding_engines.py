"""Embedding engines against transformers itself, and llama.cpp against torch with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from emberkeep.engine.embedding import EmbeddingEngine, TokenInput, Vectors
from emberkeep.engine.hf.embedding_engine import HfEmbeddingEngine, HfEmbeddingSettings
from emberkeep.engine.llamacpp.embedding_engine import LlamaEmbeddingEngine, LlamaEmbeddingSettings
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.errors import ModelBroken
from emberkeep.models.checks import check_charsmap
from emberkeep.models.gguf import read_header
from emberkeep.types.request import Pooling
from helpers import tiny_bert, tiny_gguf

pytestmark = pytest.mark.slow

TEXTS = ("The cat sat on the mats.", "sitting 42!", "a", "the cat " * 25)
POOLINGS = {
    tiny_bert.MEAN: Pooling.MEAN,
    tiny_bert.CLS_POOLING: Pooling.CLS,
    tiny_bert.RANK: Pooling.RANK,
}
CLOSE = 2e-2
"""llama.cpp looks GELU up in a table of 16 bits, and attends in 16 bits; states are about 2."""


@pytest.fixture(scope="module", params=[tiny_bert.MEAN, tiny_bert.CLS_POOLING, tiny_bert.RANK])
def pooling(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(pooling: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert.bert_folder(tmp_path_factory.mktemp("bert") / "tiny", pooling=pooling)


@pytest.fixture(scope="module", params=["llamacpp", "hf"])
def engine(request: pytest.FixtureRequest, folder: Path, pooling: int) -> Iterator[EmbeddingEngine]:
    opened = open_llama(folder, pooling) if request.param == "llamacpp" else open_hf(folder, pooling)
    yield opened
    opened.close()
    opened.close()


def open_llama(folder: Path, pooling: int) -> LlamaEmbeddingEngine:
    path = tiny_bert.bert_gguf(folder.with_suffix(".gguf"), folder, pooling=pooling)
    return LlamaEmbeddingEngine(LlamaModel(path), LlamaEmbeddingSettings(tiny_bert.CONTEXT), "weights")


def open_hf(folder: Path, pooling: int) -> HfEmbeddingEngine:
    return HfEmbeddingEngine(folder, HfEmbeddingSettings(POOLINGS[pooling], device="cpu"), "weights")


def inputs_of(engine: EmbeddingEngine, pooling: int) -> list[TokenInput]:
    if pooling == tiny_bert.RANK:
        # Both texts of type 0, which is all that llama.cpp knows.
        pairs = [engine.framing.pair(engine.vocab, text, "the mat!") for text in TEXTS]
        return [TokenInput(pair.ids) for pair in pairs]
    return [engine.framing.text(engine.vocab, text) for text in TEXTS]


def reference(folder: Path, pooling: int, one: TokenInput) -> Vectors:
    """As transformers computes it, one input at a time."""
    kind: Any = AutoModelForSequenceClassification if pooling == tiny_bert.RANK else AutoModel
    network = kind.from_pretrained(folder).eval()
    types = [int(one.second is not None and place >= one.second) for place in range(len(one.ids))]
    with torch.inference_mode():
        result = network(input_ids=torch.tensor([one.ids]), token_type_ids=torch.tensor([types]))
    if pooling == tiny_bert.RANK:
        return np.asarray(result.logits[0])
    states = np.asarray(result.last_hidden_state[0])
    return states.mean(0) if pooling == tiny_bert.MEAN else states[0]


def test_vectors_are_those_of_transformers(engine: EmbeddingEngine, folder: Path, pooling: int) -> None:
    inputs = inputs_of(engine, pooling)
    for vector, one in zip(engine.embed(inputs), inputs, strict=True):
        np.testing.assert_allclose(vector, reference(folder, pooling, one), atol=CLOSE)


def test_texts_and_pairs_get_the_tokens_that_the_models_own_tokenizer_gives(
    engine: EmbeddingEngine, folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert list(engine.framing.text(engine.vocab, text).ids) == tokenizer(text)["input_ids"]
        pair = tokenizer(text, "the mat!")
        ours = engine.framing.pair(engine.vocab, text, "the mat!")
        assert list(ours.ids) == pair["input_ids"]
        assert ours.second == pair["token_type_ids"].index(1)


def test_control_tokens_in_a_text_are_text(engine: EmbeddingEngine) -> None:
    ids = engine.framing.text(engine.vocab, "a [SEP] b").ids
    assert ids.count(tiny_bert.SEP) == 1


def test_a_vector_does_not_depend_on_what_else_is_in_the_step(engine: EmbeddingEngine, pooling: int) -> None:
    inputs = inputs_of(engine, pooling)
    together = engine.embed(inputs)
    alone = np.concatenate([engine.embed([one]) for one in inputs])
    np.testing.assert_allclose(together, alone, atol=CLOSE)


def test_as_many_inputs_as_promised_fit_into_a_step(engine: EmbeddingEngine) -> None:
    count = engine.capabilities.sequences
    vectors = engine.embed([TokenInput((tiny_bert.CLS, 5 + number % 30)) for number in range(count)])
    assert vectors.shape == (count, engine.capabilities.dimension)
    assert not np.allclose(vectors[0], vectors[1])


def test_inputs_may_be_as_long_as_the_context(engine: EmbeddingEngine) -> None:
    assert engine.capabilities.context == tiny_bert.CONTEXT
    longest = TokenInput(tuple(5 + number % 30 for number in range(tiny_bert.CONTEXT)))
    assert np.isfinite(engine.embed([longest] * 3)).all()


def test_its_shape_is_told(engine: EmbeddingEngine, pooling: int) -> None:
    shape = engine.capabilities
    assert shape.pooling is POOLINGS[pooling]
    assert shape.dimension == (1 if pooling == tiny_bert.RANK else tiny_bert.WIDTH)
    assert len(engine.fingerprint) == 32


def test_transformers_cross_encoders_tell_the_two_texts_apart(tmp_path: Path) -> None:
    folder = tiny_bert.bert_folder(tmp_path / "ranker", pooling=tiny_bert.RANK)
    engine = open_hf(folder, tiny_bert.RANK)
    pair = engine.framing.pair(engine.vocab, "the cat", "a mat")
    np.testing.assert_allclose(engine.embed([pair])[0], reference(folder, tiny_bert.RANK, pair), atol=1e-5)
    assert not np.allclose(engine.embed([pair]), engine.embed([TokenInput(pair.ids)]), atol=1e-3)


def test_a_model_that_sorts_texts_into_classes_is_refused(tmp_path: Path) -> None:
    folder = tiny_bert.bert_folder(tmp_path / "classes", pooling=tiny_bert.RANK, labels=3)
    with pytest.raises(ModelBroken, match="classes sorts texts into 3 classes: choose a model that ranks"):
        open_hf(folder, tiny_bert.RANK)


# ── decoders in llama.cpp ──


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.dense(tmp_path_factory.mktemp("decoder") / "dense.gguf")


def open_decoder(path: Path, pooling: Pooling, *, batch: int = 512) -> LlamaEmbeddingEngine:
    settings = LlamaEmbeddingSettings(context=600, batch=batch, pooling=pooling)
    return LlamaEmbeddingEngine(LlamaModel(path), settings, "weights")


def test_the_last_state_is_the_same_however_a_long_text_is_cut_into_steps(decoder: Path) -> None:
    text = TokenInput(tuple(3 + number % 250 for number in range(500)))
    whole, cut = (open_decoder(decoder, Pooling.LAST, batch=batch) for batch in (512, 64))
    one, other = whole.embed([text])[0], cut.embed([text])[0]
    assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) > 0.99
    for engine in (whole, cut):
        engine.close()


def test_nothing_of_one_step_is_in_the_next(decoder: Path) -> None:
    engine = open_decoder(decoder, Pooling.LAST, batch=64)
    text, other = TokenInput(tuple(range(3, 40))), TokenInput(tuple(range(3, 200)))
    before = engine.embed([text])
    engine.embed([other])
    np.testing.assert_array_equal(engine.embed([text]), before)
    engine.close()


def test_means_of_a_decoders_states_can_be_asked_for(decoder: Path) -> None:
    engine = open_decoder(decoder, Pooling.MEAN)
    vectors = engine.embed([TokenInput((5, 6, 7)), TokenInput((7, 6, 5))])
    assert vectors.shape == (2, tiny_gguf.WIDTH)
    assert not np.allclose(vectors[0], vectors[1])
    engine.close()


def test_without_a_word_on_pooling_a_file_is_refused(decoder: Path) -> None:
    with pytest.raises(ModelBroken, match=r"does not say how its tokens become one vector: set pooling to mean"):
        LlamaEmbeddingEngine(LlamaModel(decoder), LlamaEmbeddingSettings(context=64), "weights")


# ── unigram vocabularies ──


def test_a_unigram_vocabulary_rewrites_texts_and_frames_pairs_as_xlm_roberta_does(tmp_path: Path) -> None:
    path = tiny_bert.unigram_gguf(tmp_path / "unigram.gguf")
    check_charsmap(read_header(path))
    model = LlamaModel(path, may_rewrite=True)
    engine = LlamaEmbeddingEngine(model, LlamaEmbeddingSettings(tiny_bert.CONTEXT), "weights")
    first = engine.framing.text(engine.vocab, "the cAt")
    assert first == engine.framing.text(engine.vocab, "the cat")
    pieces = [engine.vocab.pieces[token] for token in first.ids]
    assert pieces == [b"<s>", b" the", b" cat", b"</s>"]
    pair = engine.framing.pair(engine.vocab, "the", "cat")
    assert [engine.vocab.pieces[token] for token in pair.ids] == [
        *(b"<s>", b" the", b"</s>"),
        *(b"</s>", b" cat", b"</s>"),
    ]
    assert np.isfinite(engine.embed([first, pair])).all()
    engine.close()


def test_without_a_check_of_its_table_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelBroken, match="vocabulary is a unigram one"):
        LlamaModel(tiny_bert.unigram_gguf(tmp_path / "unigram.gguf"))
