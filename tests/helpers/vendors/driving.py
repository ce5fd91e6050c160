"""A provider from its first question to `close`, beside a server in the same event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from emberkeep.backend.remote.base import Provider, RemoteAbout
from emberkeep.types.events import Event
from emberkeep.types.request import Message, Request, ToolCall

WAIT_S = 60.0
HELLO = Request(messages=(Message("user", "Hello?"),))
CALLED = Message(
    "assistant", reasoning="Lyon, then.", tool_calls=(ToolCall("c1", "weather", '{"place": "Lyon"}'),)
)
RAIN = Message("tool", "rain", tool_call_id="c1")
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


# ── what to do with both ──


def asking(*requests: Request) -> Callable[[Provider, Any], Awaitable[list[Event]]]:
    """The events of the last of them."""

    async def use(provider: Provider, _: Any) -> list[Event]:
        for request in requests:
            events = await events_of(provider, request)
        return events

    return use


def sending(request: Request) -> Callable[[Provider, Any], Awaitable[Any]]:
    """What reaches the server."""

    async def use(provider: Provider, server: Any) -> Any:
        await events_of(provider, request)
        return [asked for asked in server.asked if asked.body is not None][-1]

    return use


async def leave_early(provider: Provider, server: Any) -> Event:
    """The first event of an answer that does not end; returns when the server has noticed
    that the client is gone."""
    async with aclosing(provider.answer(HELLO)) as events:
        first = await anext(events)
        assert not server.was_left.is_set()
    await server.was_left.wait()
    return first


async def ask_when_it_is_gone(provider: Provider, server: Any) -> None:
    await server.__aexit__(None, None, None)
    await events_of(provider, HELLO)


async def about(provider: Provider, _: Any) -> RemoteAbout:
    return await provider.about()
