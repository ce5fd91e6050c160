"""All MCP servers of the settings: their tools, resources and prompts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

from emberkeep.backend.server_tools import ToolServer
from emberkeep.config.settings import Config
from emberkeep.config.tables import McpServer
from emberkeep.errors import NoSuchEntry, ToolFailed
from emberkeep.mcp.answers import (
    ListedTool,
    McpPrompt,
    Pins,
    Standing,
    prompt_message,
    read_resources,
    resource_text,
)
from emberkeep.mcp.link import McpLink
from emberkeep.tools.function import ToolFunction, tool, tools_of
from emberkeep.tools.toolbox import ALL, ToolPolicy
from emberkeep.types.events import Caller
from emberkeep.types.request import Json, Message, Tool
from emberkeep.values import dataclass

GROUP = "mcp"

_RESOURCES = 200
_PATIENCE_S = 15.0
"""A program may be downloaded before it starts; a chat does not wait for that."""


class ServerStatus(StrEnum):
    OFF = "off"  # it was not asked for anything yet
    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"  # the next call starts it again


@dataclass(frozen=True, slots=True)
class ServerState:
    name: str
    status: ServerStatus
    reason: str
    """Why it has stopped."""
    about: str
    """The server's own name and version."""
    tools: Mapping[str, Standing]
    """By the names that the server calls them by."""
    prompts: int

    def as_tools(self) -> ToolServer:
        unapproved = tuple(name for name, standing in self.tools.items() if standing is not Standing.APPROVED)
        return ToolServer(self.name, self.status, self.reason, self.about, len(self.tools), unapproved)


def open_clients(config: Config) -> McpClients:
    """All servers of the settings. Nothing is started."""
    return McpClients(config.mcp, config.data_dir / "mcp-pins.json", disabled=config.disable_tools)


