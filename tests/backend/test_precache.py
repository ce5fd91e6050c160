"""What will be asked for is ready: declared prefixes, prefixes of open conversations, and nothing for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from emberkeep.backend.local import LocalBackend
from emberkeep.config.kinds import Lifetimes
from emberkeep.config.settings import Config
from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.types.events import Completed
from emberkeep.types.lineage import SHARED, Lineage, private_namespace
from emberkeep.types.request import Message, Request, Sampling, Tool, Ttl
from helpers.scheduling import PATIENCE, Gate, Unmeasured
from helpers.scripted_backend import end_of, fake_backend, read_events, settle
from helpers.waiting import eventually

SYSTEM = "You are the assistant of a small library that is open from nine to five. " * 6

PREFIX = Request(messages=(Message("system", SYSTEM),), user=SHARED, namespace=SHARED, max_tokens=0).decided(
    is_prefix=True
)

ALICE = private_namespace("alice")


@pytest.fixture(params=list(KvUnit))
def unit(request) -> KvUnit:
    return request.param


class House:
    """Backends over one folder; every one has a new engine."""

    def __init__(self, folder: Path, unit: KvUnit) -> None:
        self._folder = folder
        self._unit = unit
        self._open: list[LocalBackend] = []

    def open(self, **settings) -> tuple[LocalBackend, FakeEngine]:
        engine = FakeEngine(cells=1 << 15, kv_unit=self._unit)
        config = Config(data_dir=self._folder, sweep_s=3600, **settings)
        backend = fake_backend(config, engine)
        backend._store.costs.evaluate = Unmeasured()
        self._open.append(backend)
        return backend, engine

    def close(self) -> None:
        for backend in self._open:
            asyncio.run(backend.close())
        self._open.clear()


@pytest.fixture
def house(tmp_path: Path, unit: KvUnit) -> Iterator[House]:
    house = House(tmp_path, unit)
    yield house
    house.close()


def chat(*texts: str, namespace: str = "", system: str = SYSTEM, **more) -> Request:
    roles = ("user", "assistant")
    messages = [Message(roles[i % 2], text) for i, text in enumerate(texts)]
    greedy = Sampling(temperature=0)
    return Request(
        messages=(Message("system", system), *messages), namespace=namespace, sampling=greedy, max_tokens=4, **more
    )


def completed(backend: LocalBackend, request: Request) -> Completed:
    return end_of(read_events(backend, request))[1]


def until_warm(backend: LocalBackend, prefixes: Sequence[Request]) -> None:
    """Declare, and wait until its thread has seen to it."""
    warmer, done = backend.warmer, threading.Event()
    sweep = warmer.sweep

    def swept() -> None:
        sweep()
        if not warmer._due():
            done.set()

    def is_swept() -> bool:
        with warmer._changed:  # the sweep that warms them may have begun before this one took its place
            warmer._changed.notify_all()
        return done.wait(0.05)

    warmer.keep_warm(prefixes)
    warmer.sweep = swept  # type: ignore[method-assign]  # not before: a sweep without them would be taken for theirs
    assert eventually(is_swept)
    settle(backend)


def test_the_first_request_of_a_conversation_evaluates_only_its_own_tokens(house):
    backend, engine = house.open()
    until_warm(backend, [PREFIX])
    warmed = engine.evaluated_tokens
    assert warmed > len(SYSTEM) // 3
    first = completed(backend, chat("When is it open?", namespace=ALICE))
    assert first.usage.cached_tokens == warmed
    assert first.usage.prompt_tokens - warmed < 40


def test_a_declared_prefix_is_there_after_a_restart_without_evaluation(house):
    backend, engine = house.open()
    until_warm(backend, [PREFIX])
    warmed = engine.evaluated_tokens
    house.close()
    backend, engine = house.open()
    until_warm(backend, [PREFIX])
    assert engine.evaluated_tokens == 0
    assert completed(backend, chat("When?")).usage.cached_tokens == warmed


def test_a_prefix_is_touched_before_it_expires_and_an_unused_one_is_not(house):
    backend, engine = house.open()
    until_warm(backend, [PREFIX])
    clock = backend._store._ledger.clock
    (before,) = backend.cache.entries()
    clock._offset += 239
    backend.warmer._prefixes[next(iter(backend.warmer._prefixes))].warmed_at -= 239
    backend.warmer.sweep()
    assert backend.cache.entries()[0].turns == before.turns
    clock._offset += 2
    backend.warmer._prefixes[next(iter(backend.warmer._prefixes))].warmed_at -= 2
    evaluated = engine.evaluated_tokens
    backend.warmer.sweep()
    (after,) = backend.cache.entries()
    assert after.turns == before.turns + 1
    assert after.expires_in_s > 290
    assert engine.evaluated_tokens == evaluated


def test_a_prefix_that_was_lost_is_evaluated_again(house):
    backend, engine = house.open()
    until_warm(backend, [PREFIX])
    warmed = engine.evaluated_tokens
    (entry,) = backend.cache.entries()
    backend.cache.remove(entry.id)
    for prefix in backend.warmer._prefixes.values():
        prefix.warmed_at -= 1000
    backend.warmer.sweep()
    # The sweep of its own thread may have come first, and be at it.
    assert eventually(lambda: engine.evaluated_tokens >= 2 * warmed)
    settle(backend)
    assert engine.evaluated_tokens == 2 * warmed


def test_the_prefix_of_an_open_conversation_is_kept_and_of_a_closed_one_let_go(house):
    backend, _ = house.open()
    completed(backend, chat("When?", namespace=ALICE))
    ((key, prefix),) = backend.warmer._prefixes.items()
    assert key[0] == Lineage(ALICE)
    assert prefix.request.messages == (Message("system", SYSTEM),)
    prefix.asked_at -= 3601
    backend.warmer.sweep()
    assert not backend.warmer._prefixes


def test_only_so_many_conversations_are_looked_after(house):
    backend, _ = house.open()
    for number in range(18):
        completed(backend, chat("When?", system=f"{number} {SYSTEM}"))
    kept = [prefix.request.messages[0].content.split()[0] for prefix in backend.warmer._prefixes.values()]
    assert kept == [str(number) for number in range(2, 18)]


def test_an_idle_conversation_leaves_engine_and_ram_and_comes_back(house):
    backend, _ = house.open()
    told = completed(backend, chat("When?", conversation_id="c"))
    settle(backend)
    backend._store.flush()
    assert backend.scheduler.idle_entries()
    backend._store._ledger.clock._offset += 4000
    backend.warmer.sweep()
    assert backend._store.stats()["warm"]["chunks"] == 0
    backend.scheduler.call(lambda: None).result()
    assert backend.scheduler.idle_entries() == {}
    again = completed(backend, chat("When?", conversation_id="c"))
    assert again.lookup.cold_tokens == again.usage.cached_tokens > told.usage.prompt_tokens * 0.8


def test_where_a_ttl_is_a_promise_an_idle_conversation_is_nowhere_after_it(house, tmp_path):
    backend, _ = house.open(expire=True)
    completed(backend, chat("When is it open?", namespace=ALICE))
    settle(backend)
    backend._store.flush()
    assert backend.scheduler.idle_entries() and list(tmp_path.glob("kv/*/chunks/*/*.kv"))
    assert not backend.warmer._prefixes  # nobody but a request makes it live longer
    backend._store._ledger.clock._offset += 3600
    backend.warmer.sweep()
    backend.scheduler.call(lambda: None).result()
    assert backend.scheduler.stats()["idle_sequences"] == 0
    assert backend._store.held_bytes() == (0, 0)
    assert not list(tmp_path.glob("kv/*/chunks/*/*.kv"))
    again = completed(backend, chat("When is it open?", namespace=ALICE))
    assert again.usage.cached_tokens == 0


def test_what_is_idle_without_a_name_is_let_go_where_a_ttl_is_a_promise(house):
    backend, _ = house.open(expire=True, ram_budget=0, disk_budget=0, ttl=Lifetimes(short=2.0))
    completed(backend, chat("When is it open?", namespace=ALICE))
    settle(backend)
    backend.warmer.sweep()
    backend.scheduler.call(lambda: None).result()
    assert backend.scheduler.stats()["idle_sequences"] == 1
    for sequence in backend.scheduler._slots.idle:
        sequence.entry, sequence.last_used = None, sequence.last_used - 3  # as where nothing of it could be kept
    backend.warmer.sweep()
    backend.scheduler.call(lambda: None).result()
    assert backend.scheduler.stats()["idle_sequences"] == 0


def test_warming_over_messages_and_tools_says_what_it_did(house):
    backend, engine = house.open()
    tool = Tool("find_book", "Finds a book.", {"type": "object"})
    request = Request(messages=(Message("system", SYSTEM),), tools=(tool,), namespace=ALICE, ttl=Ttl.EXTENDED)
    first = asyncio.run(backend.warmer.warm(request))
    settle(backend)
    again = asyncio.run(backend.warmer.warm(request))
    assert first.tokens == engine.evaluated_tokens - (again.tokens - again.cached_tokens)
    assert (first.cached_tokens, first.error) == (0, None)
    assert again.cached_tokens == again.tokens
    (entry,) = backend.cache.entries()
    assert (entry.id, entry.ttl, entry.user, entry.kind) == (first.entry_id, Ttl.EXTENDED, "alice", "prefix")


def test_warming_never_fails_for_a_busy_engine(house):
    backend, _ = house.open(parallel=1, queue=0)
    permit = backend._permits.acquire("", 1)
    warmed = asyncio.run(backend.warmer.warm(PREFIX))
    assert (warmed.tokens, warmed.cached_tokens) == (0, 0)
    assert warmed.error is not None and "already" in warmed.error
    permit.release()


def test_a_users_warm_prefix_is_not_anothers(house):
    backend, _ = house.open()
    asyncio.run(backend.warmer.warm(Request(messages=(Message("system", SYSTEM),), namespace=ALICE)))
    assert completed(backend, chat("When?", namespace=private_namespace("bob"))).usage.cached_tokens == 0
    assert completed(backend, chat("When?", namespace=ALICE)).usage.cached_tokens > len(SYSTEM) // 3


LONG = Request(prompt="harbour " * 400, max_tokens=0).decided(is_prefix=True)


def test_no_request_waits_for_a_prefix_that_is_being_warmed(tmp_path: Path) -> None:
    engine = FakeEngine(batch=128)
    gate = Gate(engine)
    config = Config(data_dir=tmp_path)
    backend = fake_backend(config, engine)
    whole = len(backend.tokenizer.tokenize(str(LONG.prompt), add_special=True, parse_special=True))
    backend.warmer.keep_warm([LONG])
    gate.reached()
    backend.warmer.stop()
    backend.warmer._thread.join(PATIENCE)
    gate.open()
    asyncio.run(backend.close())
    assert 0 < engine.evaluated_tokens < whole
