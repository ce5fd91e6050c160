"""A server that can be asked at any time: it is started when it is needed, and again when it has ended.

An `McpLink` stays; each of its `McpSession`s is one life of the server, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from typing import Any, TypeVar

import anyio
import mcp.types as wire
from mcp import Client, MCPError
from mcp.client.subscriptions import SubscriptionLost
from mcp.types.version import MODERN_PROTOCOL_VERSIONS

from emberkeep.config.tables import McpServer
from emberkeep.errors import EmberkeepError, ToolFailed
from emberkeep.mcp.answers import ListedTool, Listing, Pins, Standing, read_listing, result_text, unlisted_tool
from emberkeep.mcp.transport import expand_variables, http_transport, mask_secrets, stdio_transport
from emberkeep.text import did_you_mean, shorten, strip_hidden
from emberkeep.types.request import Json

log = logging.getLogger("emberkeep.mcp")

T = TypeVar("T")

_LONGEST_WAIT_S = 60.0
_TIMEOUTS = 2
"""After so many timeouts in a row a server is restarted."""
_PAUSE_S = 1.0
"""Between two readings of what a server offers, however often it says that this has changed."""
_CLOSE_S = 10.0
_REASON_CHARS = 500

_NO_SESSION = (400, 404, 410)
"""What servers answer that were started anew and do not know us."""
_UNAUTHORIZED = 401
_GIVE_TOKEN = (
    "Emberkeep does not sign in to servers (OAuth); get a token there, and set "
    'headers = { Authorization = "Bearer $TOKEN" } in its table'
)
_OF_THE_CALL = (wire.INVALID_PARAMS, wire.METHOD_NOT_FOUND)
_CHANGES = (wire.ToolListChangedNotification, wire.PromptListChangedNotification)


class McpLink:
    """Belongs to the event loop."""

    def __init__(self, server: McpServer, pins: Pins, clock: Callable[[], float] = time.monotonic) -> None:
        self.server = server
        self.listing = Listing()
        """What it offered when it was last asked."""
        self.session: McpSession | None = None
        self._pins = pins
        self._clock = clock
        self._failures = 0
        self._timeouts = 0
        self._is_closed = False

    async def start(self, patience_s: float | None = None) -> None:
        """Returns when it can be asked, or will not answer soon: it goes on starting then. Never raises."""
        try:
            await asyncio.wait_for(self._connect(), patience_s)
        except TimeoutError:
            log.warning("%s is still starting: its tools come later", self.server.name)
        except ToolFailed as error:
            log.warning("%s", error)

    async def close(self) -> None:
        """For good."""
        self._is_closed = True
        if self.session is not None:
            await self.session.close()

    def standings(self) -> dict[str, Standing]:
        """How each tool that it offers stands."""
        return self._pins.standings(self.server.name, self.listing.tools)

    def approve(self) -> None:
        """All tools as they are now. Raises OSError."""
        self._pins.approve(self.server.name, self.listing.tools)

    def listed_tool(self, name: str) -> ListedTool:
        """As it was last offered; one that was not is known by its name alone."""
        return next(
            (tool for tool in self.listing.tools if tool.name == name), unlisted_tool(self.server.name, name)
        )

    async def find(self, name: str) -> ListedTool:
        """One that may be called. Raises ToolFailed."""
        # What it offers may be another thing after a new start.
        await self._connect()
        tool = self._find(name)
        if (reason := self.refusal(tool)) is not None:
            raise ToolFailed(reason)
        return tool

    async def call(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Raises ToolFailed."""
        await self.find(name)
        params = wire.CallToolRequestParams(name=name, arguments=dict(arguments))
        # Not the SDK's own way: it would check results by the server's schema, whose patterns may never end.
        return result_text(
            await self.ask(
                lambda client: client.session.send_request(
                    wire.CallToolRequest(params=params), wire.CallToolResult
                )
            )
        )

    async def ask(self, send: Callable[[Client], Awaitable[T]]) -> T:
        """What the server answers, within its time. Cancelling tells the server. Raises ToolFailed."""
        session = await self._connect()
        name, limit = self.server.name, self.server.timeout_s
        try:
            async with asyncio.timeout(limit):
                answer = await send(await session.client())
        except TimeoutError as error:
            self._count_timeout(session)
            raise ToolFailed(f"{name} did not answer within {limit:g} s.") from error
        except MCPError as error:
            if session.ends_with(error):
                raise ToolFailed(
                    f"{name} went away before it answered ({session.reason}): call again, it is started anew."
                ) from error
            raise ToolFailed(f"{name}: {shorten(strip_hidden(error.message), 2000)}") from error
        except (ValueError, RuntimeError) as error:
            raise ToolFailed(f"{name} gave an answer that cannot be understood.") from error
        session.has_answered = True
        self._timeouts = 0
        return answer

    async def _connect(self) -> McpSession:
        """Raises ToolFailed."""
        if self._is_closed:
            raise ToolFailed(f"{self.server.name} is closed: Emberkeep is about to end.")
        if self.session is None or self.session.is_over:
            self._check_patience(self.session)
            self.session = McpSession(self.server, self._list, self._clock)
        await self.session.client()
        return self.session

    def _check_patience(self, last: McpSession | None) -> None:
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
            hint = did_you_mean(name, names, f"it has {', '.join(names) or 'none'}.")
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

    def _count_timeout(self, session: McpSession) -> None:
        self._timeouts += 1
        if self._timeouts >= _TIMEOUTS:
            self._timeouts = 0
            session.end("it no longer answered")


