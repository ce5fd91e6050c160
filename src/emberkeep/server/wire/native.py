"""Bodies of llama.cpp's own endpoints."""

from __future__ import annotations

from emberkeep.library.checking import Body
from emberkeep.library.fields import Count
from emberkeep.library.messages import MessageList, ToolList


class TokenizeBody(Body):
    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    tokens: list[Count]


class TemplateBody(Body):
    messages: MessageList
    tools: ToolList | None = None
