"""The application: its routes by subject, error shapes and the gates in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from importlib import import_module
from threading import Lock

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from emberkeep.api.errors import Failure, failure_of
from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.models.library import ModelLibrary
from emberkeep.server.middleware import Drain, Limits, PathMiddleware, RequestGate, SecurityMiddleware, affordable
from emberkeep.server.request_log import CLIENT_LEFT, FailureResponse, RequestMetrics
from emberkeep.server.routes.base import ApiRoute, Routes, Served, SideWork
from emberkeep.server.stream import ClientGone
from emberkeep.types.request import Json


def create_app(
    models: Models, config: Config, limits: Limits | None = None, *, is_checked: bool = False
) -> Starlette:
    """The caller keeps the models and closes them. `is_checked`: who passes requests on has looked at their key,
    host and origin.

    `app.state` has the application's own `drain`, `metrics` and `limits`, for the server around it to begin, to
    feed and to keep, and its `subjects`.
    """
    drain, metrics, library = Drain(), RequestMetrics(), ModelLibrary(config.data_dir / "models")
    subjects = Subjects(Served(models, config, library, SideWork(), drain, metrics))
    app = Starlette()
    app.state.subjects = subjects
    app.add_middleware(PathMiddleware)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    _put_behind_gates(app, subjects, drain, metrics, limits or Limits(connections=affordable()))
    if not is_checked:
        app.add_middleware(SecurityMiddleware, config=config)  # added last, it comes first
    return app


def create_front(answer: ASGIApp, config: Config) -> Starlette:
    """The application in front of several servers: it has their checks and limits, and none of their routes.
    `answer` gets what passes, and may raise EmberkeepError before it has sent anything.

    `app.state` is that of `create_app`, and has `read_metrics`: its own figures, as Prometheus reads them.
    """
    app, metrics = Starlette(), RequestMetrics()

    def read_metrics() -> bytes:
        # Imported when somebody reads it: a server without a front needs it at its first scrape only.
        from emberkeep.server.metrics import read_requests

        return read_requests(metrics)

    app.state.read_metrics = read_metrics
    _put_behind_gates(app, answer, Drain(), metrics, Limits(connections=affordable()))
    app.add_middleware(SecurityMiddleware, config=config)  # added last, it comes first
    return app


def _put_behind_gates(
    app: Starlette, answer: ASGIApp, drain: Drain, metrics: RequestMetrics, limits: Limits
) -> None:
    app.state.drain, app.state.metrics, app.state.limits = drain, metrics, limits
    app.router.default = answer
    app.add_exception_handler(EmberkeepError, _on_error)
    app.add_middleware(RequestGate, drain=drain, limits=limits)


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    return FailureResponse(failure_of(error))


_REMOVED = {"/v1/benchmarks": "`emberkeep bench NAME --json FILE` keeps what it measures."}
"""Routes that are no more, with what to use instead."""


async def _on_http_error(http: HttpRequest, error: Exception) -> Response:
    """404 and 405 of the router, and 410 for what was served once."""
    assert isinstance(error, HTTPException)
    path, headers = http.url.path[:200], {}
    for removed, instead in _REMOVED.items():
        if path == removed or path.startswith(f"{removed}/"):
            message = f"{removed} was removed: {instead}"
            return FailureResponse(Failure(410, "invalid_request_error", message))
    message = f"There is no {path} here: GET /openapi.json lists what there is."
    if error.status_code == 405:
        allowed = _allowed(http)
        message, headers = f"{http.method} does not work on {path}: use {allowed}.", {"Allow": allowed}
    return FailureResponse(Failure(error.status_code, "invalid_request_error", message, headers=headers))


def _allowed(http: HttpRequest) -> str:
    """Methods of every route with this path; the framework's own answer names those of one."""

    def is_served(method: str) -> bool:
        scope = {**http.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in http.scope["router"].routes)

    served = [method for method in ("DELETE", "GET", "POST", "PUT") if is_served(method)]
    return ", ".join(served).replace("GET", "GET, HEAD")  # see PathMiddleware


