"""What texts are found by: their meaning, as vectors that lie close together where it is the same, and their
words, folded, stemmed, and in pairs of characters where a script has no spaces.

The vectors are in the file, and one bit of each dimension is in RAM to find the nearest by.
Only an owner's newest turns are looked at, so that a search takes about as long whether there are thousands or
millions; older ones are found by their words. Vectors of another size are another embedder's, and are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
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
from emberkeep.text import encodable
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


# ── words ──

_SCRIPTS = r"\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"

_UNSPACED_BYTES = 3
"""Each of these characters in UTF-8."""

_WORD = re.compile(r"\w+")

LONGEST = 64
"""Characters of a word that people could ask for; what is longer is data."""

Term = tuple[int, int, str]
"""Begin and end in bytes of the UTF-8 text, and the stem."""


def terms_of(text: str) -> list[Term]:
    encoded = encodable(text).encode()
    found = _tokenizer()(encoded, apsw.FTS5_TOKENIZE_DOCUMENT, None, include_colocated=False)
    if not _unspaced().search(text):
        return list(found)
    return [term for begin, end, stem in found for term in _split(begin, end, stem)]


def stems_of(text: str) -> list[str]:
    """Those of `terms_of`, in half the time where no text is without spaces."""
    if _unspaced().search(text):
        return [stem for _, _, stem in terms_of(text)]
    encoded = encodable(text).encode()
    found = _tokenizer()(
        encoded, apsw.FTS5_TOKENIZE_DOCUMENT, None, include_offsets=False, include_colocated=False
    )
    return list(found)


def asked_stems(query: str) -> list[str]:
    """The different words of a question in their order, without those that every question has."""
    stems = [stem for stem in dict.fromkeys(stems_of(query)) if len(stem) <= LONGEST]
    return [stem for stem in stems if stem not in _stop_stems()] or stems


def telling_words(text: str) -> str:
    """The text without what every sentence has; all of it where it has nothing else."""
    return " ".join(word for word in _WORD.findall(text) if word.lower() not in _STOP_WORDS) or text


def _split(begin: int, end: int, stem: str) -> Iterator[Term]:
    """A word as it is, but each two neighbours in a part of it that would have no spaces."""
    if len(stem.encode()) != end - begin:  # it was folded: where its parts are is not known
        yield begin, end, stem
        return
    for run in _runs().finditer(stem):
        if not run["unspaced"] or len(run[0]) == 1:
            yield begin, begin + len(run[0].encode()), run[0]
        else:
            for i in range(len(run[0]) - 1):
                start = begin + _UNSPACED_BYTES * i
                yield start, start + 2 * _UNSPACED_BYTES, run[0][i : i + 2]
        begin += len(run[0].encode())


_LISTED = """
a about again all also am an and any are as at be been but by call called can could did do does earlier for from
get give had has have he her him his how i if in into is it its just know let like may me mention mentioned might
my name named no not of on or our out please remember say said she should so some still talk talked tell than
that the their them then there these they thing things this those to told up us was we were what when where which
who whom whose why will with would you your s t d m re ve ll don
"""

_STOP_WORDS = frozenset(_LISTED.split())


# What takes a while is made when it is first needed: few conversations need any of it.
@cache
def _tokenizer() -> Any:
    return apsw.Connection(":memory:").fts5_tokenizer("porter", ["unicode61", "remove_diacritics", "2"])


@cache
def _unspaced() -> re.Pattern[str]:
    return re.compile(f"[{_SCRIPTS}]")


@cache
def _runs() -> re.Pattern[str]:
    return re.compile(f"(?P<unspaced>[{_SCRIPTS}]+)|[^{_SCRIPTS}]+")


@cache
def _stop_stems() -> frozenset[str]:
    return frozenset(stems_of(_LISTED))