class McpClients:
    """A `ToolSource`. Belongs to the event loop. Close it: servers that are programs live until then."""

    def __init__(
        self,
        servers: Sequence[McpServer],
        pins: Path,
        *,
        disabled: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pins`: the file that knows which definitions were approved. `disabled`: as in `ToolPolicy`."""
        _quiet_sdk()
        shared = Pins(pins)
        self._links = {server.name: McpLink(server, shared, clock) for server in servers}
        self._own = _McpTools(self._links, ToolPolicy((ALL,), disabled)).functions() if servers else []

    async def start(self) -> None:
        """One that takes long goes on starting, and its tools come later. Never raises."""
        await asyncio.gather(*(link.start(_PATIENCE_S) for link in self._links.values()))

    async def start_wholly(self, name: str | None = None) -> None:
        """All, or one; returns when each can be used or cannot. Raises NoSuchEntry."""
        links = self._links.values() if name is None else [self._link(name)]
        await asyncio.gather(*(link.start() for link in links))

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links.values()), return_exceptions=True)

    def functions(self) -> list[ToolFunction]:
        """Those that are approved, of every server that has been reached, and those to reach the rest."""
        found = list(self._own)
        for link in self._links.values():
            standings = link.standings()
            approved = (one for one in link.listing.tools if standings[one.name] is Standing.APPROVED)
            found.extend(_function(link, one) for one in approved)
        return found

    def withdrawn(self, name: str) -> str | None:
        listed = ((link, one) for link in self._links.values() for one in link.listing.tools)
        return next((link.refusal(one) for link, one in listed if one.definition.name == name), None)

    def prompts(self) -> list[McpPrompt]:
        return [prompt for link in self._links.values() for prompt in link.listing.prompts]

    async def get_prompt(self, name: str, arguments: Mapping[str, str]) -> Message:
        """A prompt, by the name that `prompts` gives it, filled. Raises NoSuchEntry, ToolFailed."""
        prompt = next((prompt for prompt in self.prompts() if prompt.name == name), None)
        if prompt is None:
            raise NoSuchEntry(f"There is no prompt {name}: `emberkeep mcp show SERVER` lists them.")
        ask = self._links[prompt.server].ask
        return prompt_message(
            await ask(lambda client: client.session.get_prompt(prompt.original, dict(arguments)))
        )

    def states(self) -> list[ServerState]:
        return [_state(link) for link in self._links.values()]

    def servers(self) -> list[ToolServer]:
        return [state.as_tools() for state in self.states()]

    def tools(self, name: str) -> list[ListedTool]:
        """What one server offers, approved or not. Raises NoSuchEntry."""
        return list(self._link(name).listing.tools)

    def trusts(self, name: str, tool: str) -> bool:
        """Whether one server's tool runs without asking. Raises NoSuchEntry."""
        return self._link(name).server.trusts(tool)

    async def resources(self, name: str) -> list[dict[str, str]]:
        """Raises NoSuchEntry, ToolFailed."""
        return await self._link(name).ask(lambda client: read_resources(client, _RESOURCES))

    def approve(self, name: str) -> None:
        """Use all tools of a server as they are now. Raises NoSuchEntry, OSError."""
        self._link(name).approve()

    def _link(self, name: str) -> McpLink:
        if name not in self._links:
            known = ", ".join(self._links) or "none"
            raise NoSuchEntry(f"There is no MCP server {name!r} in the settings: there is {known}.")
        return self._links[name]


ServerName = Annotated[str, Field(description="Name of the MCP server.")]


class _McpTools:
    """What can be done with every server. Whether a call has to be allowed is up to the server that it goes to."""

    def __init__(self, links: Mapping[str, McpLink], policy: ToolPolicy) -> None:
        self._links = links
        self._policy = policy

    def functions(self) -> list[ToolFunction]:
        made = [replace(function, is_dangerous=not self._is_of_use(function)) for function in tools_of(self)]
        return [replace(function, acts_as=partial(self._target, function)) for function in made]

    def _is_of_use(self, function: ToolFunction) -> bool:
        """Where no user can be asked: there is a call of it that goes to a server that is trusted."""
        trusts = [link.server.trusted for link in self._links.values()]
        return any(trusts) if function.name == _CALL else True in trusts

    def _target(self, function: ToolFunction, arguments: Mapping[str, Json]) -> ToolFunction:
        name, tool = str(arguments.get("server") or ""), str(arguments.get("tool"))
        links = [link for link in self._links.values() if name in ("", link.server.name)]
        if function.name != _CALL:
            return _for_servers(function, links, name)
        if not (name and links):
            return replace(function, is_dangerous=False)  # it can only fail
        # The tool itself: a user who allows or forbids it by one name does so by the other.
        return _function(links[0], links[0].listed_tool(tool))

    @tool(group=GROUP)
    async def mcp_list_resources(
        self, server: Annotated[str, Field(description="Name of the MCP server; empty: all of them.")] = ""
    ) -> Json:
        """List what MCP servers have to read: files, tables, pages, each with its URI."""
        links = [self._link(server)] if server else list(self._links.values())
        found = await asyncio.gather(*(_resources(link) for link in links))
        return dict(zip((link.server.name for link in links), found, strict=True))

    @tool(group=GROUP)
    async def mcp_read_resource(
        self, server: ServerName, uri: Annotated[str, Field(description="As mcp_list_resources gives it.")]
    ) -> str:
        """Read something that an MCP server has."""
        link = self._link(server)
        return resource_text(await link.ask(lambda client: client.session.read_resource(uri)))

    @tool(group=GROUP)
    async def mcp_call_tool(
        self,
        server: ServerName,
        tool: Annotated[str, Field(description="As the server calls it.")],
        arguments: Annotated[dict[str, Json], Field(description="What the tool takes.")],
    ) -> str:
        """Call a tool of an MCP server by its own name."""
        link = self._link(server)
        listed = await link.find(tool)
        # A model that may not use one must not get at it by its other name.
        if not self._policy.takes(_function(link, listed)):
            raise ToolFailed(f"{listed.definition.name} is disabled: use another tool.")
        return await link.call(tool, arguments)

    def _link(self, name: str) -> McpLink:
        if name not in self._links:
            raise ToolFailed(f"There is no MCP server {name!r}: use {', '.join(self._links)}.")
        return self._links[name]


_CALL = _McpTools.mcp_call_tool.__name__


def _for_servers(function: ToolFunction, links: Sequence[McpLink], server: str) -> ToolFunction:
    """`function` for these servers alone: what is read tells them what the model is after."""
    return replace(
        function,
        # In characters that no tool's name has.
        definition=Tool(f"{server}__({function.name})" if server else function.name),
        is_dangerous=not all(link.server.trusted is True for link in links),
        allowed_by=_trust_of(links[0].server) if server and links else "",
    )


async def _resources(link: McpLink) -> Json:
    """One server that fails must not hide the others."""
    try:
        return await link.ask(lambda client: read_resources(client, _RESOURCES))
    except ToolFailed as error:
        return str(error)


def _function(link: McpLink, listed: ListedTool) -> ToolFunction:
    async def run(arguments: Mapping[str, Json], caller: Caller) -> Json:
        return await link.call(listed.name, arguments)

    return ToolFunction(
        listed.definition,
        GROUP,
        run,
        # Whatever it says of itself: a server that means harm says that it only reads.
        is_dangerous=not link.server.trusts(listed.name),
        # It limits itself; this is for a new start and the call.
        timeout_s=2 * link.server.timeout_s + 5,
        allowed_by=_trust_of(link.server),
        only_reads=listed.is_read_only,
    )


def _trust_of(server: McpServer) -> str:
    return f"trusted = true in [mcp.servers.{server.name}]"


def _state(link: McpLink) -> ServerState:
    session = link.session
    if session is None:
        status = ServerStatus.OFF
    elif session.is_over:
        status = ServerStatus.STOPPED
    else:
        status = ServerStatus.READY if session.is_ready else ServerStatus.STARTING
    reason = session.reason if session is not None else ""
    listing = link.listing
    return ServerState(link.server.name, status, reason, listing.about, link.standings(), len(listing.prompts))


def _quiet_sdk() -> None:
    """Its tracebacks about servers tell nothing new: what matters is said in our own log."""
    for name in ("mcp.client", "mcp.shared", "httpx2"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
