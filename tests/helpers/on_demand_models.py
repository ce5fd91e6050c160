"""Models that are loaded on demand, over a backend that does what a test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from emberkeep.backend.base import Backend, ModelCard
from emberkeep.backend.model_pool import Fits, ModelPool, ModelSource, Need, Report
from emberkeep.backend.on_demand import OnDemandBackend
from emberkeep.errors import EmberkeepError
from emberkeep.types.events import Event
from emberkeep.types.request import Request
from helpers.on_demand_models import FakeEmbeddingEngine, embedding_backend
from helpers.scripted_backend import ScriptedBackend, answer

HELD = 10.0


class Held(ScriptedBackend):
    """Answers when it is let go, and is closed when it may be."""

    def __init__(self, name: str) -> None:
        super().__init__(lambda request: answer(f"{name} says hello"))
        self.go = asyncio.Event()
        self.go.set()
        self.may_close = asyncio.Event()
        self.may_close.set()
        self.embedder = None

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        await self.go.wait()
        async for event in super().generate(request):
            yield event

    async def close(self) -> None:
        await self.may_close.wait()
        await super().close()


class Loadable:
    """A model, and what happened to it."""

    def __init__(
        self,
        name: str,
        pool: ModelPool,
        *,
        size: int = 1,
        keep_alive_s: float | None = None,
        is_pinned: bool = False,
        waiting: int = 64,
        is_loaded: bool = False,
        deadline_s: float | None = None,
    ) -> None:
        self.name = name
        self.size = size
        self.file_error: EmberkeepError | None = None
        self.loaded: list[Held] = []
        self.error: EmberkeepError | None = None
        self.may_load = threading.Event()
        self.may_load.set()
        source = ModelSource(
            name,
            ModelCard(name, 0, 0),
            self._open,
            self._needs,
            keep_alive_s=keep_alive_s,
            is_pinned=is_pinned,
            waiting=waiting,
            deadline_s=deadline_s,
        )
        self.backend = OnDemandBackend(source, pool, self._open(lambda *_: None) if is_loaded else None)

    @property
    def latest(self) -> Held:
        return self.loaded[-1]

    def _needs(self) -> Need:
        if self.file_error:
            raise self.file_error
        return Need(self.size)

    def _open(self, report: Report) -> Backend:
        report(f"Loading {self.name}", 1, 2)
        assert self.may_load.wait(HELD)
        if self.error:
            raise self.error
        self.loaded.append(Held(self.name))
        return self.loaded[-1]


def embedding_on_demand(
    engine_of: Callable[[], FakeEmbeddingEngine], keep_alive_s: float | None, name: str = "tiny-embed"
) -> OnDemandBackend:
    """With another engine each time that it is loaded."""
    source = ModelSource(
        name,
        ModelCard(name, 0, 0),
        lambda report: embedding_backend(engine_of(), name),
        lambda: Need(1),
        keep_alive_s=keep_alive_s,
    )
    return OnDemandBackend(source, pool_of(1))


def room_for(size: int) -> Fits:
    return lambda new, held: new.ram + sum(need.ram for need in held) <= size


def pool_of(size: int, patience_s: float = HELD) -> ModelPool:
    return ModelPool(room_for(size), patience_s)


async def until(condition: Callable[[], object]) -> None:
    """Let others go on until it holds."""
    async with asyncio.timeout(HELD):
        while not condition():
            await asyncio.sleep(0.001)


async def ask(model: Loadable, request: Request) -> Sequence[Event]:
    return [event async for event in model.backend.generate(request)]
