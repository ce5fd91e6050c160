"""The application: routes, error shapes and the gates in front of them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from emberkeep.api.errors import Failure, failure_of
from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.models.library import ModelLibrary
from emberkeep.server.limits import Limits, affordable
from emberkeep.server.middleware import Drain, PathMiddleware, RequestGate, SecurityMiddleware
from emberkeep.server.request_log import CLIENT_LEFT, FailureResponse, RequestMetrics
from emberkeep.server.routes.base import Served
from emberkeep.server.side_work import SideWork
from emberkeep.server.stream import ClientGone
from emberkeep.server.subjects import Subjects


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
