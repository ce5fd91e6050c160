"""Vectors of texts that were seen before: in RAM, and on disk those that belong to no user."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from emberkeep.engine.embedding import TokenInput
from emberkeep.kv.disk.vector_file import VectorFile
from emberkeep.types.request import Vector
from emberkeep.values import dataclass

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
