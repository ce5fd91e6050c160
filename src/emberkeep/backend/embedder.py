"""Models that embed or rank: texts to tokens, vectors that are known, and steps that many requests share."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import field
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np

from emberkeep.backend.base import EmbeddingShape, EmptyCache, Extras, ModelCard, no_embeddings, no_ranks
from emberkeep.backend.limits import Permits
from emberkeep.engine.embedding import EmbeddingEngine, TokenInput, Vectors
from emberkeep.errors import InputTooLong, InvalidField, Overloaded, RequestError
from emberkeep.kv.disk.vector_file import VectorFile
from emberkeep.kv.forgetting import Holders
from emberkeep.sched.engine_thread import SHUTTING_DOWN, EngineThread
from emberkeep.types.events import Events
from emberkeep.types.request import (
    Embedded,
    EmbeddingInput,
    EmbeddingRequest,
    Json,
    Ranked,
    Request,
    RerankRequest,
    Vector,
)
from emberkeep.values import dataclass

T = TypeVar("T")


EngineRunner = Callable[[Callable[[], Any]], Future[Any]]
"""Runs an action on the thread that owns the engine."""

_COUNTS = ("requests", "inputs", "known_inputs", "prompt_tokens", "evaluated_tokens")


class LocalEmbedder:
    """Belongs to one event loop. Owns the engine and the cache."""

    def __init__(
        self,
        name: str,
        engine: EmbeddingEngine,
        run: EngineRunner,
        cache: VectorCache,
        permits: Permits,
        *,
        truncates: bool = False,
    ) -> None:
        """`truncates`: inputs that are too long are cut, also where a request does not say so."""
        self._name = name
        self._engine = engine
        self._cache = cache
        self._permits = permits
        self._truncates = truncates
        self._batcher = Batcher(engine, run)
        self._counts = dict.fromkeys(_COUNTS, 0)
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
        with self._permits.acquire(request.user):
            truncates = self._truncates if request.truncate is None else request.truncate
            inputs = await asyncio.to_thread(self._tokenize, request.inputs, truncates)
            vectors, cached_tokens = await self._vectors(request.namespace, inputs)
        finish = partial(_finish, dimensions=request.dimensions, normalize=request.normalize)
        tokens = sum(len(each.ids) for each in inputs)
        return Embedded(tuple(map(finish, vectors)), tokens, cached_tokens)

    async def rerank(self, request: RerankRequest) -> Ranked:
        if not self.shape.ranks:
            raise no_ranks(self._name)
        with self._permits.acquire(request.user):
            inputs = await asyncio.to_thread(self._pair, request.query, request.documents, request.truncate)
            vectors, cached_tokens = await self._vectors(request.namespace, inputs)
        return Ranked(
            tuple(float(each[0]) for each in vectors), sum(len(each.ids) for each in inputs), cached_tokens
        )

    def forget(self, owners: Container[str]) -> Future[None] | None:
        """See `VectorCache`."""
        return self._cache.forget(owners)

    def stats(self) -> dict[str, Json]:
        batcher = self._batcher
        return {**self._counts, "waiting": batcher.waiting, "steps": batcher.steps, "cache": self._cache.stats()}

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
        tokens, computed = (sum(len(each.ids) for each in some) for some in (inputs, evaluated))
        counted = (1, len(inputs), len(inputs) - len(evaluated), tokens, computed)
        for name, count in zip(_COUNTS, counted, strict=True):
            self._counts[name] += count


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


class EmbeddingBackend(Extras):
    """Owns the embedder, and the thread of its engine."""

    embedder: LocalEmbedder

    def __init__(
        self,
        card: ModelCard,
        engine: EmbeddingEngine,
        thread: EngineThread,
        embedder: LocalEmbedder,
        holders: Holders | None = None,
    ) -> None:
        self.card = card
        self.holders = holders or Holders()
        self.holders.join("vectors", self, embedder.forget)
        self.embedder = embedder
        self.tokenizer = EmbeddingTokenizer(card.id, engine)
        self.cache = EmptyCache(f"{card.id} keeps vectors, and no entries that have a name.", self.holders)
        self._thread = thread
        self._is_closed = False

    def generate(self, request: Request) -> Events:
        does = "ranks documents (/v1/rerank)" if self.embedder.shape.ranks else "gives embeddings (/v1/embeddings)"
        raise RequestError(f"{self.card.id} {does} and writes no answers: name a model that does.", "model")

    def stats(self) -> dict[str, Json]:
        return {"model": self.card.id, "embeddings": self.embedder.stats()}

    def health(self) -> dict[str, Json]:
        return {"backend": "local", "model": self.card.id}

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.holders.leave(self)
            await self.embedder.close()
            await asyncio.to_thread(self._thread.end)


class EmbeddingTokenizer:
    def __init__(self, name: str, engine: EmbeddingEngine) -> None:
        self._name = name
        self._engine = engine

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids = self._engine.vocab.tokenize(text, parse_special=parse_special)
        framing = self._engine.framing
        return [*framing.head, *ids, *framing.tail] if add_special else ids

    def detokenize(self, tokens: Sequence[int]) -> str:
        return b"".join(self.pieces(tokens)).decode("utf-8", "replace")

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        pieces = self._engine.vocab.pieces
        if any(token >= len(pieces) for token in tokens):
            raise InvalidField("tokens", f"{max(tokens)} is no token of {self._name}, which has {len(pieces)}.")
        return [pieces[token] for token in tokens]

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RequestError(f"{self._name} writes no answers: name a model that does.", "model")

    texts = apply_template = count = _refuse


RAM_BYTES = 64 << 20

_ENTRY_BYTES = 256
"""What an entry in RAM takes besides its vector."""


@dataclass(frozen=True, slots=True)
class _Known:
    owner: str
    vector: Vector

    @property
    def bytes(self) -> int:
        return self.vector.nbytes + _ENTRY_BYTES


class VectorCache:
    """Safe for several threads, but for `close`. Owns `file`, which is used by a thread of its own.

    What named users have embedded is found by themselves only, and kept in RAM only: a text can be guessed from
    its vector, so no trace of it may outlast them.
    """

    def __init__(self, fingerprint: bytes, file: VectorFile | None = None, ram_bytes: int = RAM_BYTES) -> None:
        self._fingerprint = fingerprint
        self._file = file
        self._ram_bytes = ram_bytes
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "emberkeep-vectors") if file else None

    def key(self, namespace: str, one: TokenInput) -> bytes:
        digest = hashlib.blake2b(self._fingerprint, digest_size=20)
        digest.update(f"{len(namespace)} {namespace} {one.second} ".encode())
        digest.update(np.array(one.ids, np.int32).tobytes())
        return digest.digest()

    async def find(self, namespace: str, keys: Iterable[bytes]) -> dict[bytes, Vector]:
        """Those that are known."""
        found: dict[bytes, Vector] = {}
        missing = []
        with self._lock:
            for key in keys:
                if key in self._known:
                    self._known.move_to_end(key)
                    found[key] = self._known[key].vector
                else:
                    missing.append(key)
        if missing and self._file and self._thread and not namespace:
            loop = asyncio.get_running_loop()
            stored = await loop.run_in_executor(self._thread, self._file.find, missing)
            vectors = {key: np.frombuffer(data, np.float32) for key, data in stored.items()}
            self._remember(namespace, vectors)
            found.update(vectors)
        return found

    def add(self, namespace: str, vectors: Mapping[bytes, Vector]) -> None:
        self._remember(namespace, vectors)
        if self._file and self._thread and not namespace:
            self._thread.submit(self._file.add, {key: vector.tobytes() for key, vector in vectors.items()})

    def forget(self, owners: Container[str]) -> Future[None] | None:
        """Leave nothing of these; "" is the owner of all requests without a user. The future is done when nothing
        of them is on disk, where there may be any."""
        with self._lock:
            for key in [key for key, known in self._known.items() if known.owner in owners]:
                self._drop(key)
        return self._thread.submit(self._file.clear) if "" in owners and self._file and self._thread else None

    def stats(self) -> dict[str, int]:
        return {"vectors": len(self._known), "bytes": self._bytes, "budget": self._ram_bytes}

    async def close(self) -> None:
        """What was added is on disk then."""
        if self._file and self._thread:
            thread, self._thread = self._thread, None
            thread.submit(self._file.close)
            await asyncio.to_thread(thread.shutdown)

    def _remember(self, owner: str, vectors: Mapping[bytes, Vector]) -> None:
        with self._lock:
            for key, vector in vectors.items():
                if key in self._known:
                    self._drop(key)
                self._known[key] = _Known(owner, vector)
                self._bytes += self._known[key].bytes
            while self._bytes > self._ram_bytes:
                self._drop(next(iter(self._known)))

    def _drop(self, key: bytes) -> None:
        self._bytes -= self._known.pop(key).bytes
