"""Endpoints outside OpenAI's API: what is where, health, stats; tokenize and others as llama.cpp has them."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep import __version__
from emberkeep.api.body import Body, Count
from emberkeep.api.openai.body import TemplateArgs
from emberkeep.api.openai.messages import MessageList, ToolList, to_messages
from emberkeep.backend.base import Backend
from emberkeep.backend.capabilities import tokenizer_of
from emberkeep.errors import InvalidField
from emberkeep.server.routes.base import HELLO, OfModel, Routes, Served, json_response, list_response
from emberkeep.server.routes.page import page_response, wants_page
from emberkeep.types.events import Loading
from emberkeep.types.request import Json

MAX_CHARS = 4 << 20
MAX_TOKENS = 500_000
MAX_PIECES = 128 << 10
_SLICE = 10_000
"""Tokens that are written without letting other threads go on."""


class TokenizeBody(Body):
    model: str | None = None
    content: Annotated[str, Field(max_length=MAX_CHARS)]
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[Count], Field(max_length=MAX_TOKENS)]


class TemplateBody(Body):
    model: str | None = None
    messages: MessageList
    tools: ToolList | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateArgs | None = None


def routes(served: Served) -> Routes:
    routes, models, side = Routes(), served.models, served.side
    is_public = served.config.api_key is not None  # clients that do not have the key can read `/health`

    @routes.get("/")
    async def pointer(http: HttpRequest) -> Json:
        if wants_page(http):
            return await page_response(http)
        return {"name": "Emberkeep", "version": __version__, "api": "/v1", "docs": "/openapi.json"}

    @routes.get("/health", "/v1/health", errors={503: "The model is loaded, the server stops, or it has failed."})
    async def health() -> Response:
        status, more = _status(served)
        figures = models.default.health()
        shown = _without_reasons(figures) if is_public else figures
        shown["backend_connected"] = models.failure() is None and _is_connected(figures)
        return json_response({"status": status, **shown, **more}, 200 if status == "ok" else 503)

    @routes.get("/v1/stats")
    async def stats(query: OfModel) -> Json:
        # The figures may have to wait for locks: not in the loop that serves the streams.
        return await asyncio.to_thread(lambda: models.find(query.model).stats())

    @routes.post("/tokenize", example={"content": "hello world"})
    async def tokenize(body: TokenizeBody) -> Response:
        return await side.run_on(_tokens, models.find(body.model), body)

    @routes.post("/detokenize", example={"tokens": [1, 2]})
    async def detokenize(body: DetokenizeBody) -> Json:
        return await side.run_on(_text, models.find(body.model), body)

    @routes.post("/apply-template", example=HELLO)
    async def apply_template(body: TemplateBody) -> Json:
        return await side.run_on(_prompt, models.find(body.model), body)

    return routes


def _status(served: Served) -> tuple[str, dict[str, Json]]:
    """In a word, and how far a start is."""
    if served.models.failure() is not None:
        return "failed", {}
    if (starting := served.models.starting) is not None:
        return "loading", _progress(starting)
    return "draining" if served.drain.draining else "ok", {}


def _progress(starting: Loading) -> dict[str, Json]:
    """With the error by which llama-server's clients know that it loads."""
    error = {"code": 503, "message": "Loading model", "type": "unavailable_error"}
    return {"step": starting.step or f"Loading {starting.model}", "progress": starting.fraction, "error": error}


def _is_connected(health: dict[str, Json]) -> bool:
    """Whether the backend can answer, as far as is known: of several one, as long as it did not fail last."""
    chain = health.get("chain")
    return any(link["state"] != "failed" for link in chain) if chain else "error" not in health


def _without_reasons(health: Json) -> Json:
    """Without the reasons of failures: they name addresses, which are not for clients without the key."""
    if isinstance(health, list):
        return [_without_reasons(item) for item in health]
    if not isinstance(health, dict):
        return health
    return {key: _without_reasons(value) for key, value in health.items() if key != "error"}


def _tokens(backend: Backend, body: TokenizeBody) -> Response:
    tokenizer = tokenizer_of(backend)
    ids = tokenizer.tokenize(
        body.content, add_special=bool(body.add_special), parse_special=body.parse_special is not False
    )
    if not body.with_pieces:
        slices = (ids[i : i + _SLICE] for i in range(0, len(ids), _SLICE))
        written = ", ".join(", ".join(map(str, part)) for part in slices)
        return Response(f'{{"tokens": [{written}]}}', media_type="application/json")
    if len(ids) > MAX_PIECES:
        raise InvalidField("with_pieces", f"is for {MAX_PIECES} tokens at most: send less, or leave it out.")
    pieces = zip(ids, tokenizer.pieces(ids), strict=True)
    return list_response("tokens", ({"id": token, "piece": _piece(piece)} for token, piece in pieces))


def _piece(piece: bytes) -> str | list[int]:
    """A piece that ends in the middle of a character is told by its bytes, as llama-server does."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


def _text(backend: Backend, body: DetokenizeBody) -> Json:
    return {"content": tokenizer_of(backend).detokenize(body.tokens)}


def _prompt(backend: Backend, body: TemplateBody) -> Json:
    tools = [tool.to_tool() for tool in body.tools or ()]
    messages = to_messages(body.messages)
    prompt = tokenizer_of(backend, "template").apply_template(
        messages,
        tools,
        body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    return {"prompt": prompt}
