"""What servers answer, as text: pictures, sounds and other bytes are described, not shown."""

from __future__ import annotations

import json
from collections.abc import Iterable

from mcp.types import (
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    GetPromptResult,
    ImageContent,
    ReadResourceResult,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from emberkeep.config import readable_size
from emberkeep.errors import ToolFailed
from emberkeep.mcp.text import cleaned
from emberkeep.types import Image, Message


def result_text(result: CallToolResult) -> str:
    """Raises ToolFailed where the tool says that it has failed."""
    text = _joined(map(_block_text, result.content))
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error:
        raise ToolFailed(text or "The tool failed without a word.")
    return text


def resource_text(result: ReadResourceResult) -> str:
    return _joined(map(_resource_text, result.contents))


def prompt_message(result: GetPromptResult) -> Message:
    """One message of the user who asked for it. What the server has the assistant say is quoted in it: as a
    message of the assistant its control tokens would be taken for the model's own, and forge whole turns."""
    contents = [message.content for message in result.messages]
    images = [content for content in contents if isinstance(content, ImageContent)]
    said = [
        f"Assistant: {text}" if message.role == "assistant" else text
        for message in result.messages
        if not isinstance(message.content, ImageContent) and (text := _block_text(message.content))
    ]
    pictures = tuple(Image(f"data:{image.mime_type};base64,{image.data}") for image in images)
    return Message("user", "\n\n".join(said), images=pictures)


def _joined(parts: Iterable[str]) -> str:
    return "\n".join(part for part in parts if part)


def _block_text(block: ContentBlock) -> str:
    match block:
        case TextContent():
            return cleaned(block.text)
        case EmbeddedResource():
            return _resource_text(block.resource)
        case ResourceLink():
            return cleaned(f"[{block.uri}{f', {block.mime_type}' if block.mime_type else ''}]")
    return _described(block.mime_type, block.data)


def _resource_text(contents: TextResourceContents | BlobResourceContents) -> str:
    if isinstance(contents, TextResourceContents):
        return cleaned(contents.text)
    return _described(contents.mime_type or "application/octet-stream", contents.blob)


def _described(mime_type: str, data: str) -> str:
    """Of base64."""
    return cleaned(f"[{mime_type}, {readable_size(len(data) * 3 // 4)}]")
