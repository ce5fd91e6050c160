"""A server with several models: installed files, and fake engines in place of what would load them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from emberkeep.backend.local import LocalBackend
from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.models.library import ModelLibrary
from emberkeep.models.pull import pull
from emberkeep.runtime import served_models
from emberkeep.runtime.parts import ModelParts
from emberkeep.runtime.placement import model_bytes
from emberkeep.server.app import create_app
from emberkeep.server.http_server import Server
from emberkeep.server.lifecycle import bind
from emberkeep.server.presence import announce
from helpers import tiny_gguf
from helpers.scripted_backend import fake_backend

WAIT_S = 60.0


def install(data_dir: Path, *names: str) -> None:
    """Different ones."""
    data_dir.mkdir(exist_ok=True)
    for seed, name in enumerate(names):
        file = tiny_gguf.dense(data_dir / f"{name}.gguf", seed=seed)
        pull(str(file), ModelLibrary(data_dir / "models"), name=name)


def with_memory_for_one(config: Config) -> Config:
    models = ModelLibrary(config.data_dir / "models").list()
    return replace(config, model_memory=max(model_bytes(config, model) for model in models))


def load_fake_engines(patch: pytest.MonkeyPatch) -> list[LocalBackend]:
    """What is loaded from now on: each model with a fake engine."""
    loaded: list[LocalBackend] = []

    def open_fake(
        config: Config, parts: ModelParts | None = None, report: Callable[[float], None] | None = None
    ) -> LocalBackend:
        name = ModelLibrary(config.data_dir / "models").resolve(config.local_model).id
        loaded.append(fake_backend(config, FakeEngine(weights=name), name=name, parts=parts))
        return loaded[-1]

    patch.setattr(served_models, "open_local", open_fake)
    patch.setattr(served_models, "open_backend", open_fake)
    return loaded


@contextmanager
def serving(config: Config, models: Models) -> Iterator[httpx.Client]:
    """Over HTTP, from a thread of its own; the models are closed at the end."""
    listener, ready = bind("127.0.0.1", 0), threading.Event()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = Server(create_app(models, config), config)
    loop = asyncio.new_event_loop()

    async def run() -> None:
        await models.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await server.listening.wait()
        ready.set()
        await serving
        await models.close()

    def work() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(WAIT_S)
    try:
        with announce(config.data_dir, url), httpx.Client(base_url=url, timeout=WAIT_S) as client:
            yield client
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(WAIT_S)
        assert not thread.is_alive()
