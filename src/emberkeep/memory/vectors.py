"""Turns by their meaning: texts as vectors, which lie close together where they mean the same.

The vectors are in the file, and one bit of each dimension is in RAM to find the nearest by.
Only an owner's newest turns are looked at, so that a search takes about as long whether there are thousands or
millions; older ones are found by their words. Vectors of another size are another embedder's, and are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import numpy.typing as npt

from emberkeep.errors import MemoryFailed
from emberkeep.latest import Latest
from emberkeep.memory.database import rows, value
from emberkeep.memory.terms import telling_words
from emberkeep.values import dataclass

_NEWEST = 200_000
"""Vectors of an owner that are compared: 6 MB of RAM, and about 3 ms."""
_OWNERS = 8
"""So many owners' bits are kept in RAM."""
_NEAREST = 256
"""By their bits; among those the nearest are picked by the vectors themselves."""
_NEVER = 1 << 30
"""More bits than a vector has."""
_SCALE = 127
_CATCH_UP = 1000
"""Among so many of the newest turns, those without a vector get one when something is searched."""

_MODEL = "l2_supercat"
_MOST_CHARS = 4000
"""A longer text is cut: a vector is an average, in which long texts all look alike."""

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Embed = Callable[[Sequence[str]], Floats]
"""One row for each text, a unit vector; a text without any known word has a row of zeros."""


def find_embedder() -> Embed | None:
    """An embedder that loads its model when it is first called. None where its package is not installed."""
    return _embed if find_spec("wordllama") else None


def _embed(texts: Sequence[str]) -> Floats:
    """Blocks for a second the first time. Raises MemoryFailed."""
    # The words of every sentence would draw all vectors together.
    vectors = np.asarray(_model().embed([telling_words(text[:_MOST_CHARS]) for text in texts]), np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Floats = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    return unit


@cache
def _model() -> Any:
    """Word vectors, about 16 MB that come with the package. Raises MemoryFailed."""
    try:
        import wordllama

        # Its own folder is where its files are; anywhere else it would download them.
        folder = Path(wordllama.__file__).parent
        return wordllama.WordLlama.load(_MODEL, cache_dir=folder, disable_download=True)
    except Exception as error:
        raise MemoryFailed(f"wordllama cannot be loaded ({error}): install it again, or uninstall it.") from error


@dataclass(frozen=True, slots=True)
class _Known:
    """One owner's vectors, the oldest first."""

    ids: Ids
    conversations: Ids
    """0 for a stored answer."""
    bits: npt.NDArray[np.uint64]
    """Rows of 64 dimensions, and a column for each vector: that is how they are counted fastest."""


class Vectors:
    """Used by one thread at a time."""

    def __init__(self, embed: Embed) -> None:
        self._embed = embed
        self._known = Latest[int, _Known](_OWNERS)

    def embed(self, texts: Sequence[str]) -> Floats:
        return self._embed(texts)

    def forget(self) -> None:
        """What is in RAM."""
        self._known.clear()

    def nearest(
        self, db: apsw.Connection, owner: int, conversation: int | None, query: Floats, exclude: Collection[int]
    ) -> list[int]:
        """Ids of the turns that could mean the same, in no order."""
        known = self._refresh(db, owner, len(query))
        if known is None:
            return []
        differing = np.zeros(len(known.ids), np.int32)
        for column, bits in zip(known.bits, _bits(query), strict=True):
            differing += np.bitwise_count(column ^ bits)
        if conversation is not None:
            differing[known.conversations != conversation] = _NEVER
        differing[np.isin(known.ids, list(exclude))] = _NEVER
        count = min(_NEAREST, len(known.ids))
        best = np.argpartition(differing, count - 1)[:count]
        return [int(id_) for id_ in known.ids[best][differing[best] < _NEVER]]

    def _refresh(self, db: apsw.Connection, owner: int, size: int) -> _Known | None:
        """Adds what was written since the last search, here or by another process; None where there is nothing."""
        known = self._known.pop(owner, None)
        sql = """SELECT id, coalesce(conversation, 0), vector FROM vectors
                 WHERE owner = ? AND id > ? AND length(vector) = ? ORDER BY id DESC LIMIT ?"""
        found = rows(db, sql, owner, int(known.ids[-1]) if known is not None else 0, size, _NEWEST)[::-1]
        if found:
            ids, conversations = (np.array([row[i] for row in found], np.int64) for i in (0, 1))
            vectors = np.frombuffer(b"".join(row[2] for row in found), np.int8).reshape(len(found), -1)
            known = _append(known, _Known(ids, conversations, np.ascontiguousarray(_bits(vectors).T)))
        if known is not None:
            self._known[owner] = known
        return known


def similarities(db: apsw.Connection, ids: Sequence[int], query: Floats) -> dict[int, float]:
    """Cosines with the turns among `ids` that have a vector."""
    sql = f"SELECT id, vector FROM vectors WHERE length(vector) = ? AND id IN ({','.join('?' * len(ids))})"
    found = rows(db, sql, len(query), *ids)
    if not found:
        return {}
    vectors = np.frombuffer(b"".join(vector for _, vector in found), np.int8).reshape(len(found), -1)
    cosines = vectors.astype(np.float32) @ query / _SCALE
    return {id_: float(cosine) for (id_, _), cosine in zip(found, cosines, strict=True)}


def add_vectors(db: apsw.Connection, ids: Sequence[int], vectors: Floats) -> None:
    """Adds one for each turn that is still there."""
    sql = """INSERT OR REPLACE INTO vectors (id, owner, conversation, vector)
             SELECT id, owner, conversation, ?2 FROM turns WHERE id = ?1"""
    packed = np.rint(vectors * _SCALE).astype(np.int8)
    db.executemany(sql, [(id_, row.tobytes()) for id_, row in zip(ids, packed, strict=True)])


def turns_without_vectors(db: apsw.Connection) -> list[tuple[int, str]]:
    """The ids and texts of new turns that have no vector yet."""
    newest = value(db, "SELECT max(id) FROM turns") or 0
    sql = """SELECT t.id, user_text || char(10) || assistant_text
             FROM turns AS t LEFT JOIN vectors AS v ON v.id = t.id WHERE t.id > ? AND v.id IS NULL"""
    return rows(db, sql, newest - _CATCH_UP)


def _bits(vectors: npt.NDArray[np.int8] | Floats) -> npt.NDArray[np.uint64]:
    """On which side of zero each dimension is; as many as are needed to fill up 64 more."""
    packed = np.packbits(vectors > 0, axis=-1)
    missing = -packed.shape[-1] % np.dtype(np.uint64).itemsize
    return np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, missing)]).view(np.uint64)


def _append(old: _Known | None, new: _Known) -> _Known:
    if old is None:
        return new
    return _Known(
        np.concatenate([old.ids, new.ids])[-_NEWEST:],
        np.concatenate([old.conversations, new.conversations])[-_NEWEST:],
        np.concatenate([old.bits, new.bits], axis=1)[:, -_NEWEST:],
    )
