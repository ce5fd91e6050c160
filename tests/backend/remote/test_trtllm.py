"""TensorRT-LLM's events are read beside its answers. What it shares with the other vendors is in the contract."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.backend.remote.fitter import _places_in
from emberkeep.backend.remote.trtllm import TrtllmProvider, TurnTracker
from emberkeep.types.events import Usage
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Message, Request, Tool, ToolCall
from helpers.remote_model import remote
from helpers.scripted_backend import text_of
from helpers.vendors.loopback import Reply, Stream
from helpers.vendors.openai_server import (
    ANSWER,
    SYSTEM,
    USER,
    Told,
    TrtllmServer,
    answer,
    call,
    conversation,
    created,
    moved,
    removed,
    stored,
    used,
)
from helpers.vendors.wires import drive, events_of

BOAT = Message("user", "My boat is called Zephyr and lies at pier 3.")

NOTED = Message("assistant", "Noted, Zephyr at pier 3.")

WEATHER = Message("user", "What is the weather like out there?")


def take_turn(
    turns: TurnTracker, request: Request, prompt: int, completion: int, reply: Message | None = ANSWER
) -> None:
    turns.begin(request)
    turns.end(request, reply, Usage(prompt, completion))


TURN = stored(None, 1, 2, 3)

BOTH = [stored(None, 1, 2, 3, window_size=4096), stored(None, 1, 2, 3, window_size=64)]

POLLS = {
    "each is reported once": (
        [
            [created(), stored(None, 1, 2, 3, last=31)],
            [moved(2), removed(3)],
            [removed(1), removed(99)],
            [stored(None, 1), removed(1)],
        ],
        [[2], [0, 1]],
    ),
    "what follows a block is gone with it": ([[TURN], [removed(2)]], [[1, 2]]),
    "stored and removed between two looks": ([[TURN, removed(1, 2, 3)]], [[0, 1, 2]]),
    "the end is told of later": ([[stored(None, 1, 2)], [stored(2, 3, last=31)], [removed(3)]], [[2]]),
    "the server starts anew": ([[created(), TURN], [created()], [created(), TURN, removed(1)]], [[0, 1, 2]]),
    "only layers with a short window": ([BOTH, [removed(1, window_size=64)]], []),
    "the others too": ([BOTH, [removed(1, window_size=4096)]], [[0, 1, 2]]),
    "the beginning is unknown": ([[stored(77, 1, 2, 3), removed(1, 2, 3)]], []),
}


@pytest.mark.parametrize(("polls", "places"), POLLS.values(), ids=POLLS)
def test_messages_whose_blocks_are_removed_are_reported(polls: list[list[Any]], places: list[list[int]]) -> None:
    turns = TurnTracker(told := Told())
    take_turn(turns, conversation("a"), 64, 32)
    for events in polls:
        turns.read_events(events)
    assert told.places == places
    assert all(request.messages == (SYSTEM, USER, ANSWER) for request, _ in told.calls)


def test_borders_between_turns_are_what_the_server_has_counted() -> None:
    turns = TurnTracker(told := Told())
    short, *long = (Message("user", "u"), Message("assistant", "a" * 500), Message("user", "u" * 500))
    take_turn(turns, conversation("a", short), 96, 1, long[0])
    take_turn(turns, conversation("a", short, *long), 128, 33)
    for event in (stored(None, 1, 2, 3, 4, 5), removed(5), removed(4), removed(3)):
        turns.read_events([event])

    assert told.places == [[3], [1, 2], [0]]


def test_within_a_turn_messages_share_by_their_text_and_tools_stand_in_the_first() -> None:
    turns = TurnTracker(told := Told())
    messages = (Message("system", ""), Message("user", "u" * 84))
    take_turn(turns, replace(conversation("a", *messages), tools=(Tool("t" * 82, "", {}),)), 64, 32)
    for event in (TURN, removed(3), removed(2), removed(1)):
        turns.read_events([event])

    assert told.places == [[2], [1], [0]]


def test_a_turn_that_runs_brings_its_state_back() -> None:
    turns = TurnTracker(told := Told())
    take_turn(turns, conversation("a"), 64, 32)
    turns.read_events([TURN])
    longer = conversation("a", SYSTEM, USER, ANSWER, USER)

    turns.begin(longer)
    turns.read_events([removed(3)])
    turns.end(longer, ANSWER, Usage(128, 32))
    turns.read_events([stored(2, 31, 4, 5)])
    assert told.calls == []

    turns.read_events([removed(5)])
    assert told.places == [[4]]


def test_a_turn_that_failed_changes_nothing() -> None:
    turns = TurnTracker(told := Told())
    take_turn(turns, conversation("a"), 64, 32)
    turns.read_events([TURN])
    take_turn(turns, conversation("a", SYSTEM, USER, ANSWER, USER), 0, 0, reply=None)

    turns.read_events([removed(1)])

    assert told.places == [[0, 1, 2]]
    assert len(told.calls[0][0].messages) == 3


def test_conversations_that_begin_alike_lose_their_beginning_together() -> None:
    turns = TurnTracker(told := Told())
    take_turn(turns, conversation("a"), 64, 32)
    turns.read_events([TURN])
    take_turn(turns, conversation("b", SYSTEM, Message("user", "v" * 100)), 64, 64)
    turns.read_events([stored(1, 12, 13, 14)])

    turns.read_events([removed(14, 13, 12, 1)])

    gone = {request.conversation_id: places for request, places in told.calls}
    assert gone == {"a": [0, 1, 2], "b": [0, 1, 2]}


def test_of_turns_that_cannot_be_told_apart_nothing_is_said_until_they_can() -> None:
    turns = TurnTracker(told := Told())
    for name in ("a", "b"):
        take_turn(turns, conversation(name, Message("user", name * 100)), 64, 32)
    turns.read_events([stored(None, 1, 2, 3), stored(None, 11, 12, 13)])
    turns.read_events([removed(1, 2, 3, 11, 12, 13)])
    assert told.calls == []

    turns.begin(longer := conversation("a", Message("user", "a" * 100), ANSWER, USER))
    turns.end(longer, ANSWER, Usage(128, 32))
    turns.read_events([stored(None, 1, 2, 3, 4, 5)])
    turns.read_events([removed(5)])
    assert told.places == [[3]]


def test_turns_side_by_side_are_told_apart_by_their_length() -> None:
    turns = TurnTracker(told := Told())
    take_turn(turns, conversation("short"), 64, 32)
    take_turn(turns, conversation("long"), 320, 64)

    turns.read_events([stored(None, *range(101, 113)), stored(None, 1, 2, 3)])
    turns.read_events([removed(112)])
    turns.read_events([removed(3)])

    assert [(request.conversation_id, places) for request, places in told.calls] == [("long", [2]), ("short", [2])]


def test_users_with_the_same_words_are_two_conversations() -> None:
    turns = TurnTracker(told := Told())
    for owner, size in (("ann", 64), ("bob", 256)):
        take_turn(turns, Request(messages=(USER,), namespace=owner), size, 32)
    turns.read_events([stored(None, 1, 2, 3), stored(None, *range(11, 20))])

    turns.read_events([removed(3)])

    assert [request.namespace for request, _ in told.calls] == ["ann"]


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
    turns = TurnTracker(told := Told())
    take_turn(turns, conversation("a"), 64, 32)

    turns.read_events(events)
    turns.read_events([created(), stored(None, 1, 2, 3), removed(3)])

    assert told.places == [[2]]


def test_turns_whose_blocks_are_removed_are_archived_once(tmp_path: Path) -> None:
    server = TrtllmServer(used(32, 31, NOTED.content), used(96, 31, "Windy."))

    async def talk(provider: TrtllmProvider, _: TrtllmServer) -> list[str]:
        backend = remote(provider, tmp_path, context=4000)  # type: ignore[arg-type]
        first = Request(messages=(BOAT,), conversation_id="harbour")
        for request in (first, replace(first, messages=(BOAT, NOTED, WEATHER))):
            async for _event in backend.generate(request):
                pass
        server.happened.append(stored(None, 1, 2, 3, 4, last=30))
        await provider.poll()
        for event in (removed(2), removed(1)):
            server.happened.append(event)
            await provider.poll()
        await backend._lost.close()
        assert backend.memory is not None
        return [row["user_text"] for row in backend.memory.export("") if row["kind"] == "turn"]

    assert drive(
        lambda: server, lambda url: TrtllmProvider(RemoteModel("t", "trtllm", "tiny", url), None), talk
    ) == [BOAT.content]


def test_places_are_those_of_what_was_said_whatever_the_model_was_shown() -> None:
    said = [Message("system", "Be brief."), BOAT, NOTED, WEATHER, Message("assistant", "Windy.")]
    shown = [
        said[0],
        Message("user", f"[2 earlier messages have left.]\n\n{WEATHER.content}"),
        Message("assistant", "", tool_calls=()),
        said[4],
    ]
    assert _places_in(shown, said, [1, 3]) == {3, 4}


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
