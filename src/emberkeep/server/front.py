"""The application in front of several servers: their checks and limits, once for all, and none of their routes."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from emberkeep.api.errors import failure_of
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.server.limits import Limits, affordable
from emberkeep.server.metrics import read_requests
from emberkeep.server.middleware import Drain, RequestGate, SecurityMiddleware
from emberkeep.server.request_log import failure_response
from emberkeep.server.request_metrics import RequestMetrics


def create_front(answer: ASGIApp, config: Config) -> Starlette:
    """`answer` gets what passes, and may raise EmberkeepError before it has sent anything.

    `app.state` is that of `create_app`, and has `read_metrics`: its own figures, as Prometheus reads them.
    """
    drain, metrics = Drain(), RequestMetrics()
    app = Starlette()
    app.state.drain = drain
    app.state.limits = Limits(connections=affordable())
    app.state.metrics = metrics
    app.state.read_metrics = lambda: read_requests(metrics)
    app.add_middleware(_Instead, answer=answer)
    app.add_middleware(RequestGate, drain=drain, limits=app.state.limits)
    app.add_middleware(SecurityMiddleware, config=config)  # added last, it comes first
    return app


class _Instead:
    """ASGI. In place of the routes that there are not."""

    def __init__(self, app: ASGIApp, answer: ASGIApp) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except EmberkeepError as error:
            await failure_response(failure_of(error))(scope, receive, send)
