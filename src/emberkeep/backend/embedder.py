"""Texts to vectors over an embedding engine: tokens, what is known already, and steps that many requests share."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import field
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from emberkeep.backend.base import EmbeddingShape
from emberkeep.backend.capabilities import no_embeddings, no_ranks
from emberkeep.backend.choices import Permits
from emberkeep.backend.vector_cache import VectorCache
from emberkeep.engine.embedding import EmbeddingEngine, TokenInput, Vectors
from emberkeep.errors import InputTooLong, InvalidField, Overloaded
from emberkeep.sched.engine_thread import SHUTTING_DOWN
from emberkeep.types.request import Embedded, EmbeddingInput, EmbeddingRequest, Json, Ranked, RerankRequest, Vector
from emberkeep.values import dataclass

T = TypeVar("T")


class EngineRunner(Protocol):
    """Runs an action on the thread that owns the engine."""

    def __call__(self, action: Callable[[], T]) -> Future[T]: ...


@dataclass(frozen=True, slots=True)
class EmbedderSettings:
    permits: Permits
    truncates: bool = False
    """Inputs that are too long are cut, also where a request does not say so."""


@dataclass(slots=True)
class _Counters:
    requests: int = 0
    inputs: int = 0
    known_inputs: int = 0
    prompt_tokens: int = 0
    evaluated_tokens: int = 0


class LocalEmbedder:
    """Belongs to one event loop. Owns the engine and the cache."""

    def __init__(
        self, name: str, engine: EmbeddingEngine, run: EngineRunner, cache: VectorCache, settings: EmbedderSettings
    ) -> None:
        self._name = name
        self._engine = engine
        self._cache = cache
        self._settings = settings
        self._batcher = Batcher(engine, run)
        self._counters = _Counters()
        self._run = run
        self._is_closed = False
        shape = engine.capabilities
        self.shape = EmbeddingShape(shape.dimension, shape.context, shape.pooling)

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        if self.shape.ranks:
            raise no_embeddings(self._name)
        whole = self.shape.dimension
        if request.dimensions is not None and request.dimensions > whole:
            raise InvalidField("dimensions", f"{self._name} has {whole}: give {whole} or fewer.")
        with self._settings.permits.acquire(request.user):
            truncates = self._settings.truncates if request.truncate is None else request.truncate
            inputs = await asyncio.to_thread(self._tokenize, request.inputs, truncates)
            vectors, cached_tokens = await self._vectors(request.namespace, inputs)
        finish = partial(_finish, dimensions=request.dimensions, normalize=request.normalize)
        tokens = sum(len(each.ids) for each in inputs)
        return Embedded(tuple(map(finish, vectors)), tokens, cached_tokens)

    async def rerank(self, request: RerankRequest) -> Ranked:
        if not self.shape.ranks:
            raise no_ranks(self._name)
        with self._settings.permits.acquire(request.user):
            inputs = await asyncio.to_thread(self._pair, request.query, request.documents, request.truncate)
            vectors, cached_tokens = await self._vectors(request.namespace, inputs)
        return Ranked(
            tuple(float(each[0]) for each in vectors), sum(len(each.ids) for each in inputs), cached_tokens
        )

    def forget(self, owners: Container[str]) -> Future[None] | None:
        """See `VectorCache`."""
        return self._cache.forget(owners)

    def stats(self) -> dict[str, Json]:
        counters = {name: getattr(self._counters, name) for name in _Counters.__slots__}
        batcher = self._batcher
        return {**counters, "waiting": batcher.waiting, "steps": batcher.steps, "cache": self._cache.stats()}

    async def close(self) -> None:
        """Take no new work, fail what was not begun, and write what is not yet on disk. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            await self._batcher.close()
            await asyncio.wrap_future(self._run(self._engine.close))
            await self._cache.close()

    # ── tokens ──

    def _tokenize(self, texts: Sequence[EmbeddingInput], truncates: bool) -> list[TokenInput]:
        """Blocks. Raises RequestError."""
        return [self._fit(number, self._tokens(number, text), truncates) for number, text in enumerate(texts)]

    def _tokens(self, number: int, text: EmbeddingInput) -> TokenInput:
        if isinstance(text, str):
            return self._engine.framing.text(self._engine.vocab, text)
        if max(text) >= self._engine.vocab.size:
            raise InvalidField(
                f"input[{number}]",
                f"{max(text)} is no token of {self._name}, which has {self._engine.vocab.size}: send the text "
                "itself, since other models have other tokens.",
            )
        return TokenInput(text)

    def _pair(self, query: str, documents: Sequence[str], truncates: bool) -> list[TokenInput]:
        """Blocks. Raises RequestError."""
        engine = self._engine
        pairs = (engine.framing.pair(engine.vocab, query, document) for document in documents)
        return [self._fit(number, pair, truncates, "documents") for number, pair in enumerate(pairs)]

    def _fit(self, number: int, one: TokenInput, truncates: bool, param: str = "input") -> TokenInput:
        if len(one.ids) > self.shape.context and not truncates:
            raise InputTooLong(number, len(one.ids), self.shape.context, param)
        return one.cut(self.shape.context)

    # ── vectors ──

    async def _vectors(self, namespace: str, inputs: Sequence[TokenInput]) -> tuple[list[Vector], int]:
        """In the order of the inputs, and how many tokens those have that were known."""
        keyed = [(self._cache.key(namespace, each), each) for each in inputs]
        found = await self._cache.find(namespace, dict.fromkeys(key for key, _ in keyed))
        missing = {key: each for key, each in keyed if key not in found}
        known = sum(len(each.ids) for key, each in keyed if key in found)
        if missing:
            computed = await self._batcher.compute(list(missing.values()))
            fresh = dict(zip(missing, computed, strict=True))
            self._cache.add(namespace, fresh)
            found.update(fresh)
        self._count(inputs, missing.values())
        return [found[key] for key, _ in keyed], known

    def _count(self, inputs: Sequence[TokenInput], evaluated: Collection[TokenInput]) -> None:
        self._counters.requests += 1
        self._counters.inputs += len(inputs)
        self._counters.known_inputs += len(inputs) - len(evaluated)
        self._counters.prompt_tokens += sum(len(each.ids) for each in inputs)
        self._counters.evaluated_tokens += sum(len(each.ids) for each in evaluated)


