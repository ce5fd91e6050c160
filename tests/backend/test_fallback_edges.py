"""Backends that stand in for each other, while they open, close, die and come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from emberkeep.backend.fallback import FallbackBackend, Link
from emberkeep.errors import ConfigError, ContextExceeded, EmberkeepError, EngineError, RemoteDown, RequestError
from emberkeep.types.events import Completed, Event, TextDelta
from emberkeep.types.request import Message, Request
from helpers.events import text_of
from helpers.scripted_backend import ScriptedBackend, Step, answer

HELLO = Request(messages=(Message("user", "Hello"),))
PATIENCE_S = 60.0


class Near:
    """A backend that opens when it is let, and says what it is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fails: EmberkeepError | None = None
        self.may_open = threading.Event()
        self.may_open.set()
        self.is_opening = threading.Event()
        self.opened: list[ScriptedBackend] = []
        self.open_fails: EmberkeepError | None = None

    def _script(self, request: Request) -> list[Step]:
        return [self.fails] if self.fails else answer(f"{self.name} says hello.")

    def _open(self) -> ScriptedBackend:
        self.is_opening.set()
        assert self.may_open.wait(PATIENCE_S)
        if self.open_fails:
            raise self.open_fails
        self.opened.append(ScriptedBackend(self._script))
        return self.opened[-1]

    def link(self) -> Link:
        return Link(self.name, self._open)  # type: ignore[arg-type]


async def read(chain: FallbackBackend, request: Request = HELLO) -> list[Event]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in chain.generate(request)]


def pair() -> tuple[Near, Near, FallbackBackend]:
    first, second = Near("first"), Near("second")
    return first, second, FallbackBackend([first.link(), second.link()])


# ── opening ──


def test_while_one_opens_those_that_are_open_answer() -> None:
    first, second, chain = pair()

    async def run() -> tuple[str, str]:
        first.fails = RemoteDown("Gone.")
        second.may_open.clear()
        waiting = asyncio.create_task(read(chain))
        await asyncio.to_thread(second.is_opening.wait, PATIENCE_S)
        first.fails = None
        chain._links[0].note_success()
        meanwhile = text_of(await read(chain))
        second.may_open.set()
        return meanwhile, text_of(await waiting)

    assert asyncio.run(run()) == ("first says hello.", "second says hello.")


def test_several_that_need_it_at_once_open_it_once() -> None:
    first, second, chain = pair()
    first.fails = RemoteDown("Gone.")

    async def run() -> list[str]:
        second.may_open.clear()
        waiting = [asyncio.create_task(read(chain)) for _ in range(3)]
        await asyncio.to_thread(second.is_opening.wait, PATIENCE_S)
        second.may_open.set()
        return [text_of(events) for events in await asyncio.gather(*waiting)]

    assert asyncio.run(run()) == ["second says hello."] * 3
    assert len(second.opened) == 1


def test_a_client_that_leaves_while_one_opens_does_not_make_it_open_twice() -> None:
    first, second, chain = pair()
    first.fails = RemoteDown("Gone.")

    async def run() -> str:
        second.may_open.clear()
        leaving = asyncio.create_task(read(chain))
        await asyncio.to_thread(second.is_opening.wait, PATIENCE_S)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        staying = asyncio.create_task(read(chain))
        await asyncio.sleep(0)
        second.may_open.set()
        return text_of(await staying)

    assert asyncio.run(run()) == "second says hello."
    assert len(second.opened) == 1


async def test_closing_while_one_opens_closes_that_too() -> None:
    first, second, chain = pair()
    first.fails = RemoteDown("Gone.")
    second.may_open.clear()
    leaving = asyncio.create_task(read(chain))
    await asyncio.to_thread(second.is_opening.wait, PATIENCE_S)
    leaving.cancel()
    closing = asyncio.create_task(chain.close())
    await asyncio.sleep(0)
    second.may_open.set()
    async with asyncio.timeout(PATIENCE_S):
        await closing
    assert [backend.closed for backend in (*first.opened, *second.opened)] == [True, True]


def test_one_that_cannot_be_opened_later_is_told_and_the_first_failure_is_raised() -> None:
    first, second, chain = pair()
    first.fails = RemoteDown("Gone.")
    second.open_fails = ConfigError("Its package is not installed.")
    with pytest.raises(RemoteDown):
        asyncio.run(read(chain))
    assert [link.get("error") for link in chain.health()["chain"]] == ["Gone.", "Its package is not installed."]


def test_one_that_is_opened_late_is_started_and_keeps_the_same_warm() -> None:
    first, second, chain = pair()
    prefix = HELLO.decided(is_prefix=True)
    chain.keep_warm([prefix])
    first.fails = RemoteDown("Gone.")
    asyncio.run(read(chain))
    assert first.opened[0].kept_warm == second.opened[0].kept_warm == [prefix]


# ── dying and coming back ──


def test_one_that_is_asked_again_and_is_still_down_does_not_count_as_the_one_that_answers(
    clock: Callable[[float], None],
) -> None:
    first, second, chain = pair()
    first.fails = RemoteDown("Gone.")
    asyncio.run(read(chain))
    clock(60)
    seen: list[str] = []
    second._script = lambda request: seen.append(chain._active.name) or answer("Hello.")  # type: ignore[func-returns-value, method-assign]
    second.opened[0]._script = second._script
    asyncio.run(read(chain))
    assert seen == ["second"]
    assert chain.health()["chain"][0]["state"] == "failed"


def test_one_that_failed_lately_is_asked_before_none_answers(clock: Callable[[float], None]) -> None:
    first, second, chain = pair()
    first.fails = RemoteDown("Gone.")
    asyncio.run(read(chain))
    first.fails, second.fails = None, RemoteDown("Gone too.")
    events = asyncio.run(read(chain))
    assert text_of(events) == "first says hello."
    assert isinstance(events[-1], Completed)
    assert events[-1].answered_by == "first"


@pytest.mark.parametrize("error", [RequestError("Chats only.", "prompt"), ContextExceeded(9000, 4096)])
def test_what_only_a_stand_in_cannot_do_is_the_first_ones_failure(error: EmberkeepError) -> None:
    first, second, chain = pair()
    first.fails, second.fails = EngineError("Broken."), error
    with pytest.raises(EngineError, match="Broken"):
        asyncio.run(read(chain))
    assert "error" not in chain.health()["chain"][1]


def test_another_stand_in_with_more_room_is_asked() -> None:
    first, second, third = Near("first"), Near("second"), Near("third")
    chain = FallbackBackend([first.link(), second.link(), third.link()])
    first.fails, second.fails = RemoteDown("Gone."), ContextExceeded(9000, 4096)
    assert text_of(asyncio.run(read(chain))) == "third says hello."


def test_one_failure_of_an_answer_that_has_begun_is_enough_to_end_it() -> None:
    first, second, chain = pair()
    first.opened[0]._script = lambda request: [TextDelta(0, "Hel"), RequestError("No more.")]
    with pytest.raises(RequestError):
        asyncio.run(read(chain))
    assert second.opened == []
