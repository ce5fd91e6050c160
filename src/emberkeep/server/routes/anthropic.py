"""Anthropic's endpoints: messages, and counting their tokens. Its list of models is at OpenAI's path."""

from __future__ import annotations

import uuid

from starlette.requests import Request as HttpRequest

from emberkeep.api.anthropic_messages import CountBody, MessageEnvelope, MessageFrames, MessagesBody, message_json
from emberkeep.backend.base import tokenizer_of
from emberkeep.server.routes.base import HELLO, STREAMS, Routes, Served, passed_on, respond
from emberkeep.server.stream import make_of_body
from emberkeep.types.request import Json


def routes(served: Served) -> Routes:
    routes, models = Routes(), served.models

    @routes.post("/v1/messages", content=STREAMS, example={"max_tokens": 64, **HELLO})
    async def messages(http: HttpRequest, body: MessagesBody) -> Json:
        backend = models.find(body.model)
        request = passed_on(http, await make_of_body(http, body.to_request))

        def envelope() -> MessageEnvelope:
            return MessageEnvelope(
                id=f"msg_{uuid.uuid4().hex}",
                model=backend.card.id,
                conversation_id=request.conversation_id,
                max_tokens=body.max_tokens,
                omits_thinking=body.omits_thinking,
            )

        streams = (lambda: MessageFrames(envelope())) if body.stream else None
        return await respond(http, backend, [request], streams, lambda answer: message_json(answer, envelope()))

    @routes.post("/v1/messages/count_tokens", example=HELLO)
    async def count_tokens(http: HttpRequest, body: CountBody) -> Json:
        backend, request = models.find(body.model), await make_of_body(http, body.to_prompt)
        count = await served.side.run_on(lambda loaded: tokenizer_of(loaded).count(request), backend)
        return {"input_tokens": count}

    return routes
