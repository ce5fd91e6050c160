"""The blocks of Anthropic's messages: what each says as text, as images, as a call or as reasoning."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import field
from hashlib import blake2b
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from emberkeep.api.body import Body, ByKind, Label
from emberkeep.api.fields import CacheControl, breakpoints_in_text
from emberkeep.api.kinds import seal, unseal
from emberkeep.types.request import Breakpoint, Image, Json, Message, Role, ToolCall, Ttl
from emberkeep.values import dataclass


class Block(Body):
    cache_control: CacheControl | None = None

    @property
    def says_something(self) -> bool:
        return bool(self.texts() or self.images())

    def texts(self) -> list[str]:
        return []

    def images(self) -> list[Image]:
        return []


class TextBlock(Block):
    type: Literal["text"]
    text: str

    def texts(self) -> list[str]:
        return [self.text] if self.text else []


def texts_as_blocks(content: Json) -> Json:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Texts = Annotated[list[TextBlock], BeforeValidator(texts_as_blocks, json_schema_input_type=str | list[TextBlock])]
"""A text stands for one block of it."""


# ── images and documents ──


class Base64Source(Body):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    def to_image(self) -> Image:
        return Image(f"data:{self.media_type};base64,{self.data}")


def _web_address(url: str) -> str:
    if not url.startswith(("https://", "http://")):
        raise ValueError("give an address that begins with https://")
    return url


class UrlSource(Body):
    type: Literal["url"]
    url: Annotated[str, Field(json_schema_extra={"pattern": "^https?://"}), AfterValidator(_web_address)]

    def to_image(self) -> Image:
        return Image(self.url)


class ImageBlock(Block):
    type: Literal["image"]
    source: Annotated[
        Base64Source | UrlSource,
        ByKind("give an image as base64 with its media_type, or by its https address"),
    ]

    def images(self) -> list[Image]:
        return [self.source.to_image()]


class PlainTextSource(Body):
    type: Literal["text"]
    media_type: Literal["text/plain"] | None = None
    data: str

    def to_text(self) -> str:
        return self.data


class ContentSource(Body):
    type: Literal["content"]
    content: Texts

    def to_text(self) -> str:
        return "\n".join(block.text for block in self.content)


class Citations(Body):
    enabled: bool | None = None


def _without_citations(value: Json) -> Json:
    if isinstance(value, dict) and value.get("enabled") is True:
        raise ValueError("models here do not cite: leave it out")
    return value


NoCitations = Annotated[Citations, BeforeValidator(_without_citations)]


class DocumentBlock(Block):
    type: Literal["document"]
    source: Annotated[
        PlainTextSource | ContentSource,
        ByKind("models here read text: give the document as a source of type text or content"),
    ]
    title: str | None = None
    context: str | None = None
    citations: NoCitations | None = None

    def texts(self) -> list[str]:
        return [text for text in (self.title, self.context, self.source.to_text()) if text]


class SearchResultBlock(Block):
    type: Literal["search_result"]
    title: str
    source: str
    content: list[TextBlock]
    citations: NoCitations | None = None

    def texts(self) -> list[str]:
        return [text for text in (self.title, self.source, *(block.text for block in self.content)) if text]


# ── calls and their results ──


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Label
    name: Label
    input: dict[str, Any]

    @property
    def says_something(self) -> bool:
        return True

    def to_call(self) -> ToolCall:
        # As models write it; escapes would be other tokens.
        return ToolCall(self.id, self.name, json.dumps(self.input, ensure_ascii=False))


READABLE = ByKind("{kind} is no block that can be read here: leave it out")
ShownBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock
ShownBlocks = list[Annotated[ShownBlock, READABLE]]


class ResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Label
    content: Annotated[ShownBlocks, BeforeValidator(texts_as_blocks, json_schema_input_type=str | ShownBlocks)] = (
        Field(default=[])
    )
    is_error: bool | None = None

    @property
    def says_something(self) -> bool:
        return True

    def text(self) -> str:
        text = "\n".join(text for block in self.content for text in block.texts())
        if not self.is_error:
            return text
        return f"Error: {text}" if text else "Error"

    def images(self) -> list[Image]:
        return [image for block in self.content for image in block.images()]


# ── reasoning ──

_PACKED = "emberkeep:"


class ThinkingBlock(Block):
    """Reasoning of any model, whatever its signature: who sends a conversation may write into it what it likes."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None

    @property
    def says_something(self) -> bool:
        return bool(self.to_reasoning())

    def to_reasoning(self) -> str:
        return self.thinking or unpack_reasoning(self.signature or "")


