"""A provider from its first question to `close`, beside a server in the same event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar, cast

from emberkeep.backend.remote.base import Provider
from emberkeep.types import Event, Request

WAIT_S = 10.0
P = TypeVar("P", bound=Provider)


class Serving(Protocol):
    @property
    def url(self) -> str: ...

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *_: Any) -> None: ...


def drive(
    make_server: Callable[[], Serving], open_at: Callable[[str], P], use: Callable[[P, Any], Awaitable[Any]]
) -> Any:
    """`use(provider, server)` with both running."""

    async def run() -> Any:
        async with make_server() as server:
            provider = open_at(server.url)
            try:
                return await asyncio.wait_for(use(provider, server), WAIT_S)
            finally:
                await provider.close()

    return asyncio.run(run())


async def events_of(provider: Provider, request: Request) -> list[Event]:
    return [event async for event in provider.answer(request)]


async def leave_early(provider: Provider, request: Request, was_left: asyncio.Event) -> Event:
    """The first event; returns when the server has noticed that the client is gone."""
    async with aclosing(cast(AsyncGenerator[Event, None], provider.answer(request))) as events:
        first = await anext(events)
        assert not was_left.is_set()
    await was_left.wait()
    return first
