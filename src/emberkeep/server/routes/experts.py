"""Which experts a mixture chooses: look at the counts, begin and end to count."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep.backend.base import Backend
from emberkeep.backend.capabilities import experts_of
from emberkeep.server.openapi import takes
from emberkeep.server.reading import read
from emberkeep.server.respond import json_response
from emberkeep.server.wire.experts import TrackingBody, stats_json


def expert_routes(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.get("/expert-stats", responses={400: {"description": "The model has no experts."}})
    async def expert_stats() -> Response:
        return json_response(stats_json(experts_of(backend).stats()))

    @router.post("/expert-tracking", openapi_extra=takes(TrackingBody))
    async def expert_tracking(http: HttpRequest) -> Response:
        body = await read(http, TrackingBody)
        body.check()
        stats = await experts_of(backend).track(body.enabled, reset=bool(body.reset))
        return json_response(stats_json(stats))

    return router
