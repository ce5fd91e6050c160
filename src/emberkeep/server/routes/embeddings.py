"""Embeddings and ranks: OpenAI's endpoint, llama-server's, and the one that rerankers share."""

from __future__ import annotations

import asyncio
import json

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep.api.embeddings import LlamaEmbeddingBody, OpenAIEmbeddingsBody, RerankBody, embedding_usage
from emberkeep.backend.base import Backend, embedder_of, ranker_of
from emberkeep.backend.models import loaded
from emberkeep.server.routes.base import Routes, Served, list_response
from emberkeep.server.stream import make_of_body, while_connected
from emberkeep.types.request import Embedded, EmbeddingRequest, Json, Ranked, RerankRequest

_TEXT = "Why is the sky blue?"


def routes(served: Served) -> Routes:
    routes, models = Routes(), served.models

    @routes.post("/v1/embeddings", example={"input": _TEXT})
    async def embeddings(http: HttpRequest, body: OpenAIEmbeddingsBody) -> Response:
        backend = models.find(body.model)
        request = await make_of_body(http, body.to_request)
        embedded = await while_connected(http, embed_with(backend, request))
        about = {"object": "list", "model": backend.card.id, "usage": embedding_usage(embedded)}
        # Thousands of numbers each: not in the loop that serves the streams.
        return await asyncio.to_thread(lambda: list_response("data", body.items(embedded), **about))

    @routes.post("/embedding", "/embeddings", example={"content": _TEXT})
    async def embedding(http: HttpRequest, body: LlamaEmbeddingBody) -> Response:
        request = await make_of_body(http, body.to_request)
        embedded = await while_connected(http, embed_with(models.find(body.model), request))
        written = await asyncio.to_thread(lambda: ", ".join(map(json.dumps, body.items(embedded))))
        return Response(f"[{written}]", media_type="application/json")

    @routes.post(
        *("/v1/rerank", "/rerank", "/reranking", "/v1/reranking"),
        example={"query": _TEXT, "documents": ["Air scatters blue light."]},
    )
    async def rerank(http: HttpRequest, body: RerankBody) -> Json:
        backend = models.find(body.model)
        request = await make_of_body(http, body.to_request)
        return body.answer(await while_connected(http, _rank_with(backend, request)), backend.card.id)

    return routes


async def embed_with(backend: Backend, request: EmbeddingRequest, keep_alive_s: float | None = None) -> Embedded:
    """Loads it if need be: whether a model embeds is known then, and it must not leave before it has."""
    async with loaded(backend, keep_alive_s) as real:
        return await embedder_of(real).embed(request)


async def _rank_with(backend: Backend, request: RerankRequest) -> Ranked:
    async with loaded(backend) as real:
        return await ranker_of(real).rerank(request)
