"""Requests that fail, and an engine that does, as those see it who ask the backend."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.backend.fallback import FallbackBackend, Link
from emberkeep.backend.local import LocalBackend
from emberkeep.chat.output import TextStream
from emberkeep.config.settings import Config
from emberkeep.engine.base import Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EmberkeepError, EngineError, StepFailed
from emberkeep.types.events import TextDelta
from emberkeep.types.request import Request, Sampling
from helpers.scheduling import PATIENCE, Gate
from helpers.scripted_backend import fake_backend

ASKED = Request(prompt="harbour " * 40, sampling=Sampling(temperature=0), max_tokens=6)
OTHER = Request(prompt="lighthouse " * 30, sampling=Sampling(temperature=0), max_tokens=6)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(batch=128)


@pytest.fixture
def backend(tmp_path: Path, engine: FakeEngine) -> Iterator[LocalBackend]:
    config = Config(data_dir=tmp_path)
    backend = fake_backend(config, engine)
    yield backend
    asyncio.run(backend.close())


async def answer(backend: LocalBackend, request: Request) -> str:
    return "".join([event.text async for event in backend.generate(request) if isinstance(event, TextDelta)])


async def outcome(backend: LocalBackend, request: Request) -> str | EmberkeepError:
    try:
        return await asyncio.wait_for(answer(backend, request), PATIENCE)
    except EmberkeepError as error:
        return error


def breaks(*arguments: object, **named: object) -> None:
    raise RuntimeError("a bug")


def is_empty(backend: LocalBackend) -> bool:
    stats = backend.scheduler.stats()
    return backend._permits._held == 0 and not stats["active"] and not stats["waiting"]


def test_one_of_two_choices_that_fails_ends_its_request_and_no_other(backend, engine, monkeypatch) -> None:
    async def ask() -> list[str | EmberkeepError]:
        expected = await answer(backend, OTHER)
        push, pushed = TextStream.push, []

        def fail(stream: TextStream, token: int, logprob: object = None):
            pushed.append(stream)
            if stream._index == 1:
                raise MemoryError
            return push(stream, token, logprob)

        monkeypatch.setattr(TextStream, "push", fail)
        both = Request(prompt=ASKED.prompt, sampling=Sampling(seed=1), max_tokens=6, n=2)
        told = await asyncio.gather(outcome(backend, both), outcome(backend, OTHER))
        return [*told, expected]

    failed, other, expected = asyncio.run(ask())
    assert isinstance(failed, StepFailed)
    assert other == expected
    backend.scheduler.call(lambda: None).result(PATIENCE)
    assert is_empty(backend)


def test_an_end_that_cannot_be_told_is_an_error_and_frees_one_place_once(backend, monkeypatch) -> None:
    expected = asyncio.run(answer(backend, ASKED))
    monkeypatch.setattr(TextStream, "finish", breaks)
    assert isinstance(asyncio.run(outcome(backend, ASKED)), EngineError)
    monkeypatch.undo()
    assert is_empty(backend)
    assert asyncio.run(answer(backend, ASKED)) == expected


def test_an_engine_that_fails_is_told_to_those_who_wait_and_to_those_who_come(backend, engine) -> None:
    gate = Gate(engine)

    async def ask() -> list[str | EmberkeepError]:
        asked = [asyncio.create_task(outcome(backend, request)) for request in (ASKED, OTHER)]
        await asyncio.to_thread(gate.reached)
        backend.scheduler._admit = breaks
        gate.open()
        return [*await asyncio.gather(*asked), await outcome(backend, OTHER)]

    assert backend.failure() is None
    assert "error" not in backend.health()
    told = asyncio.run(ask())
    assert all(isinstance(error, EngineError) and "has failed" in str(error) for error in told)
    assert "has failed" in str(backend.failure())
    assert "has failed" in backend.health()["error"]
    assert backend._permits._held == 0
    for ask_now in (lambda: backend.cache.gc(), lambda: backend.cache.remove_user("ann")):
        with pytest.raises(EngineError, match="has failed"):
            ask_now()
    warmed = asyncio.run(backend.warmer.warm(Request(prompt="harbour", max_tokens=0).decided(is_prefix=True)))
    assert "has failed" in str(warmed.error)


def test_a_chain_fails_with_a_part_that_only_a_new_process_brings_back(backend, engine) -> None:
    chain = FallbackBackend([Link("local", lambda: backend)])
    assert chain.failure() is None

    def evaluate(batch: list[Rows]) -> None:
        backend.scheduler._admit = breaks

    engine.on_evaluate = evaluate
    assert isinstance(asyncio.run(outcome(chain, ASKED)), EngineError)
    assert "has failed" in str(chain.failure())


def test_a_sweep_that_fails_is_not_the_last_one(backend, monkeypatch) -> None:
    monkeypatch.setattr(backend._store, "sweep", breaks)
    backend.warmer.sweep()
    assert backend.warmer._thread.is_alive()
