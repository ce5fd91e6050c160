"""OpenAI's endpoints: chat completions and completions.

A body is read and checked, becomes a `Request`, and goes to the backend; the events that come back are sent as
they come (`stream`), or gathered into one answer (`gather`).
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep.api.answer import Answer, ChatFrames, Envelope, Frames, TextFrames
from emberkeep.api.call_shape import TOOL_CALLS, CallShape
from emberkeep.api.messages import ChatBody
from emberkeep.api.request import CompletionBody, GenerationBody
from emberkeep.backend.base import Backend, ModelCard
from emberkeep.backend.models import Models
from emberkeep.errors import RemoteLoop
from emberkeep.server.json_response import json_response
from emberkeep.server.routes import HELLO, STREAMS, Routes, takes
from emberkeep.server.stream import gather, make_of_body, read_body, stream
from emberkeep.types.models import DEPTH_HEADER, HOPS_HEADER
from emberkeep.types.request import Json, Request
from emberkeep.values import dataclass

_MOST_HOPS = 8
_DIGITS = 4
"""Most digits of a number in a header."""


def openai_routes(models: Models) -> Routes:
    routes = Routes()

    @routes.post(
        *("/v1/chat/completions", "/chat/completions"), content=STREAMS, body=takes(ChatBody, messages=[HELLO])
    )
    async def chat_completions(http: HttpRequest) -> Response:
        body = await read_body(http, ChatBody)
        backend = models.find(body.model)
        hops = check_hops(http)
        request = await make_of_body(http, body.to_request)
        # A whole answer has no place for a question.
        asks = request.asks_permission and bool(body.stream)
        request = replace(request, depth=number_in(http, DEPTH_HEADER), hops=hops, asks_permission=asks)
        return await _respond(http, backend, body, [request], _chat_shape(body))

    @routes.post(
        *("/v1/completions", "/completions"),
        content=STREAMS,
        body=takes(CompletionBody, prompt="Once upon a time"),
    )
    async def completions(http: HttpRequest) -> Response:
        body = await read_body(http, CompletionBody)
        backend = models.find(body.model)
        requests = await make_of_body(http, body.to_requests)
        return await _respond(http, backend, body, requests, _best_of(body) if body.chooses_best else _TEXT)

    return routes


@dataclass(frozen=True, slots=True)
class _Shape:
    """How an endpoint writes its answers."""

    prefix: str
    """Of their ids."""
    frames: Callable[[Envelope, bool], Frames]
    """The flag: with usage."""
    whole: Callable[[Answer, Envelope], dict[str, Json]]


_CHAT = _Shape("chatcmpl", ChatFrames, Answer.chat_json)
_TEXT = _Shape("cmpl", TextFrames, Answer.text_json)


def _chat_shape(body: ChatBody) -> _Shape:
    calls = CallShape(body.custom_names, is_legacy=bool(body.functions))
    if calls == TOOL_CALLS:
        return _CHAT
    return replace(_CHAT, frames=partial(ChatFrames, calls=calls), whole=partial(Answer.chat_json, calls=calls))


def _best_of(body: CompletionBody) -> _Shape:
    def whole(answer: Answer, envelope: Envelope) -> dict[str, Json]:
        answer.keep_best(body.tried, body.n or 1, with_logprobs=body.logprobs is not None)
        return answer.text_json(envelope)

    return replace(_TEXT, whole=whole)


async def _respond(
    http: HttpRequest, backend: Backend, body: GenerationBody, requests: Sequence[Request], shape: _Shape
) -> Response:
    """Raises what the backend raises before the first event, and ClientGone."""

    def envelope() -> Envelope:
        return new_envelope(shape.prefix, backend.card, requests[0].conversation_id)

    if body.stream:
        return await stream(http, backend, requests, lambda: shape.frames(envelope(), body.include_usage))
    answer = await gather(http, backend, requests)
    return json_response(shape.whole(answer, envelope()))


def new_envelope(prefix: str, card: ModelCard, conversation_id: str | None) -> Envelope:
    return Envelope(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=card.id,
        system_fingerprint="fp_" + hashlib.sha256(repr(card).encode()).hexdigest()[:12],
        conversation_id=conversation_id,
    )


def check_hops(http: HttpRequest) -> int:
    """How many servers have passed a request on. Raises RemoteLoop if there are too many: a circle."""
    hops = number_in(http, HOPS_HEADER)
    if hops > _MOST_HOPS:
        raise RemoteLoop(f"This request was passed on by {hops} servers: check whose backend asks whom.")
    return hops


def number_in(http: HttpRequest, header: str) -> int:
    """0 for what is no number."""
    said = http.headers.get(header, "")
    return int(said[:_DIGITS]) if said.isascii() and said.isdecimal() else 0
