"""How many requests are let in, when their permits are released, and how long one may take."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.backend.limits import Permit, Permits, with_deadline
from emberkeep.backend.local import LocalBackend
from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import DeadlineExceeded, InvalidField, Overloaded, RateLimited
from emberkeep.types.events import Completed, Event, TextDelta
from emberkeep.types.request import Request, Sampling
from helpers.scheduling import Gate
from helpers.scripted_backend import fake_backend


@asynccontextmanager
async def served(
    folder: Path, engine: FakeEngine, *, parallel: int, queue: int, per_user: int | None = None
) -> AsyncIterator[LocalBackend]:
    config = Config(data_dir=folder, parallel=parallel, queue=queue, max_concurrent_per_user=per_user)
    backend = fake_backend(config, engine)
    try:
        yield backend
    finally:
        await backend.close()


def request(prompt: str, *, n: int = 1, user: str = "") -> Request:
    return Request(prompt=prompt, n=n, max_tokens=3, sampling=Sampling(temperature=0), user=user)


async def answer(backend: LocalBackend, asked: Request) -> Completed:
    events = [event async for event in backend.generate(asked)]
    assert isinstance(events[-1], Completed)
    return events[-1]


async def test_without_a_queue_as_many_are_served_as_can_run(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with served(tmp_path, engine, parallel=2, queue=0) as backend:
        await asyncio.gather(*(answer(backend, request(f"prompt {i}")) for i in range(2)))
        gate = Gate(engine)
        running = [asyncio.create_task(answer(backend, request(f"again {i}"))) for i in range(2)]
        await asyncio.to_thread(gate.reached)
        with pytest.raises(Overloaded, match="2 requests are being served or waiting already") as refused:
            await answer(backend, request("one too many"))
        assert refused.value.retry_after > 0
        gate.open()
        await asyncio.gather(*running)
        await answer(backend, request("one too many"))


async def test_a_request_has_one_permit_however_many_choices_it_wants(tmp_path: Path) -> None:
    async with served(tmp_path, FakeEngine(), parallel=1, queue=0) as backend:
        assert (await answer(backend, request("several", n=8))).usage.completion_tokens > 8


async def test_a_client_that_does_not_read_its_answer_keeps_no_other_out(tmp_path: Path) -> None:
    async with served(tmp_path, FakeEngine(), parallel=1, queue=0) as backend:
        unread = backend.generate(request("unread"))
        await anext(unread)  # it is accepted
        await anext(unread)
        while backend.scheduler.stats()["active"]:
            await asyncio.sleep(0.001)
        await answer(backend, request("another"))
        await unread.aclose()
        await answer(backend, request("a third"))


async def test_a_request_that_is_refused_or_given_up_releases_its_permit(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with served(tmp_path, engine, parallel=1, queue=0) as backend:
        with pytest.raises(InvalidField):
            await answer(backend, Request(prompt="", max_tokens=1))
        gate = Gate(engine)
        given_up = asyncio.create_task(answer(backend, request("never mind")))
        await asyncio.to_thread(gate.reached)
        given_up.cancel()
        await asyncio.wait([given_up])
        gate.open()
        await answer(backend, request("the next"))


@pytest.mark.parametrize("user", ["alice", ""])
async def test_a_user_is_limited_and_others_are_not_concerned(tmp_path: Path, user: str) -> None:
    """Those without a name are one user as well."""
    engine = FakeEngine()
    async with served(tmp_path, engine, parallel=1, queue=3, per_user=2) as backend:
        gate = Gate(engine)
        mine = [asyncio.create_task(answer(backend, request(f"mine {i}", user=user))) for i in range(2)]
        await asyncio.to_thread(gate.reached)
        with pytest.raises(RateLimited, match="limited to 2 at a time: try again") as refused:
            await answer(backend, request("a third", user=user))
        assert refused.value.retry_after > 0
        other = asyncio.create_task(answer(backend, request("another's", user="bob")))
        gate.open()
        await asyncio.gather(*mine, other)
        await answer(backend, request("a third", user=user))


async def test_the_limit_of_a_user_holds_on_a_full_server_too(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with served(tmp_path, engine, parallel=1, queue=0, per_user=1) as backend:
        gate = Gate(engine)
        running = asyncio.create_task(answer(backend, request("mine", user="alice")))
        await asyncio.to_thread(gate.reached)
        with pytest.raises(RateLimited):
            await answer(backend, request("mine again", user="alice"))
        with pytest.raises(Overloaded):
            await answer(backend, request("another's", user="bob"))
        gate.open()
        await running


@given(
    steps=st.lists(st.tuples(st.sampled_from(["take", "leave"]), st.integers(0, 9)), max_size=60),
    per_user=st.none() | st.integers(1, 4),
)
def test_a_permit_is_refused_exactly_when_a_limit_is_reached(
    steps: list[tuple[str, int]], per_user: int | None
) -> None:
    permits, held, left = Permits(6, per_user), list[Permit](), list[Permit]()
    for what, number in steps:
        if what == "leave":
            # A second time is harmless.
            left += [held.pop(number % len(held))] if held else []
            for permit in left:
                permit.release()
            continue
        user = str(number % 3)
        mine = Counter(permit.user for permit in held)[user]
        if per_user is not None and mine >= per_user:
            with pytest.raises(RateLimited):
                permits.acquire(user, 1)
        elif len(held) >= 6:
            with pytest.raises(Overloaded):
                permits.acquire(user, 1)
        else:
            held.append(permits.acquire(user, 1))
    for permit in held:
        permit.choice_over()
    assert not permits._held_by, "users who have left are remembered"


async def _slowly(seconds: float) -> AsyncIterator[Event]:
    for word in ("one", "two"):
        await asyncio.sleep(seconds)
        yield TextDelta(0, word)


def test_one_deadline_holds_for_everything_together() -> None:
    async def run() -> list[Event]:
        return [event async for event in with_deadline(_slowly(30.0), 0.02)]

    with pytest.raises(DeadlineExceeded):
        asyncio.run(run())


def test_a_timeout_of_the_events_themselves_is_not_ours() -> None:
    async def failing() -> AsyncIterator[Event]:
        yield TextDelta(0, "one")
        raise TimeoutError("the socket")

    async def run() -> list[Event]:
        return [event async for event in with_deadline(failing(), 60.0)]

    with pytest.raises(TimeoutError, match="the socket"):
        asyncio.run(run())
