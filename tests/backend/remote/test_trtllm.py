"""TensorRT-LLM's provider: answers through the real SDK, and what its events say about whose state is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.backend.remote.base import RemoteAbout
from emberkeep.backend.remote.trtllm import TrtllmProvider, open_trtllm
from emberkeep.backend.remote.trtllm_turns import Turns
from emberkeep.errors import RemoteDown
from emberkeep.types import Message, RemoteModel, Request, Tool, ToolCall, Usage
from support.vendors.driving import drive, events_of, text_of
from support.vendors.loopback import Reply, Stream
from support.vendors.openai_server import answer, call, failed
from support.vendors.trtllm_server import TrtllmServer, created, moved, removed, stored, used

SYSTEM = Message("system", "s" * 100)
USER = Message("user", "u" * 100)
ANSWER = Message("assistant", "a" * 100)


class Told:
    """What has been said to be gone, newest last."""

    def __init__(self) -> None:
        self.calls: list[tuple[Request, list[int]]] = []

    def __call__(self, request: Request, places: Sequence[int]) -> None:
        self.calls.append((request, list(places)))

    @property
    def places(self) -> list[list[int]]:
        return [places for _, places in self.calls]


def conversation(name: str, *messages: Message) -> Request:
    return Request(messages=messages or (SYSTEM, USER), conversation_id=name)


def take_turn(
    turns: Turns, request: Request, prompt: int, completion: int, reply: Message | None = ANSWER
) -> None:
    turns.began(request)
    turns.ended(request, reply, Usage(prompt, completion))


def test_messages_whose_blocks_are_removed_are_told_once() -> None:
    turns = Turns(told := Told())
    take_turn(turns, conversation("a"), 64, 32)
    turns.digest([created(), stored(None, 1, 2, 3, last=31)])
    assert told.calls == []

    turns.digest([moved(2), removed(3)])
    turns.digest([removed(1), removed(99)])
    turns.digest([stored(None, 1), removed(1)])

    assert told.places == [[2], [0, 1]]
    assert told.calls[0][0].messages == (SYSTEM, USER, ANSWER)


def test_borders_between_turns_are_what_the_server_has_counted() -> None:
    turns = Turns(told := Told())
    short_text_many_tokens = (Message("user", "u"), Message("assistant", "a" * 500), Message("user", "u" * 500))
    take_turn(turns, conversation("a", *short_text_many_tokens[:1]), 96, 1, short_text_many_tokens[1])
    take_turn(turns, conversation("a", *short_text_many_tokens), 128, 33)

    turns.digest([stored(None, 1, 2, 3, 4, 5)])
    for block in (5, 4, 3):
        turns.digest([removed(block)])

    assert told.places == [[3], [1, 2], [0]]


def test_within_a_turn_messages_share_by_their_text_and_tools_stand_in_the_first() -> None:
    turns = Turns(told := Told())
    request = Request(
        messages=(Message("system", ""), Message("user", "u" * 84)),
        tools=(Tool("t" * 82, "", {}),),
        conversation_id="a",
    )
    take_turn(turns, request, 64, 32)
    turns.digest([stored(None, 1, 2, 3)])

    for block in (3, 2, 1):
        turns.digest([removed(block)])

    assert told.places == [[2], [1], [0]]


def test_what_follows_a_removed_block_is_gone_with_it() -> None:
    turns = Turns(told := Told())
    take_turn(turns, conversation("a"), 64, 32)
    turns.digest([stored(None, 1, 2, 3)])

    turns.digest([removed(2)])

    assert told.places == [[1, 2]]


def test_a_turn_that_runs_brings_its_state_back() -> None:
    turns = Turns(told := Told())
    take_turn(turns, conversation("a"), 64, 32)
    turns.digest([stored(None, 1, 2, 3)])
    longer = conversation("a", SYSTEM, USER, ANSWER, USER)

    turns.began(longer)
    turns.digest([removed(3)])
    turns.ended(longer, ANSWER, Usage(128, 32))
    turns.digest([stored(2, 31, 4, 5)])
    assert told.calls == []

    turns.digest([removed(5)])
    assert told.places == [[4]]


def test_a_turn_that_failed_changes_nothing() -> None:
    turns = Turns(told := Told())
    take_turn(turns, conversation("a"), 64, 32)
    turns.digest([stored(None, 1, 2, 3)])
    take_turn(turns, conversation("a", SYSTEM, USER, ANSWER, USER), 0, 0, reply=None)

    turns.digest([removed(1)])

    assert told.places == [[0, 1, 2]]
    assert len(told.calls[0][0].messages) == 3


def test_conversations_that_begin_alike_lose_their_beginning_together() -> None:
    turns = Turns(told := Told())
    take_turn(turns, conversation("a"), 64, 32)
    turns.digest([stored(None, 1, 2, 3)])
    take_turn(turns, conversation("b", SYSTEM, Message("user", "v" * 100)), 64, 64)
    turns.digest([stored(1, 12, 13, 14)])

    turns.digest([removed(14, 13, 12, 1)])

    gone = {request.conversation_id: places for request, places in told.calls}
    assert gone == {"a": [0, 1, 2], "b": [0, 1, 2]}


def test_of_turns_that_cannot_be_told_apart_nothing_is_said_until_they_can() -> None:
    turns = Turns(told := Told())
    for name in ("a", "b"):
        take_turn(turns, conversation(name, Message("user", name * 100)), 64, 32)
    turns.digest([stored(None, 1, 2, 3), stored(None, 11, 12, 13)])
    turns.digest([removed(1, 2, 3, 11, 12, 13)])
    assert told.calls == []

    turns.began(longer := conversation("a", Message("user", "a" * 100), ANSWER, USER))
    turns.ended(longer, ANSWER, Usage(128, 32))
    turns.digest([stored(None, 1, 2, 3, 4, 5)])
    turns.digest([removed(5)])
    assert told.places == [[3]]


def test_turns_side_by_side_are_told_apart_by_their_length() -> None:
    turns = Turns(told := Told())
    take_turn(turns, conversation("short"), 64, 32)
    take_turn(turns, conversation("long"), 320, 64)

    turns.digest([stored(None, *range(101, 113)), stored(None, 1, 2, 3)])
    turns.digest([removed(112)])
    turns.digest([removed(3)])

    assert [(request.conversation_id, places) for request, places in told.calls] == [("long", [2]), ("short", [2])]


def test_users_with_the_same_words_are_two_conversations() -> None:
    turns = Turns(told := Told())
    for owner, size in (("ann", 64), ("bob", 256)):
        take_turn(turns, Request(messages=(USER,), namespace=owner), size, 32)
    turns.digest([stored(None, 1, 2, 3), stored(None, *range(11, 20))])

    turns.digest([removed(3)])

    assert [request.namespace for request, _ in told.calls] == ["ann"]


def test_what_is_stored_and_removed_between_two_looks_is_noticed() -> None:
    turns = Turns(told := Told())
    take_turn(turns, conversation("a"), 64, 32)

    turns.digest([stored(None, 1, 2, 3), removed(1, 2, 3)])

    assert told.places == [[0, 1, 2]]


def test_the_end_of_an_answer_may_be_told_of_later() -> None:
    turns = Turns(told := Told())
    take_turn(turns, conversation("a"), 64, 32)
    turns.digest([stored(None, 1, 2)])
    turns.digest([stored(2, 3, last=31)])

    turns.digest([removed(3)])

    assert told.places == [[2]]


def test_after_a_restart_everything_is_gone() -> None:
    turns = Turns(told := Told())
    take_turn(turns, conversation("a"), 64, 32)
    turns.digest([created(), stored(None, 1, 2, 3)])

    turns.digest([created()])
    turns.digest([created(), stored(None, 1, 2, 3), removed(1)])

    assert told.places == [[0, 1, 2]]


def test_layers_with_a_short_window_say_nothing_about_a_conversation() -> None:
    turns = Turns(told := Told())
    take_turn(turns, conversation("a"), 64, 32)
    turns.digest([stored(None, 1, 2, 3, window_size=4096), stored(None, 1, 2, 3, window_size=64)])

    turns.digest([removed(1, window_size=64)])
    assert told.calls == []

    turns.digest([removed(1, window_size=4096)])
    assert told.places == [[0, 1, 2]]


def test_blocks_whose_beginning_is_unknown_are_nobodys() -> None:
    turns = Turns(told := Told())
    take_turn(turns, conversation("a"), 64, 32)

    turns.digest([stored(77, 1, 2, 3), removed(1, 2, 3)])

    assert told.calls == []


JSON = st.recursive(
    st.none() | st.integers() | st.sampled_from(["created", "stored", "removed", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["data", "type", "blocks", "block_hashes", "parent_hash"]), inner)
    ),
    max_leaves=8,
)


@given(st.lists(JSON, max_size=4))
def test_events_that_are_none_are_passed_over(events: list[Any]) -> None:
    turns = Turns(told := Told())
    take_turn(turns, conversation("a"), 64, 32)

    turns.digest(events)
    turns.digest([created(), stored(None, 1, 2, 3), removed(3)])

    assert told.places == [[2]]


def with_provider(
    use: Callable[[TrtllmProvider, TrtllmServer], Awaitable[Any]],
    *replies: Reply | Stream,
    path: str = "",
    key: str | None = None,
    has_events: bool = True,
) -> Any:
    def open_at(url: str) -> Any:
        return open_trtllm(RemoteModel("trt", "trtllm", "tiny", f"{url}{path}"), key)

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
