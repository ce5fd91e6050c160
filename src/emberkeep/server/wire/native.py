"""Bodies of llama.cpp's own endpoints."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from emberkeep.api.messages import MessageList, ToolList
from emberkeep.api.request import Body, Count

MAX_CHARS = 4 << 20
MAX_TOKENS = 500_000


class TokenizeBody(Body):
    content: Annotated[str, Field(max_length=MAX_CHARS)]
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    tokens: Annotated[list[Count], Field(max_length=MAX_TOKENS)]


class TemplateBody(Body):
    messages: MessageList
    tools: ToolList | None = None
