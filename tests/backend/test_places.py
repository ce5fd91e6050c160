"""How many requests are let in, and when their places are free again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from emberkeep.backend.base import ModelCard
from emberkeep.backend.local import LocalBackend
from emberkeep.config import Config
from emberkeep.engine.fake import CHATML, FakeEngine
from emberkeep.errors import InvalidField, Overloaded
from emberkeep.runtime import assemble
from emberkeep.types import Completed, Request, Sampling
from helpers.scheduling import Gate

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def served(folder: Path, engine: FakeEngine, *, parallel: int, queue: int) -> AsyncIterator[LocalBackend]:
    config = Config(data_dir=folder, parallel=parallel, queue=queue)
    backend = assemble(config, engine, CHATML, ModelCard("fake", 0, engine.capabilities.context))
    try:
        yield backend
    finally:
        await backend.close()


def request(prompt: str, *, n: int = 1) -> Request:
    return Request(prompt=prompt, n=n, max_tokens=3, sampling=Sampling(temperature=0))


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


async def test_a_request_has_one_place_however_many_choices_it_wants(tmp_path: Path) -> None:
    async with served(tmp_path, FakeEngine(), parallel=1, queue=0) as backend:
        assert (await answer(backend, request("several", n=8))).usage.completion_tokens > 8


async def test_a_client_that_does_not_read_its_answer_keeps_nobody_out(tmp_path: Path) -> None:
    async with served(tmp_path, FakeEngine(), parallel=1, queue=0) as backend:
        unread = backend.generate(request("unread"))
        await anext(unread)
        while backend.loop.stats()["active"]:
            await asyncio.sleep(0.001)
        await answer(backend, request("another"))
        await unread.aclose()
        await answer(backend, request("a third"))


async def test_a_request_that_is_refused_or_given_up_leaves_its_place(tmp_path: Path) -> None:
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
