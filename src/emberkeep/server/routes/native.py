"""Endpoints outside OpenAI's API: what is where, health, stats; tokenize and others as llama.cpp has them."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep import __version__
from emberkeep.backend.base import Backend
from emberkeep.library.messages import to_messages
from emberkeep.server.drain import Drain
from emberkeep.server.openapi import HELLO, takes
from emberkeep.server.reading import read
from emberkeep.server.respond import json_response
from emberkeep.server.wire.native import DetokenizeBody, TemplateBody, TokenizeBody
from emberkeep.types import Json


def native_routes(backend: Backend, drain: Drain, *, is_public: bool) -> APIRouter:
    """`is_public`: who asks may not know the key."""
    router = APIRouter()

    @router.get("/")
    async def pointer() -> Response:
        return json_response({"name": "Emberkeep", "version": __version__, "api": "/v1", "docs": "/openapi.json"})

    @router.get("/health", responses={503: {"description": "The server is stopping."}})
    async def health() -> Response:
        told = _for_anybody(backend.health()) if is_public else backend.health()
        if drain.draining:
            return json_response({"status": "draining", **told}, 503)
        return json_response({"status": "ok", **told})

    @router.get("/v1/stats")
    async def stats() -> Response:
        return json_response(backend.stats())

    # Long texts take a while: a thread keeps the loop free for the streams.

    @router.post("/tokenize", openapi_extra=takes(TokenizeBody, content="hello world"))
    async def tokenize(http: HttpRequest) -> Response:
        body = await read(http, TokenizeBody)
        return json_response({"tokens": await asyncio.to_thread(_tokens, backend, body)})

    @router.post("/detokenize", openapi_extra=takes(DetokenizeBody, tokens=[1, 2]))
    async def detokenize(http: HttpRequest) -> Response:
        body = await read(http, DetokenizeBody)
        return json_response({"content": await asyncio.to_thread(backend.detokenize, body.tokens)})

    @router.post("/apply-template", openapi_extra=takes(TemplateBody, messages=[HELLO]))
    async def apply_template(http: HttpRequest) -> Response:
        body = await read(http, TemplateBody)
        tools = [tool.to_tool() for tool in body.tools or ()]
        prompt = await asyncio.to_thread(backend.apply_template, to_messages(body.messages), tools)
        return json_response({"prompt": prompt})

    return router


def _for_anybody(health: Json) -> Json:
    """Without the reasons of failures, which name addresses."""
    if isinstance(health, list):
        return [_for_anybody(item) for item in health]
    if not isinstance(health, dict):
        return health
    return {key: _for_anybody(value) for key, value in health.items() if key != "error"}


def _tokens(backend: Backend, body: TokenizeBody) -> list[Json]:
    ids = backend.tokenize(
        body.content, add_special=bool(body.add_special), parse_special=body.parse_special is not False
    )
    if body.with_pieces:
        return [{"id": token, "piece": backend.detokenize([token])} for token in ids]
    return list(ids)
