"""Backends that stand in for each other: while they answer, fail, open, close, and come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from emberkeep.backend.fallback import FallbackBackend, Link
from emberkeep.errors import (
    ConfigError,
    ContextExceeded,
    EmberkeepError,
    EngineError,
    ModelNotFound,
    RemoteDown,
    RequestError,
)
from emberkeep.types.events import Event, TextDelta
from emberkeep.types.request import Message, Request
from helpers.scripted_backend import ScriptedBackend, Step, answer, end_of, text_of

HELLO = Request(messages=(Message("user", "Hello"),))
GONE = RemoteDown("Gone.")
PATIENCE_S = 60.0


class Near:
    """A backend that opens when it is let, and answers with its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fails: EmberkeepError | None = None
        self.begins = ""
        """What it says before it fails."""
        self.open_fails: EmberkeepError | None = None
        self.may_open = threading.Event()
        self.may_open.set()
        self.is_opening = threading.Event()
        self.opened: list[ScriptedBackend] = []

    def script(self, request: Request) -> list[Step]:
        begun: list[Step] = [TextDelta(0, self.begins)] if self.begins else []
        return [*begun, self.fails] if self.fails else answer(f"{self.name} says hello.")

    def _open(self) -> ScriptedBackend:
        self.is_opening.set()
        assert self.may_open.wait(PATIENCE_S)
        if self.open_fails:
            raise self.open_fails
        self.opened.append(ScriptedBackend(lambda request: self.script(request)))
        return self.opened[-1]

    def link(self) -> Link:
        return Link(self.name, self._open)


def pair() -> tuple[Near, Near, FallbackBackend]:
    first, second = Near("first"), Near("second")
    return first, second, FallbackBackend([first.link(), second.link()])


async def read(chain: FallbackBackend, request: Request = HELLO) -> list[Event]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in chain.generate(request)]


def who(chain: FallbackBackend, request: Request = HELLO) -> str:
    """The name of the one that answers, which its text and the last event say."""
    events = asyncio.run(read(chain, request))
    _, completed = end_of(events)
    assert text_of(events) == f"{completed.answered_by} says hello."
    assert completed.answered_by is not None
    return completed.answered_by


def test_the_first_one_answers_and_the_others_are_not_even_opened() -> None:
    _, second, chain = pair()
    assert who(chain) == "first"
    assert second.opened == []
    assert chain.health()["chain"] == [
        {"name": "first", "state": "ready"},
        {"name": "second", "state": "not opened"},
    ]


def test_clients_may_ask_for_any_of_them_by_name() -> None:
    _, _, chain = pair()
    assert chain.card.id == "scripted"
    assert set(chain.card.also) == {"first", "second"}


# ── failing ──


@pytest.mark.parametrize("error", [GONE, EngineError("Broken.")])
def test_one_that_fails_is_stood_in_for_and_left_alone_for_a_while(
    error: EmberkeepError, clock: Callable[[float], None]
) -> None:
    first, second, chain = pair()
    first.fails = error
    assert [who(chain), who(chain)] == ["second", "second"]
    assert len(first.opened[0].requests) == 1
    clock(60)
    seen: list[str] = []
    second.script = lambda request: seen.append(chain._active.name) or answer("second says hello.")  # type: ignore[func-returns-value, method-assign]
    assert who(chain) == "second"
    assert seen == ["second"]  # one that is asked again and is still down is not the one that answers
    assert chain.health()["chain"][0]["state"] == "failed"
    first.fails = None
    clock(60)
    assert who(chain) == "first"
    assert chain.health()["chain"][0] == {"name": "first", "state": "ready"}


def test_one_that_failed_lately_is_asked_before_none_answers(clock: Callable[[float], None]) -> None:
    first, second, chain = pair()
    first.fails = second.fails = GONE
    with pytest.raises(RemoteDown):
        who(chain)
    first.fails = None
    assert who(chain) == "first"


def test_what_is_wrong_with_a_request_is_wrong_everywhere() -> None:
    first, second, chain = pair()
    first.fails = RequestError("Not like this.")
    with pytest.raises(RequestError, match="Not like this"):
        who(chain)
    assert second.opened == []


