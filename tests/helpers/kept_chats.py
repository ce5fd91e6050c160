"""Conversations in a store on disk, put there by the real backend over the fake engine, and a server for them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.server.presence import announce
from emberkeep.types.request import Json
from helpers.scripted_backend import fake_backend
from helpers.scripted_server import running

WAIT_S = 60.0


def asking(question: str) -> list[Json]:
    return [{"role": "user", "content": question}]


def open_emberkeep(config: Config, model: str = "fake") -> Emberkeep:
    """Models of different names have different weights, and so stores of their own."""
    return Emberkeep(fake_backend(config, FakeEngine(weights=model), name=model))


def keep(data_dir: Path, *questions: str, model: str = "fake", user: str = "") -> None:
    """Ask and end, so that everything is on disk; each question is a conversation of its own."""
    with open_emberkeep(Config(data_dir=data_dir), model) as llm:
        for question in questions:
            llm.chat(asking(question), max_tokens=4, user=user)


def let_time_pass(data_dir: Path, seconds: float) -> None:
    """As if the stores had been closed for so long."""
    for path in (data_dir / "kv").glob("*/index.db"):
        with sqlite3.connect(path) as db:
            db.execute("UPDATE meta SET value = value - ? WHERE name = 'wall'", (seconds,))
        db.close()


@contextmanager
def serving(config: Config, model: str = "fake") -> Iterator[str]:
    """A server in a thread, announced in its data folder; gives its address."""
    backend = fake_backend(config, FakeEngine(weights=model), name=model)
    try:
        with running(backend, config) as server, announce(config.data_dir, server.url):
            yield server.url
    finally:
        asyncio.run(backend.close())
