"""Batches, their order and their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from emberkeep.errors import EngineError
from emberkeep.server.stream import ClientGone, Feed
from emberkeep.types import Event, TextDelta
from helpers.scripted_server import says


async def stays() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def source(*steps: Event | Exception) -> AsyncIterator[Event]:
    for step in steps:
        if isinstance(step, Exception):
            raise step
        yield step


async def endless() -> AsyncIterator[Event]:
    while True:
        await asyncio.sleep(0)
        yield TextDelta(0, "x")


def test_what_is_already_there_comes_in_one_batch() -> None:
    async def batches() -> list[list[Any]]:
        async with Feed([source(*says("a", "b"))], stays) as feed:  # type: ignore[arg-type]
            first = await feed.take()
            assert feed.ended
            return [first, await feed.take()]

    assert asyncio.run(batches()) == [says("a", "b"), []]


def test_an_error_comes_after_the_events_before_it() -> None:
    async def taken() -> list[Event]:
        async with Feed([source(TextDelta(0, "a"), EngineError("x"))], stays) as feed:
            batch = await feed.take()
            assert not feed.ended
            with pytest.raises(EngineError):
                await feed.take()
            return batch

    assert asyncio.run(taken()) == [TextDelta(0, "a")]


def test_an_error_of_one_source_is_not_held_up_by_another() -> None:
    async def read() -> None:
        async with Feed([source(EngineError("x")), endless()], stays) as feed:
            while True:
                await feed.take()

    with pytest.raises(EngineError):
        asyncio.run(read())


def test_a_client_that_left_is_noticed_while_a_source_goes_on() -> None:
    async def leaves() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def read() -> None:
        async with Feed([endless()], leaves) as feed:
            while True:
                await feed.take()

    with pytest.raises(ClientGone):
        asyncio.run(read())