class McpSession:
    """Lives in a task of its own, because the SDK's context managers must be entered and left in one. Belongs to
    the event loop."""

    def __init__(
        self, server: McpServer, on_listed: Callable[[Listing], None], clock: Callable[[], float]
    ) -> None:
        """Begins at once. `on_listed` is called with what the server offers, and again when that changes."""
        self.server = server
        self.reason = ""
        """Why it is over."""
        self.ended_at: float | None = None
        self.has_answered = False
        self._on_listed = on_listed
        self._clock = clock
        self._secrets: list[str] = []
        self._status = 0
        self._changed = asyncio.Event()
        self._scope = anyio.CancelScope(deadline=anyio.current_time() + server.timeout_s)
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(), name=f"mcp {server.name}")

    @property
    def is_over(self) -> bool:
        return bool(self.reason)

    @property
    def is_ready(self) -> bool:
        return self._ready.done() and not self.is_over

    async def client(self) -> Client:
        """Waits until it can be used. Raises ToolFailed."""
        return await asyncio.shield(self._ready)

    def end(self, reason: str) -> None:
        """End the session: running calls fail. Returns at once."""
        if not self.reason:
            self.reason = shorten(mask_secrets(strip_hidden(reason), self._secrets), _REASON_CHARS)
            self.ended_at = self._clock()
            self._scope.cancel()

    def ends_with(self, error: MCPError) -> bool:
        """Whether it is over, which the SDK tells only those who ask for something."""
        is_forgotten = self._status in _NO_SESSION and error.code not in _OF_THE_CALL
        if error.code == wire.CONNECTION_CLOSED or is_forgotten:
            self.end(self._explain(error))
        return self.is_over

    async def close(self) -> None:
        """Returns when the server is gone."""
        self.end("it was closed")
        await asyncio.wait((self._task,), timeout=_CLOSE_S)
        self._task.cancel()

    async def _live(self) -> None:
        try:
            with self._scope:
                await self._talk()
            self.end(f"it did not start within {self.server.timeout_s:g} s")
        except Exception as error:
            self.end(self._explain(error))
            log.debug("%s: %s", self.server.name, self.reason)
        finally:
            self.end("the event loop is closing")
            if not self._ready.done():
                self._ready.set_exception(ToolFailed(f"{self.server.name} cannot be used: {self.reason}."))
                self._ready.exception()  # or asyncio complains where no call waits

    async def _talk(self) -> None:
        client = Client(
            self._transport(),
            client_info=wire.Implementation(name="emberkeep", version=version("emberkeep")),
            message_handler=self._notice,
            cache=None,
        )
        async with client, anyio.create_task_group() as tasks:
            self._on_listed(await read_listing(client, self.server))
            self._scope.deadline = math.inf
            self._ready.set_result(client)
            tasks.start_soon(self._listen, client)
            while True:
                await self._changed.wait()
                self._changed.clear()
                self._on_listed(await read_listing(client, self.server))
                await asyncio.sleep(_PAUSE_S)

    def _transport(self) -> AbstractAsyncContextManager[Any]:
        """Raises ConfigError for variables that are not set."""
        values = expand_variables(self.server.headers if self.server.url else self.server.env)
        self._secrets = list(values.values())
        if self.server.url:
            return http_transport(self.server, values, self._see)
        return stdio_transport(self.server, values, self.end)

    def _see(self, status: int) -> None:
        self._status = status

    async def _notice(self, message: object) -> None:
        if isinstance(message, _CHANGES):
            self._changed.set()

    async def _listen(self, client: Client) -> None:
        """Servers of the newest protocol tell of changes only those who listen."""
        if client.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            return
        try:
            while True:
                async with client.listen(tools_list_changed=True, prompts_list_changed=True) as changes:
                    async for _ in changes:
                        self._changed.set()
                await asyncio.sleep(_PAUSE_S)
        except (MCPError, SubscriptionLost, TimeoutError) as error:
            log.debug("%s: changes of its tools are not noticed: %s", self.server.name, error)

    def _explain(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, FileNotFoundError):
            return f"there is no {error.filename}"
        if isinstance(error, MCPError) and self._status == _UNAUTHORIZED:
            return f"it wants a token (HTTP status {self._status}): {_GIVE_TOKEN}"
        if isinstance(error, MCPError) and self._status >= 400:
            return f"it answered with HTTP status {self._status}"
        if isinstance(error, EmberkeepError):
            return str(error).rstrip(".")
        if isinstance(error, MCPError):
            return error.message
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
