"""The same through a whole backend: requests of users who never come again leave nothing that grows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.kv.entries import Ghosts
from emberkeep.types.events import Completed
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Message, Request, Sampling
from helpers.chance import times
from helpers.growth import descriptors, sizes_below, threads
from helpers.scripted_backend import fake_backend
from helpers.waiting import eventually

USERS = times(160)
REMEMBERED = USERS // 8


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr("emberkeep.kv.entries.MOST_ENTRIES", REMEMBERED)
    monkeypatch.setattr("emberkeep.kv.entries.CHANGES_LIMIT", REMEMBERED)
    monkeypatch.setattr("emberkeep.kv.entries.Ghosts", lambda: Ghosts(REMEMBERED))
    monkeypatch.setattr("emberkeep.sched.slots.REMEMBERED", REMEMBERED)
    monkeypatch.setattr("emberkeep.session.sessions._REMEMBERED", REMEMBERED)
    monkeypatch.setattr("emberkeep.session.hygiene._REMEMBERED", REMEMBERED)
    monkeypatch.setattr("emberkeep.session.hygiene._PARTS_REMEMBERED", REMEMBERED)
    monkeypatch.setattr("emberkeep.chat.prompt_tokens._REMEMBERED_CHARS", 2000)


def asked(number: int) -> Request:
    user = f"user {number}"
    messages = (Message("system", f"You help {user}. " * 4), Message("user", f"Question {number} of {user}?"))
    return Request(
        messages=messages,
        user=user,
        namespace=private_namespace(user),
        conversation_id=f"talk {number}" if number % 2 else None,
        sampling=Sampling(temperature=0),
        max_tokens=4,
    )


@pytest.mark.slow
@pytest.mark.parametrize("disk", [0, 50_000], ids=["disk off", "disk on"])
def test_requests_of_users_who_come_once_leave_nothing_that_grows(tmp_path: Path, disk: int) -> None:
    config = Config(data_dir=tmp_path, ram_budget=40_000, disk_budget=disk, sweep_s=3600, parallel=2)
    backend = fake_backend(config, FakeEngine(cells=1 << 13, context=1024))

    async def visit(numbers: range) -> None:
        for number in numbers:
            [*_, last] = [event async for event in backend.generate(asked(number))]
            assert isinstance(last, Completed)
        backend._store.flush()  # what is being written at the moment has not grown
        assert eventually(backend._store.corpus._jobs.empty)

    asyncio.run(visit(range(USERS // 2)))
    half, open_files, running = sizes_below(backend), descriptors(), threads()
    asyncio.run(visit(range(USERS // 2, USERS)))
    grown = {
        path: (half.get(path, 0), size)
        for path, size in sizes_below(backend).items()
        if size > max(1.25 * half.get(path, 0), REMEMBERED) + 8
    }
    assert grown == {}
    assert descriptors() <= open_files + 3 and threads() <= running + 1
    assert len(backend.stats()["recent_lookups"]) <= 32
    asyncio.run(backend.close())
