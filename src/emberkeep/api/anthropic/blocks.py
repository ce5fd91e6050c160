"""The blocks of Anthropic's messages: what each says as text, as images, as a call or as reasoning."""

from __future__ import annotations

import base64
import json
from hashlib import blake2b
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from emberkeep.api.body import Body, ByKind, Label
from emberkeep.api.fields import CacheControl
from emberkeep.api.sealed import seal, unseal
from emberkeep.types.request import Image, Json, ToolCall


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
