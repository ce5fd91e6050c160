"""TensorRT-LLM's provider: answers through the real SDK, and its events are read meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from emberkeep.backend.remote.base import RemoteAbout
from emberkeep.backend.remote.trtllm import TrtllmProvider
from emberkeep.errors import RemoteDown
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Message, ToolCall
from helpers.events import text_of
from helpers.vendors.driving import drive, events_of
from helpers.vendors.loopback import Reply, Stream
from helpers.vendors.openai_server import answer, call, failed
from helpers.vendors.trtllm_server import Told, TrtllmServer, conversation, removed, stored, used


def with_provider(
    use: Callable[[TrtllmProvider, TrtllmServer], Awaitable[Any]],
    *replies: Reply | Stream,
    path: str = "",
    key: str | None = None,
    has_events: bool = True,
) -> Any:
    def open_at(url: str) -> Any:
        return TrtllmProvider(RemoteModel("trt", "trtllm", "tiny", f"{url}{path}"), key)

    return drive(lambda: TrtllmServer(*replies, has_events=has_events, key=key), open_at, use)


@pytest.mark.parametrize("path", ["", "/", "/v1"])
def test_answers_come_from_its_openai_endpoint_and_events_from_beside_it(path: str) -> None:
    told = Told()

    async def use(provider: TrtllmProvider, server: TrtllmServer) -> str:
        provider.on_removed = told
        events = await events_of(provider, conversation("a"))
        server.happened += [stored(None, 1, 2, 3), removed(3)]
        assert await provider.poll()
        return text_of(events)

    assert with_provider(use, used(64, 32, "Good day"), path=path, key="k") == "Good day"
    assert told.places == [[2]]
    assert told.calls[0][0].messages[-1] == Message("assistant", "Good day")


def test_an_answer_with_calls_is_put_together_again() -> None:
    told = Told()
    pieces = [call(0, "c1", "weather", '{"place"'), call(0, arguments=': "Lyon"}'), call(1, "c2", "clock", "{}")]
    usage = {"prompt_tokens": 64, "completion_tokens": 32, "total_tokens": 96}

    async def use(provider: TrtllmProvider, server: TrtllmServer) -> None:
        provider.on_removed = told
        await events_of(provider, conversation("a"))
        server.happened += [stored(None, 1, 2, 3), removed(3)]
        await provider.poll()

    with_provider(use, answer(*pieces, finish="tool_calls", usage=usage))

    calls = (ToolCall("c1", "weather", '{"place": "Lyon"}'), ToolCall("c2", "clock", "{}"))
    assert told.calls[0][0].messages[-1] == Message("assistant", tool_calls=calls)


def test_it_looks_by_itself_from_the_first_answer_until_it_is_closed() -> None:
    async def use(provider: TrtllmProvider, server: TrtllmServer) -> Any:
        assert not server.was_polled.is_set()
        await events_of(provider, conversation("a"))
        await server.was_polled.wait()
        return provider

    provider = with_provider(use)
    assert provider._poller.done()


def test_a_server_that_tells_nothing_is_asked_no_more_and_answers_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "emberkeep.remote")

    async def use(provider: TrtllmProvider, server: TrtllmServer) -> list[str]:
        first = text_of(await events_of(provider, conversation("a")))
        assert provider._poller is not None
        await asyncio.wait_for(provider._poller, 5)
        second = text_of(await events_of(provider, conversation("a")))
        return [first, second, *(asked.path for asked in server.asked)]

    seen = with_provider(use, has_events=False)

    assert seen[:2] == ["Hello!", "Hello!"]
    assert seen.count("/kv_cache_events") == 1
    assert caplog.text.count("tells nothing of its KV cache") == 1


def test_a_hook_that_fails_does_not_stop_the_looking(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    async def use(provider: TrtllmProvider, server: TrtllmServer) -> bool:
        provider.on_removed = fail
        await events_of(provider, conversation("a"))
        server.happened += [stored(None, 1, 2, 3), removed(3)]
        return await provider.poll() and await provider.poll()

    assert with_provider(use, used(64, 32))
    assert "could not be archived" in caplog.text


def test_a_failed_answer_is_told_as_such_and_about_works() -> None:
    async def use(provider: TrtllmProvider, _: TrtllmServer) -> RemoteAbout:
        with pytest.raises(RemoteDown):
            await events_of(provider, conversation("a"))
        return await provider.about()

    assert with_provider(use, failed(503, "overloaded", "busy")) == RemoteAbout(("tiny",), None)
