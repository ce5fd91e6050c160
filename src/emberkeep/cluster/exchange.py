"""One request to an application in this process: what it is sent, what it answers, and that the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from emberkeep.cluster.asgi import App, Message, Scope
from emberkeep.cluster.keys import Asked

_LEAVING_S = 10.0
"""For an application to notice that its client has left: longer than an engine's step."""


async def answers(app: App, asked: Asked) -> AsyncGenerator[list[Message], None]:
    """The messages of the application's answer, as they come; those that have piled up come together.

    Whoever stops reading has left: the application is told, and has ended when this is closed.
    """
    exchange = _Exchange(asked.body)
    running = asyncio.create_task(_run(app, asked, exchange))
    try:
        while batch := await exchange.take():
            yield batch
        await running
    finally:
        exchange.leave()
        await asyncio.wait([running], timeout=_LEAVING_S)
        running.cancel()


async def _run(app: App, asked: Asked, exchange: _Exchange) -> None:
    try:
        await app(_scope(asked), exchange.receive, exchange.send)
    finally:
        exchange.end()


def _scope(asked: Asked) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.raw_path,
        "query_string": asked.query,
        "headers": list(asked.headers),
        "client": None,
        "server": asked.server,
    }


class _Exchange:
    """Belongs to the event loop."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._messages: list[Message] = []
        self._changed = asyncio.Event()
        self._has_left = asyncio.Event()
        self._has_ended = False

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self._messages.append(message)
        self._changed.set()

    async def take(self) -> list[Message]:
        """Waits for something; empty at the end."""
        await self._changed.wait()
        batch, self._messages = self._messages, []
        if not self._has_ended:
            self._changed.clear()
        return batch

    def leave(self) -> None:
        self._has_left.set()

    def end(self) -> None:
        self._has_ended = True
        self._changed.set()
