"""Conversations in a store on disk, put there by the real backend over the fake engine, and a server for them."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from emberkeep.backend.base import ModelCard
from emberkeep.config import Config
from emberkeep.engine.fake import CHATML, FakeEngine
from emberkeep.library import Emberkeep
from emberkeep.runtime import assemble
from emberkeep.server.app import create_app
from emberkeep.server.http_server import Server
from emberkeep.server.lifecycle import bind
from emberkeep.server.presence import announce
from emberkeep.types import Json

WAIT_S = 20.0


def asking(question: str) -> list[Json]:
    return [{"role": "user", "content": question}]


def open_emberkeep(config: Config, model: str = "fake") -> Emberkeep:
    """Models of different names have different weights, and so stores of their own."""
    engine = FakeEngine(weights=model)
    return Emberkeep(assemble(config, engine, CHATML, ModelCard(model, 0, engine.capabilities.context)))


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
    engine = FakeEngine(weights=model)
    backend = assemble(config, engine, CHATML, ModelCard(model, 0, engine.capabilities.context))
    loop, ready = asyncio.new_event_loop(), threading.Event()
    with bind("127.0.0.1", 0) as listener:
        server = Server(create_app(backend, config), config, on_ready=ready.set)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        async def run() -> None:
            await server.serve(sockets=[listener])
            await backend.close()

        def in_thread() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(run())

        thread = threading.Thread(target=in_thread, daemon=True)
        thread.start()
        assert ready.wait(WAIT_S)
        try:
            with announce(config.data_dir, url):
                yield url
        finally:
            loop.call_soon_threadsafe(server.stop)
            thread.join(WAIT_S)
            assert not thread.is_alive()
