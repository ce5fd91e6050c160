"""Emberkeep as an MCP server: its tools and its memory, for other programs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, NoReturn
from uuid import uuid4

import mcp.types as wire
from mcp import MCPError
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings

from emberkeep.errors import MemoryFailed, NoSuchEntry
from emberkeep.mcp.memory import TEMPLATE, TEXTS, read
from emberkeep.memory.memory import Memory
from emberkeep.signals import ending_signals
from emberkeep.tools.running import in_thread
from emberkeep.tools.toolbox import ToolBox
from emberkeep.types import Caller, ToolCall

HTTP_PATH = "/mcp"

_ABOUT = "Tools of this machine, and what Emberkeep remembers: facts, saved conversations, archived turns."
_JSON = "application/json"

Context = ServerRequestContext[Any]


class McpHost:
    """Belongs to the event loop."""

    def __init__(self, toolbox: ToolBox, memory: Memory | None, owner: str) -> None:
        """`owner`: whose memory it is. Both are the caller's to close."""
        logging.getLogger("mcp.server").setLevel(logging.WARNING)
        self._toolbox = toolbox
        self._memory = memory
        self._caller = Caller(owner)
        self._leaving: asyncio.Task[NoReturn] | None = None
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
            loop.add_signal_handler(number, self._hurry, 128 + number)
        async with stdio_server() as (incoming, outgoing):
            await self._server.run(incoming, outgoing, self._server.create_initialization_options())

    def _hurry(self, status: int) -> None:
        self._leaving = asyncio.create_task(self._leave(status))

    async def _leave(self, status: int) -> NoReturn:
        """The only way out while a thread waits for input. What is remembered is on disk already."""
        try:
            await self._toolbox.close()
        finally:
            os._exit(status)

    def http_app(self) -> Callable[..., Any]:
        """An ASGI application with a lifespan. Who may talk to it is for others to check."""
        off = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        return self._server.streamable_http_app(streamable_http_path=HTTP_PATH, transport_security=off)

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
        dangerous = {function.name for function in self._toolbox.functions() if function.is_dangerous}
        tools = [
            wire.Tool(
                name=tool.name,
                description=tool.description,
                input_schema=dict(tool.parameters),
                annotations=wire.ToolAnnotations(destructive_hint=tool.name in dangerous),
            )
            for tool in self._toolbox.definitions
        ]
        return wire.ListToolsResult(tools=tools)

    async def _call_tool(self, context: Context, params: wire.CallToolRequestParams) -> wire.CallToolResult:
        call = ToolCall(uuid4().hex, params.name, json.dumps(params.arguments or {}))
        outcome = await self._toolbox.run(call, self._caller)
        return wire.CallToolResult(
            content=[wire.TextContent(type="text", text=outcome.text)], is_error=outcome.failed
        )

    async def _list_resources(
        self, context: Context, params: wire.PaginatedRequestParams | None
    ) -> wire.ListResourcesResult:
        return wire.ListResourcesResult(
            resources=[
                wire.Resource(uri=uri, name=uri.removeprefix("memory://"), description=text, mime_type=_JSON)
                for uri, text in TEXTS.items()
            ]
        )

    async def _list_templates(
        self, context: Context, params: wire.PaginatedRequestParams | None
    ) -> wire.ListResourceTemplatesResult:
        uri, text = TEMPLATE
        template = wire.ResourceTemplate(uri_template=uri, name="conversation", description=text, mime_type=_JSON)
        return wire.ListResourceTemplatesResult(resource_templates=[template])

    async def _read_resource(
        self, context: Context, params: wire.ReadResourceRequestParams
    ) -> wire.ReadResourceResult:
        assert self._memory is not None
        memory = self._memory
        try:
            found = await in_thread(lambda: read(memory, self._caller.owner, params.uri))
        except NoSuchEntry as error:
            raise MCPError(wire.INVALID_PARAMS, str(error)) from error
        except MemoryFailed as error:
            raise MCPError(wire.INTERNAL_ERROR, str(error)) from error
        text = json.dumps(found, ensure_ascii=False, indent=1)
        return wire.ReadResourceResult(
            contents=[wire.TextResourceContents(uri=params.uri, mime_type=_JSON, text=text)]
        )