@pytest.mark.parametrize("error", [RequestError("Chats only.", "prompt"), ContextExceeded(9000, 4096)])
def test_what_only_a_stand_in_cannot_do_is_the_first_ones_failure(error: EmberkeepError) -> None:
    first, second, chain = pair()
    first.fails, second.fails = EngineError("Broken."), error
    with pytest.raises(EngineError, match="Broken"):
        who(chain)
    assert "error" not in chain.health()["chain"][1]


def test_another_stand_in_with_more_room_is_asked() -> None:
    first, second, third = Near("first"), Near("second"), Near("third")
    first.fails, second.fails = GONE, ContextExceeded(9000, 4096)
    assert who(FallbackBackend([first.link(), second.link(), third.link()])) == "third"


@pytest.mark.parametrize("error", [GONE, RequestError("No more.")])
def test_an_answer_that_has_begun_is_not_begun_by_another(error: EmberkeepError) -> None:
    first, second, chain = pair()
    first.begins, first.fails = "Hel", error
    with pytest.raises(type(error)):
        who(chain)
    assert second.opened == []


def test_an_answer_that_no_client_has_seen_yet_is_given_by_another() -> None:
    first, _, chain = pair()
    first.begins, first.fails = "Hel", GONE
    assert who(chain, HELLO.decided(in_pieces=False)) == "second"


# ── opening and closing ──


def test_one_that_cannot_be_opened_is_passed_over_and_told() -> None:
    first, second = Near("first"), Near("second")
    first.open_fails = ModelNotFound("It is not here.")
    chain = FallbackBackend([first.link(), second.link()])
    assert who(chain) == "second"
    assert chain.health()["chain"][0] == {"name": "first", "state": "failed", "error": "It is not here."}
    second.open_fails = GONE
    with pytest.raises(ModelNotFound, match="not here"):
        FallbackBackend([first.link(), second.link()])


def test_one_that_cannot_be_opened_later_is_told_and_the_first_failure_is_raised() -> None:
    first, second, chain = pair()
    first.fails, second.open_fails = GONE, ConfigError("Its package is not installed.")
    with pytest.raises(RemoteDown):
        who(chain)
    assert [link.get("error") for link in chain.health()["chain"]] == ["Gone.", "Its package is not installed."]


def test_one_that_is_opened_late_is_started_and_keeps_the_same_warm() -> None:
    first, second, chain = pair()
    prefix = HELLO.decided(is_prefix=True)
    chain.keep_warm([prefix])
    first.fails = GONE
    assert who(chain) == "second"
    assert first.opened[0].kept_warm == second.opened[0].kept_warm == [prefix]


async def opening_second(first: Near, second: Near, chain: FallbackBackend) -> asyncio.Task[list[Event]]:
    """A request that waits for the second one to be opened."""
    first.fails = GONE
    second.may_open.clear()
    waiting = asyncio.create_task(read(chain))
    await asyncio.to_thread(second.is_opening.wait, PATIENCE_S)
    return waiting


async def test_while_one_opens_those_that_are_open_answer() -> None:
    first, second, chain = pair()
    waiting = await opening_second(first, second, chain)
    first.fails = None
    chain._links[0].note_success()
    assert text_of(await read(chain)) == "first says hello."
    second.may_open.set()
    assert text_of(await waiting) == "second says hello."


async def test_several_that_need_it_at_once_open_it_once_though_one_of_them_leaves() -> None:
    first, second, chain = pair()
    leaving = await opening_second(first, second, chain)
    staying = [asyncio.create_task(read(chain)) for _ in range(2)]
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    second.may_open.set()
    assert [text_of(events) for events in await asyncio.gather(*staying)] == ["second says hello."] * 2
    assert len(second.opened) == 1


async def test_closing_closes_those_that_are_open_and_the_one_that_opens() -> None:
    first, second, chain = pair()
    leaving = await opening_second(first, second, chain)
    leaving.cancel()
    closing = asyncio.create_task(chain.close())
    await asyncio.sleep(0)
    second.may_open.set()
    async with asyncio.timeout(PATIENCE_S):
        await closing
    assert [backend.closed for backend in (*first.opened, *second.opened)] == [True, True]
