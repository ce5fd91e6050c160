"""Texts to vectors: tokens, what is known already, steps that requests share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from emberkeep.backend.embedder import LocalEmbedder
from emberkeep.errors import EngineError, InputTooLong, InvalidField, Overloaded, RequestError
from emberkeep.kv.disk.vector_file import VectorFile
from emberkeep.kv.forgetting import of_user
from emberkeep.types.request import EmbeddingRequest, Pooling, RerankRequest
from helpers.on_demand_models import FIRST, SEPARATOR, FakeEmbeddingEngine, embedder_over, unit
from helpers.waiting import eventually

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(20):
            return await work

    return asyncio.run(bounded())


async def begun(engine: FakeEmbeddingEngine) -> None:
    assert await asyncio.to_thread(engine.begun.wait, 10)


async def waiting(embedder: LocalEmbedder, inputs: int) -> None:
    assert await asyncio.to_thread(eventually, lambda: embedder.stats()["waiting"] == inputs)


def test_each_text_gets_the_vector_of_its_own_tokens_with_the_models_special_ones_around_it() -> None:
    engine = FakeEmbeddingEngine()
    embedded = run(embedder_over(engine).embed(EmbeddingRequest(("cat", "a longer text", "cat"))))
    for text, vector in zip(("cat", "a longer text", "cat"), embedded.vectors, strict=True):
        expected = engine.vector(engine.framing.text(engine.vocab, text))
        np.testing.assert_allclose(vector, unit(expected), rtol=1e-6)
    assert engine.framing.text(engine.vocab, "a").ids == (FIRST, ord("a"), SEPARATOR)
    assert embedded.prompt_tokens == 5 + 15 + 5


def test_token_ids_are_taken_as_they_are() -> None:
    engine = FakeEmbeddingEngine()
    embedded = run(embedder_over(engine).embed(EmbeddingRequest(((1, 2, 3),), normalize=False)))
    assert engine.steps == [[3]]
    assert embedded.prompt_tokens == 3


def test_an_id_that_is_no_token_is_refused_by_its_place() -> None:
    with pytest.raises(InvalidField, match=r"^input\[1\]: 300 is no token of tiny-embed, which has 258: send the"):
        run(embedder_over(FakeEmbeddingEngine()).embed(EmbeddingRequest(("a", (1, 300)))))


def test_vectors_have_the_length_one_unless_it_is_asked_otherwise() -> None:
    engine = FakeEmbeddingEngine()
    plain = run(embedder_over(engine).embed(EmbeddingRequest(("cat",), normalize=False))).vectors[0]
    normal = run(embedder_over(engine).embed(EmbeddingRequest(("cat",)))).vectors[0]
    assert abs(np.linalg.norm(plain) - 1) > 0.1
    assert np.linalg.norm(normal) == pytest.approx(1)


def test_an_input_that_is_too_long_is_refused_with_its_number() -> None:
    with pytest.raises(
        InputTooLong, match=r"input\[1\] has 42 tokens, and the maximum context length is 32 tokens"
    ):
        run(embedder_over(FakeEmbeddingEngine(context=32)).embed(EmbeddingRequest(("a", "b" * 40))))


def test_or_its_end_is_left_out_and_the_special_tokens_stay() -> None:
    engine = FakeEmbeddingEngine(context=32)
    request = EmbeddingRequest(("b" * 40, "b" * 30), truncate=True)
    long, short = run(embedder_over(engine).embed(request)).vectors
    np.testing.assert_array_equal(long, short)
    assert engine.steps == [[32]]


def test_a_request_says_more_than_the_servers_settings() -> None:
    embedder = embedder_over(FakeEmbeddingEngine(context=32), truncates=True)
    assert len(run(embedder.embed(EmbeddingRequest(("b" * 40,)))).vectors) == 1
    with pytest.raises(InputTooLong):
        run(embedder.embed(EmbeddingRequest(("b" * 40,), truncate=False)))


def test_texts_that_were_seen_are_not_computed_again() -> None:
    engine = FakeEmbeddingEngine()

    async def twice() -> tuple[int, int]:
        embedder = embedder_over(engine)
        first = await embedder.embed(EmbeddingRequest(("cat", "dog", "cat")))
        again = await embedder.embed(EmbeddingRequest(("dog", "cow")))
        return first.cached_tokens, again.cached_tokens

    assert run(twice()) == (0, 5)
    assert engine.steps == [[5, 5], [5]]


async def test_a_user_does_not_find_what_another_has_embedded() -> None:
    engine = FakeEmbeddingEngine()
    embedder = embedder_over(engine)
    for namespace in ("", '["ann", ""]', '["bob", ""]', '["ann", ""]'):
        await embedder.embed(EmbeddingRequest(("secret",), namespace=namespace))
    assert embedder.forget(of_user("ann")) is None
    await embedder.embed(EmbeddingRequest(("secret",), namespace='["ann", ""]'))
    assert len(engine.steps) == 4


def test_after_a_restart_vectors_come_from_the_disk_but_none_of_named_users(tmp_path: Path) -> None:
    first, second = FakeEmbeddingEngine(), FakeEmbeddingEngine()

    async def serve(engine: FakeEmbeddingEngine) -> np.ndarray:
        embedder = embedder_over(engine, file=VectorFile(tmp_path / "vectors.db", 1 << 20))
        embedded = await embedder.embed(EmbeddingRequest(("cat",)))
        await embedder.embed(EmbeddingRequest(("mine",), namespace='["ann", ""]'))
        await embedder.close()
        return embedded.vectors[0]

    np.testing.assert_array_equal(run(serve(first)), run(serve(second)))
    assert first.steps == [[5], [6]]
    assert second.steps == [[6]]


async def test_inputs_of_requests_that_wait_share_a_step_and_take_turns() -> None:
    engine = FakeEmbeddingEngine(batch=24, sequences=4)
    engine.gate.clear()
    embedder = embedder_over(engine)
    blocker = asyncio.create_task(embedder.embed(EmbeddingRequest(("x",))))
    await begun(engine)
    large = asyncio.create_task(embedder.embed(EmbeddingRequest(tuple(f"text {i}" for i in range(6)))))
    await waiting(embedder, 6)
    small = asyncio.create_task(embedder.embed(EmbeddingRequest(("one",))))
    await waiting(embedder, 7)
    engine.gate.set()
    await asyncio.gather(blocker, large, small)
    assert engine.steps[1] == [8, 5, 8]  # the small request is in the first step after the one that ran
    assert all(max(step) * len(step) <= 24 for step in engine.steps)


def test_a_text_that_is_longer_than_a_step_is_computed_alone() -> None:
    engine = FakeEmbeddingEngine(batch=16, context=64)
    run(embedder_over(engine).embed(EmbeddingRequest(("a" * 40, "bb", "cc"))))
    assert engine.steps == [[42], [4, 4]]


async def test_what_a_client_that_left_has_asked_for_is_not_computed() -> None:
    engine = FakeEmbeddingEngine(batch=8)
    engine.gate.clear()
    embedder = embedder_over(engine)
    asking = asyncio.create_task(embedder.embed(EmbeddingRequest(("first", "second", "third"))))
    await begun(engine)
    asking.cancel()
    engine.gate.set()
    await asyncio.wait([asking])
    await embedder.embed(EmbeddingRequest(("other",)))
    assert len(engine.steps) == 2


async def test_an_error_of_the_engine_ends_the_requests_of_its_step_only() -> None:
    engine = FakeEmbeddingEngine()
    embedder = embedder_over(engine)
    engine.fails = True
    with pytest.raises(EngineError, match="has failed"):
        await embedder.embed(EmbeddingRequest(("cat",)))
    engine.fails = False
    await embedder.embed(EmbeddingRequest(("cat",)))


async def test_after_it_was_closed_requests_are_refused_and_those_that_wait_fail() -> None:
    engine = FakeEmbeddingEngine(batch=8)
    engine.gate.clear()
    embedder = embedder_over(engine)
    asking = asyncio.create_task(embedder.embed(EmbeddingRequest(("first", "second"))))
    await begun(engine)
    closing = asyncio.create_task(embedder.close())
    await asyncio.sleep(0)
    engine.gate.set()
    await closing
    with pytest.raises(Overloaded, match="shutting down"):
        await asking
    with pytest.raises(Overloaded, match="shutting down"):
        await embedder.embed(EmbeddingRequest(("third",)))
    assert len(engine.steps) == 1


async def test_more_requests_than_may_wait_are_refused() -> None:
    engine = FakeEmbeddingEngine()
    engine.gate.clear()
    embedder = embedder_over(engine, limit=1)
    asking = asyncio.create_task(embedder.embed(EmbeddingRequest(("first",))))
    await begun(engine)
    with pytest.raises(Overloaded, match="try again in a moment"):
        await embedder.embed(EmbeddingRequest(("second",)))
    engine.gate.set()
    await asking


@pytest.mark.parametrize("wanted", [1, 3, 8])
def test_a_vector_is_cut_to_what_is_asked_for_and_has_the_length_one_again(wanted: int) -> None:
    engine = FakeEmbeddingEngine()
    (vector,) = run(embedder_over(engine).embed(EmbeddingRequest(("cat",), dimensions=wanted))).vectors
    whole = engine.vector(engine.framing.text(engine.vocab, "cat"))
    np.testing.assert_allclose(vector, unit(whole[:wanted]), rtol=1e-6)


def test_more_dimensions_than_there_are_are_refused() -> None:
    with pytest.raises(InvalidField, match=r"^dimensions: tiny-embed has 8: give 8 or fewer"):
        run(embedder_over(FakeEmbeddingEngine()).embed(EmbeddingRequest(("a",), dimensions=9)))


def test_documents_are_ranked_in_pairs_with_the_query() -> None:
    engine = FakeEmbeddingEngine(pooling=Pooling.RANK)
    ranked = run(embedder_over(engine).rerank(RerankRequest("cat?", ("a cat", "a dog"))))
    pair = engine.framing.pair(engine.vocab, "cat?", "a dog")
    assert pair.ids == (FIRST, *b"cat?", SEPARATOR, *b"a dog", SEPARATOR)
    assert pair.second == 6
    assert ranked.logits[1] == pytest.approx(float(engine.vector(pair)[0]))
    assert ranked.prompt_tokens == 24


def test_a_document_that_is_too_long_is_cut_unless_it_is_asked_otherwise() -> None:
    engine = FakeEmbeddingEngine(pooling=Pooling.RANK, context=32)
    run(embedder_over(engine).rerank(RerankRequest("cat?", ("d" * 100,))))
    assert engine.steps == [[32]]
    with pytest.raises(InputTooLong, match=r"documents\[0\] has 107 tokens"):
        run(embedder_over(engine).rerank(RerankRequest("cat?", ("d" * 100,), truncate=False)))


def test_a_model_that_ranks_gives_no_vectors_and_the_other_way_round() -> None:
    with pytest.raises(RequestError, match="tiny-embed gives no embeddings"):
        run(embedder_over(FakeEmbeddingEngine(pooling=Pooling.RANK)).embed(EmbeddingRequest(("a",))))
    with pytest.raises(RequestError, match="tiny-embed does not rank documents"):
        run(embedder_over(FakeEmbeddingEngine()).rerank(RerankRequest("a", ("b",))))
