"""A server that can be asked at any time: it is started when it is needed, and again when it has ended."""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import mcp.types as wire
from mcp import Client, MCPError

from emberkeep.config import McpServer
from emberkeep.errors import ToolFailed
from emberkeep.mcp.connection import Connection
from emberkeep.mcp.content import result_text
from emberkeep.mcp.listing import ListedTool, Listing, unlisted
from emberkeep.mcp.pins import Pins, Standing
from emberkeep.mcp.text import cleaned, shortened
from emberkeep.types import Json

log = logging.getLogger("emberkeep.mcp")

T = TypeVar("T")

_LONGEST_WAIT_S = 60.0
_TIMEOUTS = 2
"""A server that did not answer so often in a row is started anew."""


class Link:
    """Belongs to the event loop."""

    def __init__(self, server: McpServer, pins: Pins, clock: Callable[[], float] = time.monotonic) -> None:
        self.server = server
        self.listing = Listing()
        """What it offered when it was last asked."""
        self.connection: Connection | None = None
        self._pins = pins
        self._clock = clock
        self._failures = 0
        self._timeouts = 0
        self._is_closed = False

    async def start(self, patience_s: float | None = None) -> None:
        """Returns when it can be asked, or will not answer soon: it goes on starting then. Never raises."""
        try:
            await asyncio.wait_for(self._connected(), patience_s)
        except TimeoutError:
            log.warning("%s is still starting: its tools come later", self.server.name)
        except ToolFailed as error:
            log.warning("%s", error)

    async def close(self) -> None:
        """For good."""
        self._is_closed = True
        if self.connection is not None:
            await self.connection.close()

    def standings(self) -> dict[str, Standing]:
        """Of the tools that it offers."""
        return self._pins.standings(self.server.name, self.listing.tools)

    def approve(self) -> None:
        """All tools as they are now. Raises OSError."""
        self._pins.approve(self.server.name, self.listing.tools)

    def listed(self, name: str) -> ListedTool:
        """As it was last offered; one that was not is known by its name alone."""
        return next((tool for tool in self.listing.tools if tool.name == name), unlisted(self.server.name, name))

    async def find(self, name: str) -> ListedTool:
        """One that may be called. Raises ToolFailed."""
        # What it offers may be another thing after a new start.
        await self._connected()
        tool = self._find(name)
        self._check_approved(tool)
        return tool

    async def call(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Raises ToolFailed."""
        await self.find(name)
        params = wire.CallToolRequestParams(name=name, arguments=dict(arguments))
        # Not the session's own way: it would check results by the server's schema, whose patterns may never end.
        return result_text(
            await self.ask(
                lambda client: client.session.send_request(
                    wire.CallToolRequest(params=params), wire.CallToolResult
                )
            )
        )

    async def ask(self, send: Callable[[Client], Awaitable[T]]) -> T:
        """What the server answers, within its time. Cancelling tells the server. Raises ToolFailed."""
        connection = await self._connected()
        name, limit = self.server.name, self.server.timeout_s
        try:
            async with asyncio.timeout(limit):
                answer = await send(await connection.client())
        except TimeoutError as error:
            self._count_timeout(connection)
            raise ToolFailed(f"{name} did not answer within {limit:g} s.") from error
        except MCPError as error:
            if connection.ends_with(error):
                raise ToolFailed(
                    f"{name} went away before it answered ({connection.reason}): call again, it is started anew."
                ) from error
            raise ToolFailed(f"{name}: {shortened(cleaned(error.message), 2000)}") from error
        except (ValueError, RuntimeError) as error:
            raise ToolFailed(f"{name} gave an answer that cannot be understood.") from error
        connection.has_answered = True
        self._timeouts = 0
        return answer

    async def _connected(self) -> Connection:
        """Raises ToolFailed."""
        if self._is_closed:
            raise ToolFailed(f"{self.server.name} is closed: Emberkeep is about to end.")
        if self.connection is None or self.connection.is_over:
            self._check_patience(self.connection)
            self.connection = Connection(self.server, self._list, self._clock)
        await self.connection.client()
        return self.connection

    def _check_patience(self, last: Connection | None) -> None:
        """One that ends again and again is not started again at once."""
        if last is None or last.ended_at is None:
            return
        failures = 0 if last.has_answered else self._failures + 1
        wait = min(2.0 ** (failures - 1), _LONGEST_WAIT_S) if failures else 0.0
        left = last.ended_at + wait - self._clock()
        if left > 0:
            raise ToolFailed(
                f"{self.server.name} has ended ({last.reason}): it is started again if called in {left:.0f} s."
            )
        self._failures = failures

    def _list(self, listing: Listing) -> None:
        self.listing = listing
        self._pins.meet(self.server.name, listing.tools, self.server.tools)
        waiting = [name for name, standing in self.standings().items() if standing is not Standing.APPROVED]
        if waiting:
            log.warning("%s: new or changed is %s: %s", self.server.name, ", ".join(waiting[:10]), self._way_out)

    @property
    def _way_out(self) -> str:
        return f"`emberkeep mcp approve {self.server.name}` shows it and asks."

    def _find(self, name: str) -> ListedTool:
        found = next((tool for tool in self.listing.tools if tool.name == name), None)
        if found is None:
            names = [tool.name for tool in self.listing.tools]
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'none'}."
            raise ToolFailed(f"{self.server.name} has no tool {name!r}: {hint}")
        return found

    def refusal(self, tool: ListedTool) -> str | None:
        """Why one of its tools may not be called."""
        match self.standings()[tool.name]:
            case Standing.CHANGED:
                return f"{tool.definition.name} changed since you approved it: {self._way_out}"
            case Standing.NEW:
                return f"{tool.definition.name} is new and not approved: {self._way_out}"
        return None

    def _check_approved(self, tool: ListedTool) -> None:
        if (reason := self.refusal(tool)) is not None:
            raise ToolFailed(reason)

    def _count_timeout(self, connection: Connection) -> None:
        self._timeouts += 1
        if self._timeouts >= _TIMEOUTS:
            self._timeouts = 0
            connection.end("it no longer answered")
