"""What servers answer, as values of ours: what they offer, as much as can be borne, results as text, and which
definitions of tools were approved. Pictures, sounds and other bytes are described, not shown."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Any

import mcp.types as wire
from mcp import Client

from emberkeep.config.kinds import readable_size
from emberkeep.config.tables import McpServer
from emberkeep.errors import ToolFailed
from emberkeep.files import locked, private_folder, replace_file
from emberkeep.text import shorten, strip_hidden, strip_hidden_json
from emberkeep.types.request import Image, Message, Tool
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.mcp")

_TOOLS = 256
_PROMPTS = 64
_SEEN = 10_000
"""So many entries are looked at of a list that goes on and on."""
_PAGES = 100
_DESCRIPTION_CHARS = 4000
_SCHEMA_CHARS = 32_000
_NAME_CHARS = 64
"""Longest name of a function that models' APIs take."""


@dataclass(frozen=True, slots=True)
class ListedTool:
    name: str
    """What its server calls it."""
    definition: Tool
    """What models are told, under the name that they call it by."""
    is_read_only: bool
    """The server's own claim, which decides nothing."""
    digest: str
    """It covers all that a person approves by using the tool, as the server said it."""


@dataclass(frozen=True, slots=True)
class McpPrompt:
    """A text that a server has ready, to be filled with arguments."""

    name: str
    """`SERVER__prompt`."""
    server: str
    original: str
    """What its server calls it."""
    description: str
    arguments: tuple[PromptArgument, ...]


@dataclass(frozen=True, slots=True)
class PromptArgument:
    name: str
    description: str
    is_required: bool


@dataclass(frozen=True, slots=True)
class Listing:
    about: str = ""
    """The server's own name and version."""
    tools: tuple[ListedTool, ...] = ()
    prompts: tuple[McpPrompt, ...] = ()


async def read_listing(client: Client, server: McpServer) -> Listing:
    """Raises what the SDK raises."""
    can = client.server_capabilities
    tools = [tool async for tool in _pages(client.list_tools, lambda page: page.tools)] if can.tools else []
    prompts = [p async for p in _pages(client.list_prompts, lambda page: page.prompts)] if can.prompts else []
    info = client.server_info
    return Listing(
        shorten(strip_hidden(f"{info.name} {info.version}".strip()), 80) if info else "",
        _tools(server, tools),
        _prompts(server, prompts[:_PROMPTS]),
    )


async def read_resources(client: Client, most: int) -> list[dict[str, str]]:
    """Raises what the SDK raises."""
    if not client.server_capabilities.resources:
        return []
    found: list[wire.Resource | wire.ResourceTemplate] = []
    found += [one async for one in _pages(client.list_resources, lambda page: page.resources)]
    found += [one async for one in _pages(client.list_resource_templates, lambda page: page.resource_templates)]
    return [_resource(one) for one in found[:most]]


async def _pages(
    fetch: Callable[..., Awaitable[Any]], items: Callable[[Any], Sequence[Any]]
) -> AsyncIterator[Any]:
    cursor: str | None = None
    seen = 0
    for _ in range(_PAGES):
        page = await fetch(cursor=cursor)
        for item in items(page)[: _SEEN - seen]:
            yield item
        seen += len(items(page))
        cursor = page.next_cursor
        if cursor is None or seen >= _SEEN:
            return


def _resource(found: wire.Resource | wire.ResourceTemplate) -> dict[str, str]:
    uri = found.uri if isinstance(found, wire.Resource) else found.uri_template
    fields = {"uri": uri, "name": found.name, "description": found.description, "type": found.mime_type}
    return {key: shorten(strip_hidden(value), 500) for key, value in fields.items() if value}


