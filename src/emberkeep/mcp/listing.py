"""What a server offers: its tools and prompts, as many and as long as can be borne."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mcp.types as wire
from mcp import Client

from emberkeep.config import McpServer
from emberkeep.mcp.text import cleaned, cleaned_json, shortened
from emberkeep.types import Tool

log = logging.getLogger("emberkeep.mcp")

_TOOLS = 256
_PROMPTS = 64
_SEEN = 10_000
"""Of a list that goes on and on, so many are looked at."""
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
    """It says so; nobody has to believe it."""
    digest: str
    """Of all that a person approves by using it, as the server said it."""


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
    """How the server calls itself."""
    tools: tuple[ListedTool, ...] = ()
    prompts: tuple[McpPrompt, ...] = ()


async def read_listing(client: Client, server: McpServer) -> Listing:
    """Raises what the SDK raises."""
    can = client.server_capabilities
    tools = [tool async for tool in _pages(client.list_tools, lambda page: page.tools)] if can.tools else []
    prompts = [p async for p in _pages(client.list_prompts, lambda page: page.prompts)] if can.prompts else []
    info = client.server_info
    return Listing(
        shortened(cleaned(f"{info.name} {info.version}".strip()), 80) if info else "",
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
    told = {"uri": uri, "name": found.name, "description": found.description, "type": found.mime_type}
    return {key: shortened(cleaned(value), 500) for key, value in told.items() if value}


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
    description = shortened(cleaned(tool.description or ""), _DESCRIPTION_CHARS)
    definition = Tool(name, description, {"type": "object", **cleaned_json(tool.input_schema)})
    # With the hint: who approves a tool is shown it.
    approved = [tool.name, tool.description or "", tool.input_schema, is_read_only]
    digest = hashlib.sha256(json.dumps(approved, sort_keys=True).encode()).hexdigest()
    return ListedTool(tool.name, definition, is_read_only, digest)


def unlisted(server: str, name: str) -> ListedTool:
    """One that the server has not told of."""
    return ListedTool(name, Tool(_names(server, [name])[0]), False, "")


def _prompts(server: McpServer, listed: Sequence[wire.Prompt]) -> tuple[McpPrompt, ...]:
    names = _names(server.name, [prompt.name for prompt in listed])
    return tuple(
        McpPrompt(
            name,
            server.name,
            prompt.name,
            shortened(cleaned(prompt.description or ""), 500),
            tuple(
                PromptArgument(
                    cleaned(one.name), shortened(cleaned(one.description or ""), 500), bool(one.required)
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
