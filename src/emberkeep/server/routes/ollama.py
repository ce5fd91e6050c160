"""Ollama's endpoints that ask a model: chat, generate, embed. `server/ollama_models.py` has those about models."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import lru_cache
from time import perf_counter

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep import __version__
from emberkeep.api.ollama_answer import (
    GenerateEnvelope,
    OllamaEnvelope,
    OllamaFrames,
    embedded_json,
    loaded_json,
    whole_json,
)
from emberkeep.api.ollama_body import EmbedBody, EmbeddingsBody, GenerateBody, OllamaBody, OllamaChatBody
from emberkeep.backend.base import Backend
from emberkeep.backend.models import Models
from emberkeep.backend.on_demand import OnDemandBackend
from emberkeep.errors import ModelNotFound
from emberkeep.models.spec import parse, spec_of_ollama
from emberkeep.server.routes.base import HELLO, LINES, Routes, Served, json_response, passed_on, respond
from emberkeep.server.routes.embeddings import embed_with
from emberkeep.server.stream import make_of_body, while_connected
from emberkeep.types.request import Embedded, Json, Request

log = logging.getLogger(__name__)

_TEXT = "Why is the sky blue?"
OLLAMA_VERSION = "0.13.5"
"""Whose API this is: clients ask whether it is new enough for what they want."""


def routes(served: Served) -> Routes:
    routes, models = Routes(), served.models

    @routes.post("/api/chat", content=LINES, example=HELLO)
    async def chat(http: HttpRequest, body: OllamaChatBody) -> Json:
        return await _respond(http, models, body, OllamaEnvelope)

    @routes.post("/api/generate", content=LINES, example={"prompt": _TEXT})
    async def generate(http: HttpRequest, body: GenerateBody) -> Json:
        return await _respond(http, models, body, GenerateEnvelope)

    @routes.post("/api/embed", example={"input": _TEXT})
    async def embed(http: HttpRequest, body: EmbedBody) -> Response:
        began, backend = perf_counter(), find_model(models, body.model)
        embedded = await _embed(http, backend, body)
        # Thousands of numbers each: not in the loop that serves the streams.
        name = body.model or backend.card.id
        return await asyncio.to_thread(lambda: json_response(embedded_json(embedded, name, began)))

    @routes.post("/api/embeddings", example={"prompt": _TEXT})
    async def embeddings(http: HttpRequest, body: EmbeddingsBody) -> Json:
        embedded = await _embed(http, find_model(models, body.model), body)
        return {"embedding": embedded.vectors[0].tolist()}

    @routes.get("/api/version")
    async def version() -> Json:
        return {"version": OLLAMA_VERSION, "emberkeep": __version__}

    return routes


async def _respond(
    http: HttpRequest, models: Models, body: OllamaChatBody | GenerateBody, envelope_of: type[OllamaEnvelope]
) -> Json:
    backend = find_model(models, body.model)
    name = body.model or backend.card.id
    if body.only_loads:
        return await _load_only(http, backend, body.keep_alive, envelope_of(name, Request()))
    _note_context(backend, body)
    request = passed_on(http, await make_of_body(http, body.to_request))
    envelope = envelope_of(name, request)
    streams = (lambda: OllamaFrames(envelope)) if body.wants_stream else None
    return await respond(http, backend, [request], streams, lambda answer: whole_json(answer, envelope))


async def _load_only(
    http: HttpRequest, backend: Backend, keep_alive_s: float | None, envelope: OllamaEnvelope
) -> Json:
    """A model that is served alone is always loaded."""
    is_unload = keep_alive_s == 0
    if isinstance(backend, OnDemandBackend):
        await while_connected(http, backend.unload() if is_unload else backend.load(keep_alive_s))
    return loaded_json(envelope, "unload" if is_unload else "load")


async def _embed(http: HttpRequest, backend: Backend, body: EmbedBody | EmbeddingsBody) -> Embedded:
    request = await make_of_body(http, body.to_request)
    return await while_connected(http, embed_with(backend, request, body.keep_alive))


def find_model(models: Models, name: str | None) -> Backend:
    """Raises ModelNotFound, in words that Ollama's clients look for."""
    try:
        return models.find(name)
    except ModelNotFound:
        with suppress(ModelNotFound):
            return models.find(installed_name(name or ""))
    raise ModelNotFound(f"model '{(name or '')[:200]}' not found: {models.choices()}; /api/pull gets more.")


def installed_name(name: str) -> str:
    """What a model is called here that Ollama's users call `name`. Raises ModelNotFound for what names none."""
    spec = spec_of_ollama(name)
    return parse(spec)[0] if spec.startswith("hf:") else spec


def _note_context(backend: Backend, body: OllamaBody) -> None:
    """A context is chosen when a model is loaded: a client that wants more gets what there is."""
    if body.num_ctx > backend.card.context > 0:
        _tell_context(backend.card.id, body.num_ctx, backend.card.context)


@lru_cache(maxsize=256)  # once for every size: clients send it with every request
def _tell_context(model: str, wanted: int, context: int) -> None:
    log.info(
        "A client asks for a context of %d tokens (num_ctx) and gets %d, with which %s was loaded: --ctx sets it.",
        *(wanted, context, model),
    )
