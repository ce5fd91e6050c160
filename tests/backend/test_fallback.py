"""Backends that stand in for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

from emberkeep.backend.fallback import FallbackBackend, Link
from emberkeep.errors import EmberkeepError, EngineError, ModelNotFound, RemoteDown, RequestError
from emberkeep.types.events import Completed, TextDelta
from emberkeep.types.request import Message, Request
from helpers.events import read_events, text_of
from helpers.remote_model import ScriptedProvider, Step, remote, said

HELLO = Request(messages=(Message("user", "Hello"),))


class Far:
    """A remote backend that can be switched off."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: EmberkeepError | None = None
        self.opened = 0
        self.provider = ScriptedProvider(self._script)

    def _script(self, request: Request) -> Iterable[Step]:
        return [self.error] if self.error else said(f"{self.name} says hello.")

    def link(self, fails: EmberkeepError | None = None) -> Link:
        def open() -> object:
            if fails:
                raise fails
            self.opened += 1
            return remote(self.provider, retries=0)

        return Link(self.name, open)  # type: ignore[arg-type]


def test_the_first_one_answers_and_the_others_are_not_even_opened() -> None:
    first, second = Far("first"), Far("second")
    chain = FallbackBackend([first.link(), second.link()])
    *events, completed = read_events(chain, HELLO)
    assert text_of(events) == "first says hello."
    assert isinstance(completed, Completed)
    assert completed.answered_by == "first"
    assert second.opened == 0
    assert chain.health()["chain"] == [
        {"name": "first", "state": "ready"},
        {"name": "second", "state": "not opened"},
    ]


def test_one_that_cannot_be_opened_is_passed_over_and_told() -> None:
    first, second = Far("first"), Far("second")
    chain = FallbackBackend([first.link(ModelNotFound("It is not here.")), second.link()])
    assert text_of(read_events(chain, HELLO)) == "second says hello."
    assert chain.health()["chain"][0] == {"name": "first", "state": "failed", "error": "It is not here."}


def test_where_none_can_be_opened_the_first_ones_reason_is_told() -> None:
    links = [Far("first").link(ModelNotFound("It is not here.")), Far("second").link(RemoteDown("Gone."))]
    with pytest.raises(ModelNotFound, match="not here"):
        FallbackBackend(links)


@pytest.mark.parametrize("error", [RemoteDown("Gone."), EngineError("Broken.")])
def test_one_that_fails_is_stood_in_for_and_left_alone_for_a_while(
    error: EmberkeepError, clock: Callable[[float], None]
) -> None:
    first, second = Far("first"), Far("second")
    chain = FallbackBackend([first.link(), second.link()])
    first.error = error
    *events, completed = read_events(chain, HELLO)
    assert text_of(events) == "second says hello."
    assert isinstance(completed, Completed)
    assert completed.answered_by == "second"
    assert chain.health()["backend"] == "far"
    read_events(chain, HELLO)
    assert len(first.provider.asked) == 1
    first.error = None
    clock(60)
    assert text_of(read_events(chain, HELLO)) == "first says hello."
    assert chain.health()["chain"][0] == {"name": "first", "state": "ready"}


def test_all_that_failed_lately_are_asked_again_before_none_answers(clock: Callable[[float], None]) -> None:
    first, second = Far("first"), Far("second")
    chain = FallbackBackend([first.link(), second.link()])
    first.error = second.error = RemoteDown("Gone.")
    with pytest.raises(RemoteDown):
        read_events(chain, HELLO)
    first.error = None
    assert text_of(read_events(chain, HELLO)) == "first says hello."


def test_what_is_wrong_with_a_request_is_wrong_everywhere() -> None:
    first, second = Far("first"), Far("second")
    chain = FallbackBackend([first.link(), second.link()])
    first.error = RequestError("Not like this.")
    with pytest.raises(RequestError, match="Not like this"):
        read_events(chain, HELLO)
    assert second.opened == 0


def test_an_answer_that_has_begun_is_not_begun_by_another() -> None:
    first, second = Far("first"), Far("second")
    first.provider = ScriptedProvider(lambda request: [TextDelta(0, "Hel"), RemoteDown("Gone.")])
    with pytest.raises(RemoteDown):
        read_events(FallbackBackend([first.link(), second.link()]), HELLO)
    assert second.opened == 0


def test_an_answer_that_no_client_has_seen_yet_is_given_by_another() -> None:
    first, second = Far("first"), Far("second")
    first.provider = ScriptedProvider(lambda request: [TextDelta(0, "Hel"), RemoteDown("Gone.")])
    chain = FallbackBackend([first.link(), second.link()])
    *events, completed = read_events(chain, HELLO.decided(in_pieces=False))
    assert text_of(events) == "second says hello."
    assert isinstance(completed, Completed)
    assert completed.answered_by == "second"


def test_clients_may_ask_for_any_of_them_by_name() -> None:
    chain = FallbackBackend([Far("first").link(), Far("second").link()])
    assert chain.card.id == "far-1"
    assert set(chain.card.also) == {"first", "second"}


def test_closing_closes_those_that_are_open() -> None:
    first, second = Far("first"), Far("second")
    chain = FallbackBackend([first.link(), second.link()])
    asyncio.run(chain.close())
    assert (first.provider.closed, second.provider.closed) == (1, 0)
