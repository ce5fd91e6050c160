"""`/v1/warm`: evaluate a prefix before a client waits for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from starlette.requests import Request as HttpRequest

from emberkeep.api.body import one_of
from emberkeep.api.fields import OwnerFields
from emberkeep.api.openai.body import TemplateArgs
from emberkeep.api.openai.messages import BeginningList, ToolList, prefix_of_chats
from emberkeep.api.sampling import KvBits
from emberkeep.backend.capabilities import warm_prefix
from emberkeep.errors import InvalidField
from emberkeep.server.routes.base import Routes, Served
from emberkeep.server.stream import make_of_body, while_connected
from emberkeep.types.cache import Warmed
from emberkeep.types.request import Json, Request, Ttl

_SYSTEM = {"role": "system", "content": "You answer in one sentence."}


class WarmBody(OwnerFields):
    model_config = ConfigDict(json_schema_extra=one_of("text", "messages", "tools"))

    model: str | None = None
    text: Annotated[str, Field(min_length=1)] | None = None
    messages: BeginningList | None = None
    tools: ToolList | None = None
    chat_template_kwargs: TemplateArgs | None = None
    ttl: Literal["short", "long", "extended"] | None = None
    kv_bits: KvBits | None = None
    ask_permission: bool | None = None

    def to_request(self) -> Request:
        """Raises InvalidField where fields contradict each other."""
        ttl = Ttl(self.ttl) if self.ttl else None
        base = replace(self.to_owned(), max_tokens=0, ttl=ttl, kv_bits=self.kv_bits)
        if self.text is None:
            chat = replace(
                base,
                template_args=self.chat_template_kwargs or {},
                asks_permission=bool(self.ask_permission),
            )
            return prefix_of_chats(chat, self.messages or [], self.tools or [])
        if self.messages or self.tools:
            raise InvalidField("text", "goes without messages and tools: leave one of them out.")
        return replace(base, prompt=self.text).decided(is_prefix=True)


def routes(served: Served) -> Routes:
    routes = Routes()

    @routes.post("/v1/warm", example={"messages": [_SYSTEM]})
    async def warm(http: HttpRequest, body: WarmBody) -> Json:
        backend = served.models.find(body.model)
        request = await make_of_body(http, body.to_request)
        return warmed_json(await while_connected(http, warm_prefix(backend, request)))

    return routes


def warmed_json(warmed: Warmed) -> dict[str, Json]:
    return {
        "object": "warm",
        "tokens": warmed.tokens,
        "cached_tokens": warmed.cached_tokens,
        "evaluated_tokens": warmed.tokens - warmed.cached_tokens,
        "seconds": warmed.seconds,
        "entry_id": warmed.entry_id,
        "ttl": warmed.ttl,
        "ready": warmed.error is None,
        "error": warmed.error,
    }
