"""Models that are loaded when they are asked for."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from emberkeep.backend import on_demand
from emberkeep.backend.base import tokenizer_of
from emberkeep.backend.models import loaded
from emberkeep.errors import DeadlineExceeded, EngineError, ModelError, Overloaded
from emberkeep.types.events import Completed, Loading
from emberkeep.types.models import ModelState
from emberkeep.types.request import Message, Request
from helpers.on_demand_models import Loadable, ask, pool_of, until
from helpers.scripted_backend import text_of

HELLO = Request(messages=(Message("user", "Hello"),))


async def test_the_first_request_loads_the_model_and_the_next_one_finds_it_loaded() -> None:
    model = Loadable("small", pool_of(1))
    assert model.backend.status.state is ModelState.UNLOADED
    for _ in range(2):
        assert text_of(await ask(model, HELLO)) == "small says hello"
    assert len(model.loaded) == 1
    assert model.backend.status.state is ModelState.LOADED
    await model.backend.close()
    assert model.latest.closed


async def test_requests_that_come_while_it_loads_share_one_loading_and_are_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(on_demand, "_PROGRESS_S", 0.001)
    model = Loadable("small", pool_of(1))
    model.may_load.clear()
    asked = [asyncio.create_task(ask(model, HELLO)) for _ in range(3)]
    await until(lambda: model.backend.status.waiting == 3)
    assert model.backend.status.state is ModelState.LOADING
    stream = model.backend.generate(HELLO)
    await until(lambda: model.backend._done[1] == 0.5)
    assert await anext(stream) == Loading("small", 0.5, "Loading small")
    await stream.aclose()
    model.may_load.set()
    for events in await asyncio.gather(*asked):
        assert isinstance(events[-1], Completed)
    assert len(model.loaded) == 1


async def test_a_client_that_leaves_does_not_end_the_loading() -> None:
    model = Loadable("small", pool_of(1))
    model.may_load.clear()
    asked = asyncio.create_task(ask(model, HELLO))
    await until(lambda: model.backend.status.waiting)
    asked.cancel()
    with suppress(asyncio.CancelledError):
        await asked
    assert model.backend.status.waiting == 0
    model.may_load.set()
    await until(lambda: model.backend.is_loaded)
    assert not model.backend.is_busy


async def test_a_failure_to_load_is_told_to_all_that_wait_and_tried_again_by_the_next() -> None:
    model = Loadable("small", pool_of(1))
    model.error = EngineError("There is no room.")
    told = await asyncio.gather(ask(model, HELLO), ask(model, HELLO), return_exceptions=True)
    assert [str(error) for error in told] == ["There is no room."] * 2
    assert model.backend.status.state is ModelState.FAILED
    assert model.backend.status.error == "There is no room."
    assert model.backend.health()["error"] == "There is no room."
    model.error = None
    assert text_of(await ask(model, HELLO)) == "small says hello"
    assert model.backend.status.error == ""


async def test_too_many_that_wait_are_refused() -> None:
    model = Loadable("small", pool_of(1), waiting=1)
    model.may_load.clear()
    first = asyncio.create_task(ask(model, HELLO))
    await until(lambda: model.backend.status.waiting)
    with pytest.raises(Overloaded, match="Too many requests wait for small to be loaded"):
        await ask(model, HELLO)
    model.may_load.set()
    await first


@pytest.mark.parametrize(("own_s", "servers_s"), [(0.02, None), (None, 0.02), (0.02, 3600)])
async def test_the_time_of_a_request_ends_while_it_waits_for_its_model(
    own_s: float | None, servers_s: float | None
) -> None:
    model = Loadable("small", pool_of(1), deadline_s=servers_s)
    model.may_load.clear()
    with pytest.raises(DeadlineExceeded, match="took longer than it may"):
        await ask(model, replace(HELLO, deadline_s=own_s))
    assert model.backend.status.waiting == 0
    model.may_load.set()
    await until(lambda: model.backend.is_loaded)  # for the next one
    assert not model.backend.is_busy


async def test_what_is_left_of_its_time_is_for_the_answer() -> None:
    model = Loadable("small", pool_of(1), deadline_s=10)
    model.may_load.clear()
    asked = asyncio.create_task(ask(model, HELLO))
    await asyncio.sleep(0.02)
    model.may_load.set()
    await asked
    await ask(model, HELLO)
    waited, did_not = (request.deadline_s for request in model.latest.requests)
    assert waited is not None and 5 < waited <= 9.98
    assert did_not is None  # the model itself knows the server's


async def test_it_is_unloaded_when_it_was_idle_for_long_enough() -> None:
    model = Loadable("small", pool_of(1), keep_alive_s=0.001)
    await ask(model, HELLO)
    await until(lambda: model.latest.closed)
    assert model.backend.status.state is ModelState.UNLOADED
    assert text_of(await ask(model, HELLO)) == "small says hello"
    assert len(model.loaded) == 2


async def test_a_request_says_how_long_the_model_stays() -> None:
    model = Loadable("small", pool_of(1), keep_alive_s=0.001)
    await ask(model, replace(HELLO, keep_alive_s=-1))
    assert model.backend.status.expires_s is None
    await ask(model, replace(HELLO, keep_alive_s=3600))
    expires = model.backend.status.expires_s
    assert expires is not None and 3500 < expires <= 3600
    await ask(model, replace(HELLO, keep_alive_s=0))
    await until(lambda: model.latest.closed)


async def test_what_a_request_says_of_it_ends_when_the_model_is_unloaded() -> None:
    model = Loadable("small", pool_of(1), keep_alive_s=3600)
    await ask(model, replace(HELLO, keep_alive_s=0))
    await until(lambda: model.latest.closed)
    await ask(model, HELLO)
    expires = model.backend.status.expires_s
    assert expires is not None and 3500 < expires <= 3600


async def test_figures_that_are_read_again_and_again_do_not_keep_it_loaded() -> None:
    model = Loadable("small", pool_of(1), keep_alive_s=0.02)
    await model.backend.start()
    await ask(model, HELLO)

    async def poll() -> None:
        while True:
            await asyncio.to_thread(model.backend.stats)

    polling = asyncio.create_task(poll())
    await until(lambda: model.latest.closed)
    polling.cancel()
    assert model.backend.stats() == {"model": "small", "state": "unloaded"}


async def test_the_one_that_was_not_used_for_longest_makes_room_for_another() -> None:
    pool = pool_of(2)
    models = [Loadable(name, pool) for name in ("first", "second", "third")]
    for model in (models[0], models[1], models[0], models[2]):
        await ask(model, HELLO)
    assert [model.backend.is_loaded for model in models] == [True, False, True]
    assert models[1].latest.closed


@pytest.mark.parametrize("is_started", [True, False])
async def test_one_whose_file_is_gone_keeps_no_other_from_loading(is_started: bool) -> None:
    pool = pool_of(1)
    first, other = Loadable("first", pool, is_loaded=True), Loadable("other", pool)
    if is_started:
        await first.backend.start()
    first.file_error = ModelError("Its file is gone.")
    assert text_of(await ask(other, HELLO)) == "other says hello"
    assert first.backend.is_loaded is not is_started  # what it takes is known if it was asked in time


@pytest.mark.parametrize("fails", [True, False])
async def test_what_a_model_takes_is_looked_up_whenever_it_is_loaded(fails: bool) -> None:
    pool = pool_of(2)
    other, changing = Loadable("other", pool), Loadable("changing", pool)
    changing.error = EngineError("It is broken.") if fails else None
    with suppress(EngineError):
        await changing.backend.load()
    await changing.backend.unload()
    changing.error, changing.size = None, 2  # another file of that name
    await other.backend.load()
    await changing.backend.load()
    assert not other.backend.is_loaded
    assert changing.backend.status.memory_bytes == 2


async def test_one_that_is_larger_than_all_memory_is_loaded_alone() -> None:
    pool = pool_of(2)
    small, large = Loadable("small", pool), Loadable("large", pool, size=5)
    await ask(small, HELLO)
    assert text_of(await ask(large, HELLO)) == "large says hello"
    assert not small.backend.is_loaded


async def test_pinned_ones_stay_and_a_model_without_room_beside_them_is_refused() -> None:
    pool = pool_of(1)
    pinned, other = Loadable("mine", pool, is_pinned=True, keep_alive_s=0), Loadable("other", pool)
    await ask(pinned, HELLO)
    with pytest.raises(Overloaded, match="no memory for other beside mine, which stays loaded"):
        await ask(other, HELLO)
    assert pinned.backend.is_loaded
    assert pinned.backend.status.is_pinned


async def test_a_busy_one_finishes_its_answers_before_it_makes_room() -> None:
    pool = pool_of(1)
    first, second = Loadable("first", pool), Loadable("second", pool)
    await first.backend.load()
    first.latest.go.clear()
    running = asyncio.create_task(ask(first, HELLO))
    await until(lambda: first.backend.is_busy)
    waiting = asyncio.create_task(ask(second, HELLO))
    await until(lambda: first.backend._leaving)
    late = asyncio.create_task(ask(first, HELLO))  # it does not hold up the one that waits
    await until(lambda: first.backend.status.waiting)
    assert not second.loaded
    first.latest.go.set()
    assert text_of(await running) == "first says hello"
    assert text_of(await waiting) == "second says hello"
    assert text_of(await late) == "first says hello"
    assert (len(first.loaded), len(second.loaded)) == (2, 1)


async def test_waiting_for_a_busy_one_ends_with_a_sentence_and_it_goes_on() -> None:
    pool = pool_of(1, patience_s=0.01)
    first, second = Loadable("first", pool), Loadable("second", pool)
    await first.backend.load()
    first.latest.go.clear()
    running = asyncio.create_task(ask(first, HELLO))
    await until(lambda: first.backend.is_busy)
    with pytest.raises(Overloaded, match="second has no room while first is busy"):
        await ask(second, HELLO)
    late = asyncio.create_task(ask(first, HELLO))
    first.latest.go.set()
    await asyncio.gather(running, late)
    assert len(first.loaded) == 1


async def test_one_that_is_being_closed_holds_its_memory_until_it_is() -> None:
    pool = pool_of(2)
    closing, idle, newcomer = (Loadable(name, pool) for name in ("closing", "idle", "newcomer"))
    await idle.backend.load()
    await closing.backend.load()
    closing.latest.may_close.clear()
    leaving = asyncio.create_task(closing.backend.unload())
    await until(lambda: not closing.backend.is_loaded)
    asked = asyncio.create_task(ask(newcomer, HELLO))
    await until(lambda: newcomer.backend.status.waiting)
    await asyncio.sleep(0.02)
    assert not newcomer.loaded
    closing.latest.may_close.set()
    assert text_of(await asked) == "newcomer says hello"
    await leaving
    assert idle.backend.is_loaded  # the memory of the one that left is enough


async def test_a_pinned_one_that_is_being_closed_makes_room() -> None:
    pool = pool_of(1)
    pinned, other = Loadable("mine", pool, is_pinned=True), Loadable("other", pool)
    await pinned.backend.load()
    pinned.latest.may_close.clear()
    leaving = asyncio.create_task(pinned.backend.unload())
    await until(lambda: not pinned.backend.is_loaded)
    asked = asyncio.create_task(ask(other, HELLO))
    await until(lambda: other.backend.status.waiting)
    pinned.latest.may_close.set()
    assert text_of(await asked) == "other says hello"
    await leaving


async def test_requests_that_waited_for_two_models_alternate_without_losing_one() -> None:
    pool = pool_of(1)
    models = [Loadable(name, pool) for name in ("first", "second")]
    asked = [asyncio.create_task(ask(models[number % 2], HELLO)) for number in range(20)]
    for number, events in enumerate(await asyncio.gather(*asked)):
        assert text_of(events) == f"{models[number % 2].name} says hello"
    assert sum(model.backend.is_loaded for model in models) == 1


async def test_what_only_a_loaded_model_can_do_loads_it_and_it_stays_meanwhile() -> None:
    model = Loadable("small", pool_of(1))
    async with loaded(model.backend) as real:
        assert tokenizer_of(real).tokenize("hi", add_special=False, parse_special=True) == [104, 105]
        leaving = asyncio.create_task(model.backend.unload())
        await until(lambda: model.backend._leaving)
        assert not model.latest.closed
    await leaving
    assert model.latest.closed
    assert len(model.loaded) == 1


async def test_prefixes_are_kept_warm_whenever_it_is_loaded() -> None:
    model = Loadable("small", pool_of(1))
    model.backend.keep_warm([HELLO])
    for _ in range(2):
        await model.backend.load()
        assert model.latest.kept_warm == [HELLO]
        await model.backend.unload()


async def test_closing_waits_for_a_loading_and_refuses_what_comes_after() -> None:
    model = Loadable("small", pool_of(1))
    model.may_load.clear()
    asked = asyncio.create_task(ask(model, HELLO))
    await until(lambda: model.backend.status.waiting)
    closing = asyncio.create_task(model.backend.close())
    model.may_load.set()
    await asyncio.gather(asked, closing, return_exceptions=True)
    assert model.latest.closed
    with pytest.raises(Overloaded, match="shutting down"):
        await ask(model, HELLO)
