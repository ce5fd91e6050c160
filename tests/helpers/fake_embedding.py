"""An embedding engine without a model: a vector depends on every token of its input, and on nothing else."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import numpy as np

from emberkeep.backend.base import ModelCard
from emberkeep.backend.choices import Permits
from emberkeep.backend.embedder import EmbedderSettings, LocalEmbedder
from emberkeep.backend.embedding_backend import EmbeddingBackend
from emberkeep.backend.vector_cache import VectorCache
from emberkeep.engine.embedding import EmbeddingCapabilities, Framing, TokenInput, Vectors
from emberkeep.errors import EngineError
from emberkeep.kv.disk.vector_file import VectorFile
from emberkeep.sched.engine_thread import EngineThread
from emberkeep.types.request import Pooling

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
    settings = EmbedderSettings(Permits(limit), truncates=truncates)
    return _embedder("tiny-embed", engine, EngineThread(), file, settings)


def embedding_backend(engine: FakeEmbeddingEngine, name: str = "tiny-embed") -> EmbeddingBackend:
    thread = EngineThread()
    embedder = _embedder(name, engine, thread, None, EmbedderSettings(Permits(100)))
    return EmbeddingBackend(ModelCard(name, 0, engine.capabilities.context), engine, thread, embedder)


def _embedder(
    name: str,
    engine: FakeEmbeddingEngine,
    thread: EngineThread,
    file: VectorFile | None,
    settings: EmbedderSettings,
) -> LocalEmbedder:
    cache = VectorCache(engine.fingerprint, file)
    return LocalEmbedder(name, engine, thread.submit, cache, settings)


def unit(vector: Vectors) -> Vectors:
    return vector / np.linalg.norm(vector)
