"""OpenAI's endpoints: chat completions and completions.

A body is read and checked, becomes a `Request`, and goes to the backend; the events that come back are sent as
they come, or gathered into one answer.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import replace

from starlette.requests import Request as HttpRequest

from emberkeep.api.answer import Answer
from emberkeep.api.openai.answer import CallShape, ChatFrames, Envelope, TextFrames, chat_json, text_json
from emberkeep.api.openai.body import ChatBody, CompletionBody
from emberkeep.backend.base import ModelCard
from emberkeep.server.routes.base import HELLO, STREAMS, Routes, Served, passed_on, respond
from emberkeep.server.stream import make_of_body
from emberkeep.types.request import Json


def routes(served: Served) -> Routes:
    routes, models = Routes(), served.models

    @routes.post("/v1/chat/completions", "/chat/completions", content=STREAMS, example=HELLO)
    async def chat_completions(http: HttpRequest, body: ChatBody) -> Json:
        backend = models.find(body.model)
        request = passed_on(http, await make_of_body(http, body.to_request))
        # A whole answer has no place for a question.
        request = replace(request, asks_permission=request.asks_permission and bool(body.stream))
        calls = CallShape(body.custom_names, is_legacy=bool(body.functions))

        def envelope() -> Envelope:
            return new_envelope("chatcmpl", backend.card, request.conversation_id)

        def frames() -> ChatFrames:
            return ChatFrames(envelope(), body.include_usage, calls)

        streams = frames if body.stream else None
        return await respond(
            http, backend, [request], streams, lambda answer: chat_json(answer, envelope(), calls)
        )

    @routes.post(*("/v1/completions", "/completions"), content=STREAMS, example={"prompt": "Once upon a time"})
    async def completions(http: HttpRequest, body: CompletionBody) -> Json:
        backend = models.find(body.model)
        requests = await make_of_body(http, body.to_requests)

        def envelope() -> Envelope:
            return new_envelope("cmpl", backend.card, requests[0].conversation_id)

        def whole(answer: Answer) -> Json:
            if body.chooses_best:
                answer.keep_best(body.tried, body.n or 1, with_logprobs=body.logprobs is not None)
            return text_json(answer, envelope())

        streams = (lambda: TextFrames(envelope(), body.include_usage)) if body.stream else None
        return await respond(http, backend, requests, streams, whole)

    return routes


def new_envelope(prefix: str, card: ModelCard, conversation_id: str | None) -> Envelope:
    return Envelope(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=card.id,
        system_fingerprint="fp_" + hashlib.sha256(repr(card).encode()).hexdigest()[:12],
        conversation_id=conversation_id,
    )
