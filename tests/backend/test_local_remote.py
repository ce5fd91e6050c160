"""Hosts that share a server: a prompt whose beginning another host has computed is evaluated from its end on."""

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

from emberkeep.backend.local import LocalBackend
from emberkeep.config.settings import Config
from emberkeep.engine.base import KvUnit, Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.kv.remote.link import RemoteSettings
from emberkeep.types.events import Completed, LookupRecord, Source
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Message, Request, Sampling
from helpers.scripted_backend import end_of, fake_backend, read_events, settle, text_of
from helpers.valkey_server import ValkeyServer, running_valkey

SYSTEM = Message("system", "You are a patient teacher of history. " * 20)
GREEDY = Sampling(temperature=0)
UNITS = [KvUnit.RANGE, KvUnit.SNAPSHOT, KvUnit.BOTH]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture(autouse=True)
def empty(server: ValkeyServer) -> None:
    server.client.flushall()


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
