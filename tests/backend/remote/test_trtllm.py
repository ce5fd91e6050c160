"""TensorRT-LLM's events are read beside its answers. What it shares with the other vendors is in the contract."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from emberkeep.backend.remote.trtllm import TrtllmProvider
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Message, ToolCall
from helpers.scripted_backend import text_of
from helpers.vendors.loopback import Reply, Stream
from helpers.vendors.openai_server import Told, TrtllmServer, answer, call, conversation, removed, stored, used
from helpers.vendors.wires import drive, events_of


def with_provider(
    use: Callable[[TrtllmProvider, TrtllmServer], Awaitable[Any]],
    *replies: Reply | Stream,
    path: str = "",
    has_events: bool = True,
) -> Any:
    def open_at(url: str) -> Any:
        return TrtllmProvider(RemoteModel("trt", "trtllm", "tiny", f"{url}{path}"), "k")

    return drive(lambda: TrtllmServer(*replies, has_events=has_events, key="k"), open_at, use)


async def evict(provider: TrtllmProvider, server: TrtllmServer) -> bool:
    """One turn, whose last block the server removes."""
    await events_of(provider, conversation("a"))
    server.happened += [stored(None, 1, 2, 3), removed(3)]
    return await provider.poll()


CALLS = (call(0, "c1", "weather", '{"place"'), call(0, arguments=': "Lyon"}'), call(1, "c2", "clock", "{}"))
CALLING = answer(*CALLS, finish="tool_calls", usage={"prompt_tokens": 64, "completion_tokens": 32})
CALLED = (ToolCall("c1", "weather", '{"place": "Lyon"}'), ToolCall("c2", "clock", "{}"))


@pytest.mark.parametrize("path", ["", "/", "/v1"])
@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (used(64, 32, "Good day"), Message("assistant", "Good day")),
        (CALLING, Message("assistant", tool_calls=CALLED)),
    ],
)
def test_answers_come_from_its_openai_endpoint_and_events_from_beside_it(
    path: str, reply: Stream, message: Message
) -> None:
    told = Told()

    async def use(provider: TrtllmProvider, server: TrtllmServer) -> bool:
        provider.on_removed = told
        return await evict(provider, server)

    assert with_provider(use, reply, path=path)
    assert told.places == [[2]]
    assert told.calls[0][0].messages[-1] == message


def test_it_looks_by_itself_from_the_first_answer_until_it_is_closed() -> None:
    async def use(provider: TrtllmProvider, server: TrtllmServer) -> None:
        assert not server.was_polled.is_set()
        await events_of(provider, conversation("a"))
        await server.was_polled.wait()
        await provider.close()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "trtllm-events"]

    with_provider(use)


def test_a_server_that_tells_nothing_is_asked_no_more_and_answers_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "emberkeep.remote")

    async def use(provider: TrtllmProvider, server: TrtllmServer) -> list[str]:
        answers = [text_of(await events_of(provider, conversation("a")))]
        pollers = [task for task in asyncio.all_tasks() if task.get_name() == "trtllm-events"]
        await asyncio.wait(pollers, timeout=5)
        answers.append(text_of(await events_of(provider, conversation("a"))))
        return [*answers, *(asked.path for asked in server.asked)]

    seen = with_provider(use, has_events=False)
    assert seen[:2] == ["Hello!", "Hello!"]
    assert seen.count("/kv_cache_events") == 1
    assert caplog.text.count("tells nothing of its KV cache") == 1


def test_a_hook_that_fails_does_not_stop_the_looking(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    async def use(provider: TrtllmProvider, server: TrtllmServer) -> bool:
        provider.on_removed = fail
        return await evict(provider, server) and await provider.poll()

    assert with_provider(use, used(64, 32))
    assert "could not be archived" in caplog.text
