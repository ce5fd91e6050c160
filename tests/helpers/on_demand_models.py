"""Models that are loaded on demand, over a backend or an embedding engine that does what a test says."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from emberkeep.backend.base import Backend, ModelCard
from emberkeep.backend.embedder import EmbeddingBackend, LocalEmbedder, VectorCache
from emberkeep.backend.limits import Permits
from emberkeep.backend.model_pool import Fits, ModelPool, ModelSource, Need, Report
from emberkeep.backend.on_demand import OnDemandBackend
from emberkeep.engine.embedding import EmbeddingCapabilities, Framing, TokenInput, Vectors
from emberkeep.errors import EmberkeepError, EngineError
from emberkeep.kv.disk.vector_file import VectorFile
from emberkeep.sched.engine_thread import EngineThread
from emberkeep.types.events import Event
from emberkeep.types.request import Pooling, Request
from helpers.scripted_backend import ScriptedBackend, answer

FIRST, SEPARATOR = 256, 257


class ByteVocab:
    size = 258
    pieces = (*(bytes([byte]) for byte in range(256)), b"<s>", b"</s>")

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        return list(text.encode())


class FakeEmbeddingEngine:
    """`steps` are the lengths of all inputs of each step. While `gate` is clear, steps that have `begun` wait."""

    vocab = ByteVocab()
    framing = Framing(head=(FIRST,), tail=(SEPARATOR,), middle=(SEPARATOR,))

    def __init__(
        self,
        *,
        pooling: Pooling = Pooling.MEAN,
        dimension: int = 8,
        context: int = 32,
        batch: int = 64,
        sequences: int = 8,
    ) -> None:
        width = 1 if pooling is Pooling.RANK else dimension
        self.capabilities = EmbeddingCapabilities(width, context, pooling, batch, sequences)
        self.fingerprint = hashlib.sha256(repr(self.capabilities).encode()).digest()
        self.steps: list[list[int]] = []
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self.closed = False

    def embed(self, inputs: Sequence[TokenInput]) -> Vectors:
        assert not self.closed
        self.begun.set()
        self.gate.wait(10)
        self.steps.append([len(each.ids) for each in inputs])
        if self.fails:
            raise EngineError("The engine has failed: try again.")
        return np.stack([self.vector(each) for each in inputs])

    def vector(self, one: TokenInput) -> Vectors:
        """As `embed` gives it for this input."""
        seed = hashlib.sha256(repr((one.ids, one.second)).encode()).digest()
        random = np.random.default_rng(list(seed))
        return (3 * random.standard_normal(self.capabilities.dimension)).astype(np.float32)

    def close(self) -> None:
        self.closed = True


def embedder_over(
    engine: FakeEmbeddingEngine,
    *,
    file: VectorFile | None = None,
    limit: int = 100,
    truncates: bool = False,
) -> LocalEmbedder:
    """Its steps run on a thread of their own, as the real ones do."""
    cache, run = VectorCache(engine.fingerprint, file), EngineThread().submit
    return LocalEmbedder("tiny-embed", engine, run, cache, Permits(limit), truncates=truncates)


def embedding_backend(engine: FakeEmbeddingEngine, name: str = "tiny-embed") -> EmbeddingBackend:
    thread, cache = EngineThread(), VectorCache(engine.fingerprint)
    embedder = LocalEmbedder(name, engine, thread.submit, cache, Permits(100))
    return EmbeddingBackend(ModelCard(name, 0, engine.capabilities.context), engine, thread, embedder)


def unit(vector: Vectors) -> Vectors:
    return vector / np.linalg.norm(vector)


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