class RedactedThinkingBlock(Block):
    """Only the model that wrote it could read it: it is left out."""

    type: Literal["redacted_thinking"]
    data: str


def signature_of(reasoning: str) -> str:
    """Clients send it back with the reasoning; nothing depends on it."""
    return base64.b64encode(blake2b(reasoning.encode("utf-8", "surrogatepass"), digest_size=24).digest()).decode()


def pack_reasoning(reasoning: str) -> str:
    """A signature that stands for the reasoning itself, for clients that do not want to see it."""
    return seal(reasoning, _PACKED)


def unpack_reasoning(signature: str) -> str:
    """Empty for a signature that is none of ours."""
    return unseal(signature, _PACKED)


AnyBlocks = list[
    Annotated[ShownBlock | ToolUseBlock | ResultBlock | ThinkingBlock | RedactedThinkingBlock, READABLE]
]
Content = Annotated[AnyBlocks, BeforeValidator(texts_as_blocks, json_schema_input_type=str | AnyBlocks)]
"""A text stands for one block of it."""


# ── from blocks to messages ──


@dataclass(slots=True)
class _Turn:
    """A message that is still being put together."""

    role: Role
    call_id: str | None = None
    tool: str | None = None
    parts: list[tuple[Ttl | None, str | None]] = field(default_factory=list)
    """Marks and texts in their order, as `breakpoints_in_text` reads them."""
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        return [text for _, text in self.parts if text is not None]

    def add(self, block: Block) -> None:
        if isinstance(block, ThinkingBlock):
            self.reasoning.append(block.to_reasoning())
        elif isinstance(block, ToolUseBlock):
            self.calls.append(block.to_call())
        else:
            self.parts += [(None, text) for text in block.texts()]
            self.images += block.images()

    def to_message(self) -> Message:
        return Message(
            role=self.role,
            content="\n".join(self.texts),
            reasoning="\n".join(filter(None, self.reasoning)),
            tool_calls=tuple(self.calls),
            tool_call_id=self.call_id,
            name=self.tool,
            images=tuple(self.images),
        )


class Turns:
    """The messages of a conversation, and its breakpoints."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._before: list[Breakpoint] = []
        """Those before the first message."""
        self._names: dict[str, str] = {}
        """Tools by the ids of their calls."""

    @property
    def last(self) -> _Turn | None:
        return self._turns[-1] if self._turns else None

    def messages(self) -> tuple[Message, ...]:
        return tuple(turn.to_message() for turn in self._turns)

    def breakpoints(self) -> tuple[Breakpoint, ...]:
        turns = enumerate(self._turns, 1)
        return (*self._before, *(one for n, turn in turns for one in breakpoints_in_text(turn.parts, n)))

    def mark(self, control: CacheControl | None) -> None:
        if control is None:
            return
        if self._turns:
            self._turns[-1].parts.append((control.to_ttl(), None))
        else:
            self._before.append(Breakpoint(0, None, control.to_ttl()))

    def add(self, role: Role, blocks: Sequence[Block]) -> None:
        """Results stand before whatever else the user says: models know them right after their calls."""
        for block in sorted(blocks, key=lambda block: not isinstance(block, ResultBlock)):
            if isinstance(block, ResultBlock):
                turn = _Turn("tool", block.tool_use_id, self._names.get(block.tool_use_id))
                turn.parts, turn.images = [(None, block.text())], block.images()
                self._turns.append(turn)
            elif block.says_something:
                self._turn_of(role).add(block)
            if isinstance(block, ToolUseBlock):
                self._names[block.id] = block.name
            self.mark(block.cache_control)

    def _turn_of(self, role: Role) -> _Turn:
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(_Turn(role))
        return self._turns[-1]
