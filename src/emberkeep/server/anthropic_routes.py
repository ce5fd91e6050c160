"""Anthropic's endpoints: messages, and counting the tokens of one before it is asked."""

from __future__ import annotations

import uuid
from dataclasses import replace

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep.api.anthropic import CountBody, MessagesBody
from emberkeep.api.anthropic_answer import MessageEnvelope, MessageFrames, message_json
from emberkeep.backend.capabilities import tokenizer_of
from emberkeep.backend.models import Models
from emberkeep.server.json_response import json_response
from emberkeep.server.openai import check_hops, number_in
from emberkeep.server.routes import HELLO, STREAMS, Routes, takes
from emberkeep.server.side_work import SideWork
from emberkeep.server.stream import gather, make_of_body, read_body, stream
from emberkeep.types.models import DEPTH_HEADER


def anthropic_routes(models: Models, side: SideWork) -> Routes:
    routes = Routes()

    @routes.post("/v1/messages", content=STREAMS, body=takes(MessagesBody, max_tokens=64, messages=[HELLO]))
    async def messages(http: HttpRequest) -> Response:
        body = await read_body(http, MessagesBody)
        backend = models.find(body.model)
        hops = check_hops(http)
        request = await make_of_body(http, body.to_request)
        request = replace(request, depth=number_in(http, DEPTH_HEADER), hops=hops)

        def envelope() -> MessageEnvelope:
            return MessageEnvelope(
                id=f"msg_{uuid.uuid4().hex}",
                model=backend.card.id,
                conversation_id=request.conversation_id,
                max_tokens=body.max_tokens,
                omits_thinking=body.omits_thinking,
            )

        if body.stream:
            return await stream(http, backend, [request], lambda: MessageFrames(envelope()))
        return json_response(message_json(await gather(http, backend, [request]), envelope()))

    @routes.post("/v1/messages/count_tokens", body=takes(CountBody, messages=[HELLO]))
    async def count_tokens(http: HttpRequest) -> Response:
        body = await read_body(http, CountBody)
        backend = models.find(body.model)
        request = await make_of_body(http, body.to_prompt)
        count = await side.run_on(lambda loaded: tokenizer_of(loaded).count(request), backend)
        return json_response({"input_tokens": count})

    return routes
