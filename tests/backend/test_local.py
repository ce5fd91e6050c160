"""Requests that fail, an engine that does, and hosts that share what they computed, as those see it who ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from time import sleep
from unittest.mock import patch

import pytest

from emberkeep.backend.fallback import FallbackBackend, Link
from emberkeep.backend.local import LocalBackend
from emberkeep.chat.output import TextStream
from emberkeep.config.settings import Config
from emberkeep.engine.base import KvUnit, Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EmberkeepError, EngineError, StepFailed
from emberkeep.kv.remote.link import RemoteSettings
from emberkeep.types.events import Completed, LookupRecord, Source, TextDelta
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Message, Request, Sampling
from helpers.scheduling import PATIENCE, Gate
from helpers.scripted_backend import end_of, fake_backend, read_events, settle, text_of
from helpers.valkey_server import ValkeyServer, running_valkey
from helpers.waiting import eventually

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
        both = Request(prompt=ASKED.prompt, sampling=Sampling(seed=1), max_tokens=6, n=2, stop=("\0",))
        told = await asyncio.gather(outcome(backend, both), outcome(backend, OTHER))
        return [*told, expected]

    failed, other, expected = asyncio.run(ask())
    assert isinstance(failed, StepFailed)
    assert other == expected
    settle(backend)
    assert is_empty(backend)


def test_an_end_that_cannot_be_told_is_an_error_and_frees_one_place_once(backend, monkeypatch) -> None:
    expected = asyncio.run(answer(backend, ASKED))
    monkeypatch.setattr(TextStream, "finish", breaks)
    assert isinstance(asyncio.run(outcome(backend, ASKED)), EngineError)
    monkeypatch.undo()
    assert eventually(lambda: is_empty(backend))
    assert asyncio.run(answer(backend, ASKED)) == expected


def test_a_bias_for_a_token_that_the_model_has_not_is_refused(backend) -> None:
    """An engine may write where it says."""
    asked = Request(prompt=ASKED.prompt, sampling=Sampling(logit_bias={5: 1.0, 1 << 40: 1.0}))
    assert f"{1 << 40} is not a token of this model" in str(asyncio.run(outcome(backend, asked)))


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


# ── hosts that share ──

SYSTEM = Message("system", "You are a patient teacher of history. " * 20)

GREEDY = Sampling(temperature=0)

UNITS = [KvUnit.RANGE, KvUnit.SNAPSHOT, KvUnit.BOTH]


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture
def server(running_server: ValkeyServer) -> ValkeyServer:
    """With nothing in it."""
    running_server.client.flushall()
    return running_server


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    return (tmp_path / str(number) for number in count())


@contextmanager
def host(
    server: ValkeyServer, folder: Path, unit: KvUnit = KvUnit.RANGE, **settings: object
) -> Iterator[LocalBackend]:
    config = Config(data_dir=folder, remote=server.url, **settings)
    with patch("emberkeep.runtime.parts.RemoteSettings", partial(RemoteSettings, deadline_s=10.0)):
        backend = fake_backend(config, FakeEngine(kv_unit=unit, on_evaluate=take_time))
    try:
        yield backend
    finally:
        asyncio.run(backend.close())


def ask(backend: LocalBackend, *messages: Message, user: str = "", tokens: int = 12) -> tuple[str, LookupRecord]:
    """The answer, when it is where other hosts find it."""
    request = Request(
        messages=messages,
        max_tokens=tokens,
        sampling=GREEDY,
        user=user,
        namespace=private_namespace(user) if user else "",
    )
    events = read_events(backend, request)
    settle(backend)
    backend.scheduler.store.flush()
    _, completed = end_of(events)
    assert isinstance(completed, Completed)
    return text_of(events), completed.lookup


def take_time(batch: Sequence[Rows]) -> None:
    """So that loading is worth its while, as with a real model."""
    sleep(1e-3 * sum(len(rows.tokens) for rows in batch))


def question(text: str) -> Message:
    return Message("user", text)


@pytest.mark.parametrize("unit", UNITS)
def test_only_its_own_question_is_evaluated(server: ValkeyServer, folders: Iterator[Path], unit: KvUnit) -> None:
    with host(server, next(folders), unit) as a, host(server, next(folders), unit) as b:
        ask(a, SYSTEM, question("Who was Hannibal?"))
        text, lookup = ask(b, SYSTEM, question("When did Rome fall?"))
        evaluated = lookup.prompt_tokens - lookup.reused_tokens
        assert lookup.remote_tokens == lookup.reused_tokens
        assert evaluated < len("<user>When did Rome fall?<assistant>") + 10
    with host(server, next(folders), unit, disk_budget=0, ram_budget=0) as alone:
        server.client.flushall()
        assert ask(alone, SYSTEM, question("When did Rome fall?"))[0] == text


@pytest.mark.parametrize("unit", UNITS)
def test_a_conversation_goes_on_at_another_host(
    server: ValkeyServer, folders: Iterator[Path], unit: KvUnit
) -> None:
    """Also one that parted from another inside a block."""
    with host(server, next(folders), unit) as a, host(server, next(folders), unit) as b:
        ask(a, SYSTEM, question("Who was Hannibal?"))
        first = question("When did Rome fall? " * 12)
        answer, lookup = ask(a, SYSTEM, first)
        assert 0 < lookup.reused_tokens < lookup.prompt_tokens
        said = [SYSTEM, first, Message("assistant", answer)]
        _, lookup = ask(b, *said, question("Why?"))
        assert lookup.prompt_tokens - lookup.reused_tokens < 40
        assert {part.source for part in lookup.sources} == {Source.REMOTE, Source.EVALUATED}
        _, lookup = ask(b, *said, question("Why then?"))
        assert lookup.remote_tokens == 0


def test_users_do_not_meet_on_the_way(server: ValkeyServer, folders: Iterator[Path]) -> None:
    with host(server, next(folders)) as a, host(server, next(folders)) as b:
        ask(a, SYSTEM, question("My password is swordfish."), user="alice")
        _, lookup = ask(b, SYSTEM, question("My password is swordfish."), user="bob")
        assert lookup.reused_tokens == 0
        _, lookup = ask(b, SYSTEM, question("My password is swordfish."), user="alice")
        assert lookup.remote_tokens > 0


def test_forgetting_a_user_at_one_host_forgets_it_at_all(server: ValkeyServer, folders: Iterator[Path]) -> None:
    with host(server, next(folders)) as a, host(server, next(folders)) as b:
        ask(a, SYSTEM, question("My password is swordfish."), user="alice")
        ask(b, SYSTEM, question("My password is swordfish."), user="alice")
        a.cache.remove_user("alice")
        assert server.names() == {"ek1:forgotten"}
        _, lookup = ask(b, SYSTEM, question("My password is swordfish, still."), user="alice")
        assert lookup.reused_tokens == 0


def test_what_a_user_removes_is_gone_there_too(server: ValkeyServer, folders: Iterator[Path]) -> None:
    with host(server, next(folders)) as a:
        ask(a, SYSTEM, question("Who was Hannibal?"))
        assert server.names()
        for entry in a.cache.entries():
            a.cache.remove(entry.id)
        a.scheduler.store.flush()
        assert not server.names()
