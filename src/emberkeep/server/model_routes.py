"""Which models there are and whether they are loaded; loading and unloading them; what is installed."""

from __future__ import annotations

import asyncio

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep.api.request import Body
from emberkeep.backend.base import Backend
from emberkeep.backend.models import Models, status_of
from emberkeep.models.library import InstalledModel, ModelLibrary
from emberkeep.server import anthropic_models
from emberkeep.server.anthropic_models import is_anthropic
from emberkeep.server.json_response import json_response, page_response
from emberkeep.server.routes import PageParameters, Routes, read_parameters, takes
from emberkeep.server.side_work import SideWork
from emberkeep.server.stream import read_body, while_connected
from emberkeep.types.models import ModelState, ModelStatus
from emberkeep.types.request import Json


class _ModelId(PathConvertor):
    """Any name but those of actions, which are other routes."""

    regex = r"(?!(?:load|unload|installed)$).*"


register_url_convertor("model_id", _ModelId())


class ModelBody(Body):
    model: str


def model_routes(models: Models, library: ModelLibrary, side: SideWork) -> Routes:
    routes = Routes()
    _add_reads(routes, models)
    _add_changes(routes, models)

    @routes.get("/models/installed", parameters=PageParameters)
    async def list_installed(http: HttpRequest) -> Response:
        return await side.run(_installed_page, models, library, read_parameters(http, PageParameters))

    return routes


def _add_reads(routes: Routes, models: Models) -> None:
    @routes.get("/v1/models", "/models")
    async def list_models(http: HttpRequest) -> Response:
        listed = await asyncio.to_thread(models.list)
        if is_anthropic(http):
            return json_response(anthropic_models.models_json([backend.card for backend in listed]))
        return json_response({"object": "list", "data": [model_json(models, backend) for backend in listed]})

    @routes.get("/v1/models/{model_id:path}", "/models/{model_id:model_id}")
    async def show_model(http: HttpRequest) -> Response:
        backend = models.find(http.path_params["model_id"])
        if is_anthropic(http):
            return json_response(anthropic_models.model_json(backend.card))
        return json_response(model_json(models, backend))


def _add_changes(routes: Routes, models: Models) -> None:
    @routes.post("/models/load", body=takes(ModelBody, model="default"))
    async def load_model(http: HttpRequest) -> Response:
        body = await read_body(http, ModelBody)
        backend = await while_connected(http, models.load(body.model))
        return json_response({"success": True, "model": model_json(models, backend)})

    @routes.post("/models/unload", body=takes(ModelBody, model="default"))
    async def unload_model(http: HttpRequest) -> Response:
        body = await read_body(http, ModelBody)
        backend = await while_connected(http, models.unload(body.model))
        return json_response({"success": True, "model": model_json(models, backend)})


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