async def _on_client_gone(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


# ── routes, by subject: the modules of one are imported when the first request asks for it ──

SUBJECTS: tuple[tuple[str, ...], ...] = (
    (
        *("routes.openai", "/v1/chat/completions", "/chat/completions", "/v1/completions", "/completions"),
        *("/v1/models", "/models"),
    ),
    ("routes.ollama", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/version"),
    ("routes.ollama_models", "/api"),
    ("routes.anthropic", "/v1/messages"),
    ("routes.responses", "/v1/responses", "/responses", "/v1/conversations", "/conversations"),
    (
        *("routes.embeddings", "/v1/embeddings", "/embeddings", "/embedding"),
        *("/v1/rerank", "/rerank", "/v1/reranking", "/reranking"),
    ),
    (
        *("routes.llama_server", "/completion", "/infill", "/props", "/slots", "/lora-adapters"),
        *("/tokenize", "/detokenize", "/apply-template"),
    ),
    (
        *("routes.native", "/", "/page", "/health", "/v1/health", "/v1/stats"),
        *("/v1/tools", "/expert-stats", "/expert-tracking"),
    ),
    ("routes.cache", "/v1/cache", "/v1/warm"),
    ("routes.memory", "/v1/memory"),
    ("metrics", "/metrics"),
    ("routes.pulse", "/v1/events", "/v1/requests"),
)
"""Modules, whose `routes` makes them, each with its paths: it has the routes of these and of what is below them.
The longest path counts."""

_MOST_PARTS = 1 + max(path.count("/") for _, *paths in SUBJECTS for path in paths)


def make_routes(module: str, served: Served) -> Routes:
    """Blocks for some hundredths of a second the first time."""
    routes: Routes = import_module(f"emberkeep.server.{module}").routes(served)
    return routes


class Subjects:
    """ASGI. Hands a request to the routes of its subject. Raises HTTPException where there are none."""

    def __init__(self, served: Served) -> None:
        self._all = [_Subject(partial(make_routes, module, served)) for module, *_ in SUBJECTS]
        named = zip(self._all, SUBJECTS, strict=True)
        self._by_path = {path: subject for subject, (_, *paths) in named for path in paths}
        self._by_path["/openapi.json"] = _Subject(self._document_routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        subject = self._find(scope["path"])
        if subject is None:
            raise HTTPException(404)
        # Importing takes too long for the loop that serves the streams.
        scope["router"] = subject.router or await asyncio.to_thread(subject.load)
        await scope["router"](scope, receive, send)

    def routes(self) -> Iterator[ApiRoute]:
        """All of them, in the order of the table. Blocks while modules are imported."""
        for subject in self._all:
            for route in subject.load().routes:
                assert isinstance(route, ApiRoute)
                yield route

    @cached_property
    def document(self) -> dict[str, Json]:
        """OpenAPI's. Blocks for a good part of a second the first time."""
        from emberkeep.server.openapi import document

        return document(self.routes())

    def _document_routes(self) -> Routes:
        routes = Routes()

        @routes.get("/openapi.json", is_hidden=True)
        async def openapi() -> Json:
            return await asyncio.to_thread(lambda: self.document)

        return routes

    def _find(self, path: str) -> _Subject | None:
        """The subject that has this path or one that it begins with."""
        parts = path.split("/", _MOST_PARTS)
        names = ("/".join(parts[:count]) for count in range(_MOST_PARTS, 1, -1))
        return next((self._by_path[name] for name in names if name in self._by_path), None)


class _Subject:
    def __init__(self, make: Callable[[], Routes]) -> None:
        self.router: Router | None = None
        """None until it is loaded."""
        self._make = make
        self._loading = Lock()

    def load(self) -> Router:
        """Blocks for some hundredths of a second the first time. From any thread."""
        with self._loading:
            if self.router is None:
                self.router = Router(self._make().listed, redirect_slashes=False)
            return self.router