def _tools(server: McpServer, listed: Sequence[wire.Tool]) -> tuple[ListedTool, ...]:
    wanted = {tool.name: tool for tool in reversed(listed) if not server.tools or tool.name in server.tools}
    usable = [tool for tool in reversed(wanted.values()) if _is_bearable(tool)]
    if len(usable) < len(wanted) or len(usable) > _TOOLS:
        log.warning("%s: some tools are left out: %d are used at most, with short schemas", server.name, _TOOLS)
    names = _names(server.name, [tool.name for tool in usable[:_TOOLS]])
    return tuple(_tool(tool, name) for tool, name in zip(usable, names, strict=False))


def _is_bearable(tool: wire.Tool) -> bool:
    return bool(tool.name) and len(json.dumps(tool.input_schema)) <= _SCHEMA_CHARS


def _tool(tool: wire.Tool, name: str) -> ListedTool:
    is_read_only = bool(tool.annotations and tool.annotations.read_only_hint)
    description = shorten(strip_hidden(tool.description or ""), _DESCRIPTION_CHARS)
    definition = Tool(name, description, {"type": "object", **strip_hidden_json(tool.input_schema)})
    # With the hint: who approves a tool is shown it.
    approved = [tool.name, tool.description or "", tool.input_schema, is_read_only]
    digest = hashlib.sha256(json.dumps(approved, sort_keys=True).encode()).hexdigest()
    return ListedTool(tool.name, definition, is_read_only, digest)


def unlisted_tool(server: str, name: str) -> ListedTool:
    """A tool that the server has not listed."""
    return ListedTool(name, Tool(_names(server, [name])[0]), False, "")


def _prompts(server: McpServer, listed: Sequence[wire.Prompt]) -> tuple[McpPrompt, ...]:
    names = _names(server.name, [prompt.name for prompt in listed])
    return tuple(
        McpPrompt(
            name,
            server.name,
            prompt.name,
            shorten(strip_hidden(prompt.description or ""), 500),
            tuple(
                PromptArgument(
                    strip_hidden(one.name), shorten(strip_hidden(one.description or ""), 500), bool(one.required)
                )
                for one in prompt.arguments or ()
            ),
        )
        for prompt, name in zip(listed, names, strict=True)
    )


def _names(server: str, originals: Iterable[str]) -> list[str]:
    """`SERVER__name` for each, of characters that models' APIs take, all different."""
    names: list[str] = []
    for original in originals:
        name = f"{server}__{re.sub(r'[^A-Za-z0-9_-]', '_', original)}"
        if len(name) > _NAME_CHARS or name in names:
            mark = hashlib.sha256(original.encode()).hexdigest()[:8]
            name = f"{name[: _NAME_CHARS - 9]}_{mark}"
        names.append(name)
    return names


# ── results as text ──


def result_text(result: wire.CallToolResult) -> str:
    """Raises ToolFailed where the tool says that it has failed."""
    text = _join(map(_block_text, result.content))
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error:
        raise ToolFailed(text or "The tool failed without a word.")
    return text


def resource_text(result: wire.ReadResourceResult) -> str:
    return _join(map(_resource_text, result.contents))


def prompt_message(result: wire.GetPromptResult) -> Message:
    """One message of the user who asked for it. What the server has the assistant say is quoted in it: as a
    message of the assistant its control tokens would be taken for the model's own, and forge whole turns."""
    contents = [message.content for message in result.messages]
    images = [content for content in contents if isinstance(content, wire.ImageContent)]
    texts = [
        f"Assistant: {text}" if message.role == "assistant" else text
        for message in result.messages
        if not isinstance(message.content, wire.ImageContent) and (text := _block_text(message.content))
    ]
    pictures = tuple(Image(f"data:{image.mime_type};base64,{image.data}") for image in images)
    return Message("user", "\n\n".join(texts), images=pictures)


def _join(parts: Iterable[str]) -> str:
    return "\n".join(part for part in parts if part)


