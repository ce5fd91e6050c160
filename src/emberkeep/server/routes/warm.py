"""`/v1/warm`: evaluate a prefix before somebody waits for it."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep.backend.base import Backend
from emberkeep.backend.capabilities import warm_prefix
from emberkeep.server.leaving import while_there
from emberkeep.server.openapi import takes
from emberkeep.server.reading import made_of_body, read
from emberkeep.server.respond import json_response
from emberkeep.server.routes.openai import check_model
from emberkeep.server.wire.warm import WarmBody, warmed_json

_SYSTEM = {"role": "system", "content": "You answer in one sentence."}


def warm_routes(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/warm", openapi_extra=takes(WarmBody, messages=[_SYSTEM]))
    async def warm(http: HttpRequest) -> Response:
        body = await read(http, WarmBody)
        check_model(body.model, backend.card)
        request = await made_of_body(http, body.to_request)
        return json_response(warmed_json(await while_there(http, warm_prefix(backend, request))))

    return router