def _finish(vector: Vector, *, dimensions: int | None, normalize: bool) -> Vector:
    vector = vector[:dimensions]
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if normalize and length else vector


# ── steps ──


@dataclass(eq=False, slots=True)
class _Job:
    """The inputs of one request."""

    waiting: deque[tuple[int, TokenInput]]
    """Inputs with their places, the longest first: those of one step have about the same length then."""
    vectors: list[Vector | None]
    done: asyncio.Future[None]
    open: int = field(init=False)

    def __post_init__(self) -> None:
        self.open = len(self.vectors)


class Batcher:
    """Steps of the engine, each filled with inputs of all requests that wait, in turn. Belongs to one loop."""

    def __init__(self, engine: EmbeddingEngine, run: EngineRunner) -> None:
        self._engine = engine
        self._run = run
        self._jobs: deque[_Job] = deque()
        self._working: asyncio.Task[None] | None = None
        self._is_closed = False
        self.steps = 0

    @property
    def waiting(self) -> int:
        """Inputs that are in no step yet."""
        return sum(len(job.waiting) for job in self._jobs)

    async def compute(self, inputs: Sequence[TokenInput]) -> list[Vector]:
        """One vector for each. Raises what the engine raises, and Overloaded once it was closed."""
        if self._is_closed:
            raise Overloaded(SHUTTING_DOWN)
        by_length = sorted(enumerate(inputs), key=lambda item: -len(item[1].ids))
        job = _Job(deque(by_length), [None] * len(inputs), asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        try:
            await job.done
        finally:
            job.waiting.clear()  # if it was cancelled, nothing more of it is computed
        return [vector for vector in job.vectors if vector is not None]

    async def close(self) -> None:
        """Waits for the step that is under way."""
        self._is_closed = True
        _fail(self._jobs, Overloaded(SHUTTING_DOWN))
        if self._working is not None:
            await self._working

    async def _work(self) -> None:
        while step := self._next_step():
            inputs = [each for _, _, each in step]
            try:
                vectors = await asyncio.wrap_future(self._run(partial(self._engine.embed, inputs)))
            except Exception as error:
                _fail({job for job, _, _ in step}, error)
            else:
                self.steps += 1
                _deliver(step, vectors)

    def _next_step(self) -> list[tuple[_Job, int, TokenInput]]:
        shape = self._engine.capabilities
        step: list[tuple[_Job, int, TokenInput]] = []
        longest = 0
        while self._jobs and len(step) < shape.sequences:
            job = self._jobs[0]
            if not job.waiting:
                self._jobs.popleft()
                continue
            place, each = job.waiting[0]
            longest = max(longest, len(each.ids))
            # Some engines compute every input as if it were as long as the longest.
            if step and longest * (len(step) + 1) > shape.batch:
                break
            job.waiting.popleft()
            step.append((job, place, each))
            self._jobs.rotate(-1)
        return step


def _deliver(step: Sequence[tuple[_Job, int, TokenInput]], vectors: Vectors) -> None:
    for (job, place, _), vector in zip(step, vectors, strict=True):
        job.vectors[place] = vector
        job.open -= 1
        if not job.open and not job.done.done():
            job.done.set_result(None)


def _fail(jobs: Iterable[_Job], error: Exception) -> None:
    for job in jobs:
        job.waiting.clear()
        if not job.done.done():
            job.done.set_exception(error)
