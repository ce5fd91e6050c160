"""Bodies of llama.cpp's own endpoints."""

from __future__ import annotations

from emberkeep.server.wire.body import Body
from emberkeep.server.wire.fields import Count
from emberkeep.server.wire.messages import Messages, Tools


class TokenizeBody(Body):
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    tokens: list[Count]


class TemplateBody(Body):
    messages: Messages
    tools: Tools | None = None
