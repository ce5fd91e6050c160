"""OpenAI's endpoints: chat completions, completions and models, with what llama-server adds to these.

A body is read and checked, becomes a `Request`, and goes to the backend; the events that come back are sent as
they come, or gathered into one answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep.api.answer import Answer
from emberkeep.api.body import Body
from emberkeep.api.openai_answer import CallShape, ChatFrames, Envelope, TextFrames, chat_json, text_json
from emberkeep.api.openai_chat import ChatBody
from emberkeep.api.openai_completions import CompletionBody
from emberkeep.backend.base import Backend, ModelCard
from emberkeep.backend.models import Models, status_of
from emberkeep.models.library import InstalledModel, ModelLibrary
from emberkeep.server.routes.base import (
    HELLO,
    STREAMS,
    PageParameters,
    Routes,
    Served,
    page_response,
    passed_on,
    register_path_part,
    respond,
)
from emberkeep.server.stream import make_of_body, while_connected
from emberkeep.types.models import ModelState, ModelStatus
from emberkeep.types.request import Json


def routes(served: Served) -> Routes:
    routes, models = Routes(), served.models

    @routes.post("/v1/chat/completions", "/chat/completions", content=STREAMS, example=HELLO)
    async def chat_completions(http: HttpRequest, body: ChatBody) -> Json:
        backend = models.find(body.model)
        request = passed_on(http, await make_of_body(http, body.to_request))
        # A whole answer has no place for a question.
        request = replace(request, asks_permission=request.asks_permission and bool(body.stream))
        calls = CallShape(body.custom_names, is_legacy=bool(body.functions))

        def envelope() -> Envelope:
            return new_envelope("chatcmpl", backend.card, request.conversation_id)

        def frames() -> ChatFrames:
            return ChatFrames(envelope(), body.include_usage, calls)

        streams = frames if body.stream else None
        return await respond(
            http, backend, [request], streams, lambda answer: chat_json(answer, envelope(), calls)
        )

    @routes.post(*("/v1/completions", "/completions"), content=STREAMS, example={"prompt": "Once upon a time"})
    async def completions(http: HttpRequest, body: CompletionBody) -> Json:
        backend = models.find(body.model)
        requests = await make_of_body(http, body.to_requests)

        def envelope() -> Envelope:
            return new_envelope("cmpl", backend.card, requests[0].conversation_id)

        def whole(answer: Answer) -> Json:
            if body.chooses_best:
                answer.keep_best(body.tried, body.n or 1, with_logprobs=body.logprobs is not None)
            return text_json(answer, envelope())

        streams = (lambda: TextFrames(envelope(), body.include_usage)) if body.stream else None
        return await respond(http, backend, requests, streams, whole)

    _add_models(routes, served)
    return routes


def new_envelope(prefix: str, card: ModelCard, conversation_id: str | None) -> Envelope:
    return Envelope(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=card.id,
        system_fingerprint="fp_" + hashlib.sha256(repr(card).encode()).hexdigest()[:12],
        conversation_id=conversation_id,
    )


# ── models: which there are and whether they are loaded; loading and unloading them; what is installed ──


register_path_part("model_id", r"(?!(?:load|unload|installed)$).*")  # those are actions, with routes of their own


class ModelBody(Body):
    model: str


def _add_models(routes: Routes, served: Served) -> None:
    models, example = served.models, {"model": "default"}

    @routes.get("/v1/models", "/models")
    async def list_models(http: HttpRequest) -> Json:
        listed = await asyncio.to_thread(models.list)
        if _is_anthropic(http):
            return _anthropic_list_json([backend.card for backend in listed])
        return {"object": "list", "data": [model_json(models, backend) for backend in listed]}

    @routes.get("/v1/models/{model_id:path}", "/models/{model_id:model_id}")
    async def show_model(http: HttpRequest) -> Json:
        backend = models.find(http.path_params["model_id"])
        return _anthropic_json(backend.card) if _is_anthropic(http) else model_json(models, backend)

    @routes.post("/models/load", example=example)
    async def load_model(http: HttpRequest, body: ModelBody) -> Json:
        backend = await while_connected(http, models.load(body.model))
        return {"success": True, "model": model_json(models, backend)}

    @routes.post("/models/unload", example=example)
    async def unload_model(http: HttpRequest, body: ModelBody) -> Json:
        backend = await while_connected(http, models.unload(body.model))
        return {"success": True, "model": model_json(models, backend)}

    @routes.get("/models/installed")
    async def list_installed(query: PageParameters) -> Response:
        return await served.side.run(_installed_page, models, served.library, query)


def _installed_page(models: Models, library: ModelLibrary, page: PageParameters) -> Response:
    """Blocks."""
    served = {name for backend in models.list() for name in (backend.card.id, *backend.card.also)}
    return page_response(library.list(), lambda model: installed_json(model, model.id in served), page)


def model_json(models: Models, backend: Backend) -> dict[str, Json]:
    """In OpenAI's shape, with its status as llama-server's router tells it, and more."""
    card = backend.card
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "context_length": card.context or None,
        "max_model_len": card.context or None,  # as vLLM calls it
        "details": dict(card.details or {}),
        "aliases": list(models.aliases_of(backend)),
        "status": {**status_json(status_of(backend)), "local": not card.remote},
    }


def installed_json(model: InstalledModel, is_served: bool) -> dict[str, Json]:
    return {
        "id": model.id,
        "object": "model.installed",
        "bytes": model.record.size,
        "quantisation": model.record.quantisation,
        "source": model.record.source,
        "installed": model.record.pulled_at,
        "served": is_served,
    }


def status_json(status: ModelStatus) -> dict[str, Json]:
    return {
        "value": status.state,
        "failed": status.state is ModelState.FAILED,
        "error": status.error or None,
        "memory_bytes": status.memory_bytes or None,
        "running": status.running,
        "waiting": status.waiting,
        "idle_s": round(status.idle_s, 3),
        "expires_s": None if status.expires_s is None else round(status.expires_s, 3),
        "pinned": status.is_pinned,
    }


def _is_anthropic(http: HttpRequest) -> bool:
    """`/v1/models` is OpenAI's path as well, and Anthropic's clients send a header."""
    return "anthropic-version" in http.headers


def _anthropic_list_json(cards: Sequence[ModelCard]) -> dict[str, Json]:
    """All of them on one page."""
    return {
        "data": [_anthropic_json(card) for card in cards],
        "has_more": False,
        "first_id": cards[0].id if cards else None,
        "last_id": cards[-1].id if cards else None,
    }


def _anthropic_json(card: ModelCard) -> dict[str, Json]:
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card.context,
        "max_tokens": card.context,
    }
