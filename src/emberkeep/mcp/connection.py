"""One life of a connection: from the start of a server to its end, whoever brings that about."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from typing import Any

import anyio
import mcp.types as wire
from mcp import Client, MCPError
from mcp.client.subscriptions import SubscriptionLost
from mcp.types.version import MODERN_PROTOCOL_VERSIONS

from emberkeep.config import McpServer
from emberkeep.errors import EmberkeepError, ToolFailed
from emberkeep.mcp.address import address
from emberkeep.mcp.listing import Listing, read_listing
from emberkeep.mcp.program import program
from emberkeep.mcp.text import cleaned, shortened
from emberkeep.mcp.variables import expanded, masked

log = logging.getLogger("emberkeep.mcp")

_PAUSE_S = 1.0
"""Between two readings of what a server offers, however often it says that this has changed."""
_CLOSE_S = 10.0
_REASON_CHARS = 500

_NO_SESSION = (400, 404, 410)
"""What servers answer that were started anew and do not know us."""
_OF_THE_CALL = (wire.INVALID_PARAMS, wire.METHOD_NOT_FOUND)
_CHANGES = (wire.ToolListChangedNotification, wire.PromptListChangedNotification)


class Connection:
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
        """What is running on it fails. Returns at once."""
        if not self.reason:
            self.reason = shortened(masked(cleaned(reason), self._secrets), _REASON_CHARS)
            self.ended_at = self._clock()
            self._scope.cancel()

    def ends_with(self, error: MCPError) -> bool:
        """Whether it is over, which the SDK tells only those who ask for something."""
        is_forgotten = self._status in _NO_SESSION and error.code not in _OF_THE_CALL
        if error.code == wire.CONNECTION_CLOSED or is_forgotten:
            self.end(self._explained(error))
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
            self.end(self._explained(error))
            log.debug("%s: %s", self.server.name, self.reason)
        finally:
            self.end("the event loop is closing")
            if not self._ready.done():
                self._ready.set_exception(ToolFailed(f"{self.server.name} cannot be used: {self.reason}."))
                self._ready.exception()  # nobody may be waiting

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
        values = expanded(self.server.headers if self.server.url else self.server.env)
        self._secrets = list(values.values())
        if self.server.url:
            return address(self.server, values, self._see)
        return program(self.server, values, self.end)

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
            log.debug("%s: changes of its tools are not heard of: %s", self.server.name, error)

    def _explained(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, FileNotFoundError):
            return f"there is no {error.filename}"
        if isinstance(error, MCPError) and self._status >= 400:
            return f"it answered with HTTP status {self._status}"
        if isinstance(error, EmberkeepError):
            return str(error).rstrip(".")
        if isinstance(error, MCPError):
            return error.message
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