def _block_text(block: wire.ContentBlock) -> str:
    match block:
        case wire.TextContent():
            return strip_hidden(block.text)
        case wire.EmbeddedResource():
            return _resource_text(block.resource)
        case wire.ResourceLink():
            return strip_hidden(f"[{block.uri}{f', {block.mime_type}' if block.mime_type else ''}]")
    return _describe_bytes(block.mime_type, block.data)


def _resource_text(contents: wire.TextResourceContents | wire.BlobResourceContents) -> str:
    if isinstance(contents, wire.TextResourceContents):
        return strip_hidden(contents.text)
    return _describe_bytes(contents.mime_type or "application/octet-stream", contents.blob)


def _describe_bytes(mime_type: str, data: str) -> str:
    """A note in place of bytes that are written in base64."""
    return strip_hidden(f"[{mime_type}, {readable_size(len(data) * 3 // 4)}]")


# ── which definitions were approved: those of first use, and later ones that a user approved ──

_Digests = dict[str, dict[str, str]]
"""The digests of each server's tools, by their names."""


class Standing(StrEnum):
    APPROVED = "approved"
    CHANGED = "changed"
    NEW = "new"


class Pins:
    """A file that processes share. Every method blocks for a moment on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._digests: _Digests | None = {}
        """None: the file cannot be understood, so nothing is approved."""

    def standings(self, server: str, tools: Iterable[ListedTool]) -> dict[str, Standing]:
        """How each tool stands, by its name. All tools of a server that was never seen are new."""
        self._refresh()
        known = (self._digests or {}).get(server, {})
        return {tool.name: _standing(known.get(tool.name), tool) for tool in tools}

    def meet(self, server: str, tools: Iterable[ListedTool], named: Container[str]) -> None:
        """Approve the tools of a server that was never seen; of one that was, new tools that are `named` in its
        settings, because the user has asked for them."""
        with self._lock():
            self._refresh()
            if self._digests is None:
                return
            known = self._digests.get(server)
            asked = [t for t in tools if known is None or (t.name in named and t.name not in known)]
            if known is None or asked:
                self._write({**self._digests, server: (known or {}) | _digests(asked)})

    def approve(self, server: str, tools: Iterable[ListedTool]) -> None:
        """Approve what is said now. Raises OSError."""
        with self._lock():
            self._refresh()
            known = (self._digests or {}).get(server, {})
            self._write({**(self._digests or {}), server: known | _digests(tools)}, strict=True)

    def _write(self, digests: _Digests, *, strict: bool = False) -> None:
        self._digests = digests
        try:
            replace_file(self._path, json.dumps({"servers": digests}, indent=1, sort_keys=True).encode())
            self._stamp = self._stat()
        except OSError as error:
            if strict:
                raise
            log.warning("what MCP servers offer is approved until the end only: %s", error)

    def _refresh(self) -> None:
        stamp = self._stat()
        if stamp is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._digests = _check_form(json.loads(self._path.read_bytes()))
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.warning(
                "no MCP tool is used until it is approved again: %s cannot be read (%s)", self._path, error
            )
            self._digests = None

    def _stat(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def _lock(self) -> ExitStack:
        """Others may be writing: none of what was approved may get lost."""
        held = ExitStack()
        try:
            private_folder(self._path.parent)
            held.enter_context(locked(self._path.with_suffix(".lock")))
        except OSError as error:
            log.debug("no lock for %s: %s", self._path, error)
        return held


def _standing(pinned: str | None, tool: ListedTool) -> Standing:
    if pinned is None:
        return Standing.NEW
    return Standing.APPROVED if pinned == tool.digest else Standing.CHANGED


def _digests(tools: Iterable[ListedTool]) -> dict[str, str]:
    return {tool.name: tool.digest for tool in tools}


def _check_form(content: Mapping[str, object]) -> _Digests:
    servers = content["servers"]
    if not isinstance(servers, dict) or not all(isinstance(tools, dict) for tools in servers.values()):
        raise ValueError("it has another form")
    return servers
