"""Which models there are and whether they are loaded; loading and unloading them; what is installed."""

from __future__ import annotations

import asyncio

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep.api.body import Body
from emberkeep.backend.base import Backend
from emberkeep.backend.models import Models, status_of
from emberkeep.models.library import InstalledModel, ModelLibrary
from emberkeep.server.routes.anthropic import anthropic_model_json, anthropic_models_json, is_anthropic
from emberkeep.server.routes.base import PageParameters, Routes, Served, page_response
from emberkeep.server.stream import while_connected
from emberkeep.types.models import ModelState, ModelStatus
from emberkeep.types.request import Json


class _ModelId(PathConvertor):
    """Any name but those of actions, which are other routes."""

    regex = r"(?!(?:load|unload|installed)$).*"


register_url_convertor("model_id", _ModelId())


class ModelBody(Body):
    model: str


def routes(served: Served) -> Routes:
    routes, models = Routes(), served.models
    example = {"model": "default"}

    @routes.get("/v1/models", "/models")
    async def list_models(http: HttpRequest) -> Json:
        listed = await asyncio.to_thread(models.list)
        if is_anthropic(http):
            return anthropic_models_json([backend.card for backend in listed])
        return {"object": "list", "data": [model_json(models, backend) for backend in listed]}

    @routes.get("/v1/models/{model_id:path}", "/models/{model_id:model_id}")
    async def show_model(http: HttpRequest) -> Json:
        backend = models.find(http.path_params["model_id"])
        return anthropic_model_json(backend.card) if is_anthropic(http) else model_json(models, backend)

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

    return routes


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
