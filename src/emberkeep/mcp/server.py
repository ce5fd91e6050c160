"""Emberkeep as an MCP server: its tools and its memory, for other programs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, NoReturn
from urllib.parse import quote, unquote
from uuid import uuid4

import mcp.types as wire
from mcp import MCPError
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings

from emberkeep.backend.tool_loop import log_outcome
from emberkeep.errors import MemoryFailed, NoSuchEntry
from emberkeep.memory.memory import Memory
from emberkeep.memory.records import message_json
from emberkeep.signals import ending_signals
from emberkeep.tools.function import ToolFunction, in_thread
from emberkeep.tools.toolbox import ToolBox
from emberkeep.types.events import Caller
from emberkeep.types.memory import SavedConversation
from emberkeep.types.request import Json, ToolCall

HTTP_PATH = "/mcp"
IDLE_S = 30 * 60.0

_ABOUT = "Tools of this machine, and what Emberkeep remembers: facts, saved conversations, archived turns."
_JSON = "application/json"

_CONVERSATIONS = "memory://conversations"

_RESOURCES = {
    "memory://facts": "Everything that was told to be remembered.",
    _CONVERSATIONS: "The latest saved conversations, each with the URI of its messages.",
    "memory://stats": "How much is remembered.",
}
_TEMPLATE = (f"{_CONVERSATIONS}/{{id}}", "One saved conversation with its messages.")

Context = ServerRequestContext[Any]


class McpHost:
    """Belongs to the event loop."""

    def __init__(self, toolbox: ToolBox, memory: Memory | None, owner: str) -> None:
        """`owner`: whose memory it is. Both are the caller's to close."""
        logging.getLogger("mcp.server").setLevel(logging.WARNING)
        self._toolbox = toolbox
        self._memory = memory
        self._caller = Caller(owner)
        self._ending: asyncio.Task[NoReturn] | None = None
        has_memory = memory is not None
        self._server: Server[Any] = Server(
            "emberkeep",
            version=version("emberkeep"),
            instructions=_ABOUT,
            lifespan=self._lifespan,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources if has_memory else None,
            on_list_resource_templates=self._list_templates if has_memory else None,
            on_read_resource=self._read_resource if has_memory else None,
        )

    def serve_stdio(self) -> None:
        """Blocks until the other side closes our input; a signal ends the process. Meanwhile prints go to
        stderr."""
        asyncio.run(self._serve_stdio())

    async def _serve_stdio(self) -> None:
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, self._end_soon, 128 + number)
        async with stdio_server() as (incoming, outgoing):
            await self._server.run(incoming, outgoing, self._server.create_initialization_options())

    def _end_soon(self, status: int) -> None:
        self._ending = asyncio.create_task(self._end(status))

    async def _end(self, status: int) -> NoReturn:
        """The only way out while a thread waits for input. What is remembered is on disk already."""
        try:
            await self._toolbox.close()
        finally:
            os._exit(status)

    def http_app(self, idle_s: float = IDLE_S) -> Callable[..., Any]:
        """An ASGI application with a lifespan. Who may talk to it is for others to check.

        A session without a request for `idle_s` seconds expires: many clients never close theirs.
        """
        off = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        return self._server.streamable_http_app(
            streamable_http_path=HTTP_PATH, transport_security=off, session_idle_timeout=idle_s
        )

    @asynccontextmanager
    async def _lifespan(self, server: Server[Any]) -> AsyncGenerator[None, None]:
        await self._toolbox.start()
        try:
            yield
        finally:
            await self._toolbox.close()

    async def _list_tools(
        self, context: Context, params: wire.PaginatedRequestParams | None
    ) -> wire.ListToolsResult:
        functions = {function.name: function for function in self._toolbox.functions()}
        tools = [
            wire.Tool(
                name=tool.name,
                description=tool.description,
                input_schema=dict(tool.parameters),
                annotations=_hints(functions.get(tool.name)),
            )
            for tool in self._toolbox.definitions
        ]
        return wire.ListToolsResult(tools=tools)

    async def _call_tool(self, context: Context, params: wire.CallToolRequestParams) -> wire.CallToolResult:
        if not self._toolbox.is_ours(params.name):
            raise MCPError(wire.INVALID_PARAMS, self._toolbox.explain_unknown(params.name))
        call = ToolCall(uuid4().hex, params.name, json.dumps(params.arguments or {}))
        outcome = await self._toolbox.run(call, self._caller)
        log_outcome(outcome)
        return wire.CallToolResult(
            content=[wire.TextContent(type="text", text=outcome.text)], is_error=outcome.failed
        )

    async def _list_resources(
        self, context: Context, params: wire.PaginatedRequestParams | None
    ) -> wire.ListResourcesResult:
        return wire.ListResourcesResult(
            resources=[
                wire.Resource(uri=uri, name=uri.removeprefix("memory://"), description=text, mime_type=_JSON)
                for uri, text in _RESOURCES.items()
            ]
        )

    async def _list_templates(
        self, context: Context, params: wire.PaginatedRequestParams | None
    ) -> wire.ListResourceTemplatesResult:
        uri, text = _TEMPLATE
        template = wire.ResourceTemplate(uri_template=uri, name="conversation", description=text, mime_type=_JSON)
        return wire.ListResourceTemplatesResult(resource_templates=[template])

    async def _read_resource(
        self, context: Context, params: wire.ReadResourceRequestParams
    ) -> wire.ReadResourceResult:
        assert self._memory is not None
        memory = self._memory
        try:
            found = await in_thread(lambda: _read_memory(memory, self._caller.owner, params.uri))
        except NoSuchEntry as error:
            raise MCPError(wire.INVALID_PARAMS, str(error)) from error
        except MemoryFailed as error:
            raise MCPError(wire.INTERNAL_ERROR, str(error)) from error
        text = json.dumps(found, ensure_ascii=False, indent=1)
        return wire.ReadResourceResult(
            contents=[wire.TextResourceContents(uri=params.uri, mime_type=_JSON, text=text)]
        )


def _hints(function: ToolFunction | None) -> wire.ToolAnnotations:
    """None stands for the tool that shows the rest of a long result."""
    if function is None or function.only_reads:
        return wire.ToolAnnotations(read_only_hint=True, destructive_hint=False)
    return wire.ToolAnnotations(read_only_hint=False, destructive_hint=function.is_dangerous)


def _read_memory(memory: Memory, owner: str, uri: str) -> Json:
    """Blocks. Raises NoSuchEntry, MemoryFailed."""
    match uri:
        case "memory://facts":
            return [asdict(fact) for fact in memory.facts(owner)]
        case "memory://stats":
            return memory.stats(owner)
        case "memory://conversations":
            return [_head(conversation) for conversation in memory.conversations(owner)]
    place, _, name = uri.rpartition("/")
    found = memory.conversation(owner, unquote(name)) if place == _CONVERSATIONS else None
    if found is None:
        raise NoSuchEntry(f"There is no resource {uri}: {', '.join(_RESOURCES)} are there.")
    return {**_head(found), "messages": [message_json(message) for message in found.messages]}


def _head(conversation: SavedConversation) -> dict[str, Json]:
    fields = {name: value for name, value in asdict(conversation).items() if name != "messages"}
    return {"uri": f"{_CONVERSATIONS}/{quote(conversation.id, safe='')}", **fields}
