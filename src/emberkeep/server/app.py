"""The application: routes, error shapes and the gates in front of them."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match

from emberkeep import __version__
from emberkeep.api.errors import Failure, failure_of, refusal
from emberkeep.backend.models import Models
from emberkeep.config import Config
from emberkeep.errors import EmberkeepError
from emberkeep.models.library import ModelLibrary
from emberkeep.server.anthropic_routes import anthropic_routes
from emberkeep.server.benchmark_routes import benchmark_routes
from emberkeep.server.cache_routes import cache_routes
from emberkeep.server.embedding_routes import embedding_routes
from emberkeep.server.expert_routes import expert_routes
from emberkeep.server.limits import Limits, affordable
from emberkeep.server.llama_routes import llama_routes
from emberkeep.server.memory_routes import memory_routes
from emberkeep.server.metrics import RequestMetrics, StatsCollector, metrics_routes
from emberkeep.server.middleware import (
    BodyBounds,
    Drain,
    DrainMiddleware,
    LastResort,
    PathMiddleware,
    RequestId,
    SecurityMiddleware,
    failure_response,
)
from emberkeep.server.model_routes import model_routes
from emberkeep.server.native_routes import native_routes
from emberkeep.server.ollama_models import ollama_model_routes
from emberkeep.server.ollama_routes import ollama_routes
from emberkeep.server.openai import openai_routes
from emberkeep.server.openapi import DescribedApp
from emberkeep.server.page_routes import page_routes
from emberkeep.server.pulse import pulse_routes
from emberkeep.server.request_routes import request_routes
from emberkeep.server.responses_routes import responses_routes
from emberkeep.server.side_work import SideWork
from emberkeep.server.stream import ClientGone
from emberkeep.server.tool_routes import tool_routes
from emberkeep.server.warm_routes import warm_routes


def create_app(
    models: Models, config: Config, limits: Limits | None = None, *, is_checked: bool = False
) -> FastAPI:
    """The caller keeps the models and closes them. `is_checked`: who passes requests on has looked at their key,
    host and origin.

    `app.state` has the application's own `drain`, `metrics` and `limits`, for the server around it to begin, to
    feed and to keep.
    """
    drain, registry, side = Drain(), CollectorRegistry(), SideWork()
    registry.register(StatsCollector(models))
    app = DescribedApp(
        title="Emberkeep", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.drain = drain
    app.state.limits = limits or Limits(connections=affordable(config.connections))
    app.state.metrics = RequestMetrics(registry)
    app.include_router(openai_routes(models))
    app.include_router(ollama_routes(models))
    library = ModelLibrary(config.data_dir / "models")
    app.include_router(ollama_model_routes(models, library, side))
    app.include_router(anthropic_routes(models, side))
    responses = responses_routes(models, side)
    app.include_router(responses, prefix="/v1")
    app.include_router(responses, include_in_schema=False)
    app.include_router(embedding_routes(models))
    app.include_router(llama_routes(models, side))
    app.include_router(model_routes(models, library, side))
    app.include_router(native_routes(models, drain, side, is_public=config.api_key is not None))
    app.include_router(cache_routes(models, side))
    app.include_router(warm_routes(models))
    app.include_router(memory_routes(models.default, side))
    app.include_router(expert_routes(models))
    app.include_router(benchmark_routes(config.data_dir / "benchmarks", side))
    app.include_router(metrics_routes(registry))
    app.include_router(page_routes())
    app.include_router(pulse_routes(models, drain))
    app.include_router(request_routes(models))
    app.include_router(tool_routes(models, is_enabled=config.server_tools))
    app.add_middleware(BodyBounds, drain=drain, limits=app.state.limits)
    app.add_middleware(LastResort)
    app.add_middleware(PathMiddleware)
    app.add_middleware(DrainMiddleware, drain=drain)
    if not is_checked:
        app.add_middleware(SecurityMiddleware, config=config)
    app.add_middleware(RequestId)  # added last, it comes first
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(RequestValidationError, _on_bad_parameter)
    app.add_exception_handler(EmberkeepError, _on_error)
    return app


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    return failure_response(failure_of(error))


async def _on_bad_parameter(http: HttpRequest, error: Exception) -> Response:
    """The answer to a bad parameter in the path or in the query, which the framework checks."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    _, *location = first["loc"]
    return failure_response(failure_of(refusal(tuple(location), first["type"], first.get("ctx", {}))))


async def _on_http_error(http: HttpRequest, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    path, headers = http.url.path[:200], {}
    message = f"There is no {path} here: GET /openapi.json lists what there is."
    if error.status_code == 405:
        allowed = _allowed(http)
        message, headers = f"{http.method} does not work on {path}: use {allowed}.", {"Allow": allowed}
    return failure_response(Failure(error.status_code, "invalid_request_error", message, headers=headers))


def _allowed(http: HttpRequest) -> str:
    """Methods of every route with this path; the framework's own answer names those of one."""

    def is_served(method: str) -> bool:
        asked = {**http.scope, "method": method}
        return any(route.matches(asked)[0] is Match.FULL for route in http.app.routes)

    served = [method for method in ("DELETE", "GET", "POST", "PUT") if is_served(method)]
    return ", ".join(served).replace("GET", "GET, HEAD")  # see PathMiddleware


async def _on_client_gone(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # only the log reads it
