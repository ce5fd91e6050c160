"""What each owner's stored prompts and answers contain, for drafts.

An owner's text is an `NgramIndex`. When a request of that owner begins it is made of the tokens of the store's
chunks, on a thread of its own. So nothing of it is written anywhere, and it is there again after a restart. A turn
that ends adds what is new in it.

It is as private as the state is: a lookup sees its owner's text and what is shared. What makes state approximate
does not matter here, because a draft changes no answer. What is forgotten, removed or expired takes all of its
owner's text with it: the next request has it made anew of what is still stored. What was merely evicted stays
until then, or for an hour.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import field
from functools import partial
from queue import SimpleQueue
from time import monotonic

import numpy as np

from emberkeep.kv.disk.transfers import give_way
from emberkeep.kv.ledger import Transact
from emberkeep.kv.ngram_index import MAX_MATCH, Continuation, NgramIndex
from emberkeep.kv.tree import Chunk, Cursor, RadixTree, places_along
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import SHARED, Lineage
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")

MAX_TOKENS = 1 << 20
"""Kept of one owner, the latest used. They take 12 bytes each."""
MAX_TOKENS_IN_ALL = 4 * MAX_TOKENS
MAX_OWNERS = 32
"""The least recently used owners go first."""

_SORT_AFTER = 1 << 13
"""Tokens that may be added before they are sorted: they are looked at one by one until then."""
_FRESH_S = 3600.0
"""Text that is older is made anew by the next request: with what other processes have stored since, and without
what was evicted, which may have expired since."""
_REST = 9
"""The thread rests so many times as long as it has worked: the cores are the engine's."""

_NO_TOKENS = np.empty(0, np.int32)


class TokenCorpus:
    """`find`, `add` and `path` belong to the engine's thread; the rest may be called from any."""

    def __init__(self, transact: Transact) -> None:
        self._transact = transact
        self._lock = threading.Lock()
        """Never held while the store's is asked for, nor over work."""
        self._texts: dict[str, _OwnerText] = {}
        """The latest used last."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def prepare(self, lineage: Lineage) -> None:
        """A request begins: have the text of its owner made where there is none."""
        for owner in (lineage.owner, SHARED):
            self._want(owner)

    def path(self, lineage: Lineage, tokens: TokenArray, limit: int) -> TokenArray:
        """What is stored after exactly `tokens`, the way that was used last; at most `limit` tokens. Takes the
        store's lock for a moment."""
        return self._transact(lambda ledger: _stored_after(ledger.tree, lineage, tokens, limit))

    def find(self, lineage: Lineage, context: TokenArray, limit: int) -> Continuation | None:
        """What followed the longest suffix of `context` in what `lineage` may see. None also while that is being
        made: it never waits, and takes no lock."""
        best = None
        for owner in (lineage.owner, SHARED):
            text = self._texts.get(owner)
            found = text.index.find(context, limit) if text and text.index else None
            if found and (best is None or found.matched > best.matched):
                best = found
        return best

    def add(self, lineage: Lineage, tokens: TokenArray, new_from: int) -> None:
        """A turn has ended, which may be kept; what it added begins at `new_from`."""
        text = self._texts.get(lineage.owner)
        if text is None:
            return
        part = np.array(tokens[max(new_from - MAX_MATCH, 0) :], np.int32)
        with self._lock:
            index = text.index
            if text.meanwhile is not None:
                text.meanwhile.append(part)
        if index is not None:
            index.begin(part)
            self._tidy(lineage.owner, text, index)

    def forget(self, owners: Container[str]) -> None:
        """Drop their text at once, also what is being made of it. Quick; the store's lock may be held."""
        with self._lock:
            self._texts = {owner: text for owner, text in self._texts.items() if owner not in owners}

    def stats(self) -> dict[str, int]:
        with self._lock:
            indexes = [text.index for text in self._texts.values() if text.index is not None]
        return {
            "owners": len(indexes),
            "tokens": sum(len(index) for index in indexes),
            "bytes": sum(index.nbytes for index in indexes),
        }

    def close(self) -> None:
        """Blocks for what is being sorted just now: a second at most."""
        self._closing.set()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _want(self, owner: str) -> None:
        with self._lock:
            text = self._texts.pop(owner, None)
            is_fresh = text is not None and monotonic() - text.made_at < _FRESH_S
            self._texts[owner] = text if text and is_fresh else _OwnerText()
            if not is_fresh:
                self._put(partial(self._make, owner, self._texts[owner]))

    def _tidy(self, owner: str, text: _OwnerText, index: NgramIndex) -> None:
        """What has grown is sorted, or made anew without its oldest part."""
        with self._lock:
            if len(index) > MAX_TOKENS * 5 // 4 and text.meanwhile is None:
                text.meanwhile = []
                self._put(partial(self._make, owner, text))
            elif index.unsorted > _SORT_AFTER and not text.is_sorting:
                text.is_sorting = True
                self._put(partial(_sort, text, index))

    # ── on the thread ──

    def _put(self, job: Callable[[], None]) -> None:
        """Must be called with the lock held."""
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-corpus", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        give_way()
        while (job := self._jobs.get()) is not None and not self._closing.is_set():
            began = monotonic()
            try:
                job()
            except Exception:  # a request without drafts is only slower
                log.exception("stored text was not made ready for drafts")
            job = None  # a thread that waits holds nothing of anybody
            self._closing.wait(_REST * (monotonic() - began))

    def _make(self, owner: str, text: _OwnerText) -> None:
        if self._texts.get(owner) is not text:
            return
        text.made_at = monotonic()
        try:
            index = self._index_of(owner)
        except BaseException:
            self.forget({owner})  # the next request tries again
            raise
        with self._lock:
            if self._texts.get(owner) is not text:
                return  # it was forgotten meanwhile
            for part in text.meanwhile or ():
                index.begin(part)
            text.index, text.meanwhile = index, None
            self._shrink(owner)

    def _index_of(self, owner: str) -> NgramIndex:
        # Chunks do not change: the lock is needed for the list only.
        chunks: list[Chunk] = self._transact(lambda ledger: list(ledger.tree))
        index = NgramIndex()
        for segment in _segments(chunk for chunk in chunks if chunk.lineage.owner == owner):
            index.begin(segment)
        index.compact()
        return index

    def _shrink(self, newest: str) -> None:
        """Must be called with the lock held."""
        held = {owner: len(text.index or ()) for owner, text in self._texts.items()}
        for owner in [owner for owner in held if owner != newest]:
            if len(held) <= MAX_OWNERS and sum(held.values()) <= MAX_TOKENS_IN_ALL:
                break
            del self._texts[owner], held[owner]


@dataclass(slots=True, eq=False)
class _OwnerText:
    """What one owner has. After it was forgotten there is another one: what was being made for the first is not
    used."""

    index: NgramIndex | None = None
    meanwhile: list[TokenArray] | None = field(default_factory=list)
    """What was added since an index began to be made; None while none is."""
    is_sorting: bool = False
    made_at: float = field(default_factory=monotonic)


def _sort(text: _OwnerText, index: NgramIndex) -> None:
    try:
        index.compact()
    finally:
        text.is_sorting = False


# ── an owner's chunks as text ──


def _segments(chunks: Iterable[Chunk]) -> Iterator[TokenArray]:
    """Each chunk's tokens once, the latest used last: a chunk is followed by the child that was used last, and
    other branches begin with some tokens of what they grow from."""
    kept = _latest(chunks)
    after = _followers(kept)
    followers = set(after.values())
    branches = [_chain(chunk, after) for chunk in kept if chunk not in followers]
    for branch in sorted(branches, key=lambda branch: branch[-1].last_used):
        yield np.concatenate([_before(branch[0]), *(chunk.tokens for chunk in branch)])


def _latest(chunks: Iterable[Chunk]) -> dict[Chunk, None]:
    """Returns those with tokens that were used last, up to the limit."""
    kept: dict[Chunk, None] = {}
    room = MAX_TOKENS
    for chunk in sorted(chunks, key=lambda chunk: chunk.last_used, reverse=True):
        room -= len(chunk.tokens)
        if room < 0:
            break
        if len(chunk.tokens):
            kept[chunk] = None
    return kept


def _followers(chunks: dict[Chunk, None]) -> dict[Chunk, Chunk]:
    """Which chunk goes on at the end of another: the latest used comes first in `chunks`."""
    after: dict[Chunk, Chunk] = {}
    for chunk in chunks:
        parent = chunk.parent
        if parent in chunks and chunk.take == len(parent.tokens):
            after.setdefault(parent, chunk)
    return after


def _chain(chunk: Chunk, after: dict[Chunk, Chunk]) -> list[Chunk]:
    chain = [chunk]
    while (following := after.get(chain[-1])) is not None:
        chain.append(following)
    return chain


def _before(chunk: Chunk) -> TokenArray:
    parts: list[TokenArray] = [_NO_TOKENS]
    missing, take, above = MAX_MATCH, chunk.take, chunk.parent
    while above is not None and missing > 0:
        parts.append(above.tokens[max(take - missing, 0) : take])
        missing, take, above = missing - len(parts[-1]), above.take, above.parent
    return np.concatenate(parts[::-1])


# ── the tree's own paths ──


def _stored_after(tree: RadixTree, lineage: Lineage, tokens: TokenArray, limit: int) -> TokenArray:
    origins = [Cursor(tree.root(owner), 0, lineage) for owner in (lineage.owner, SHARED)]
    reached = ((origin, *place) for origin in origins for place in places_along(origin, tokens))
    places = [origin.at(chunk, used) for origin, chunk, used in reached if chunk.start + used == len(tokens)]
    parts: list[TokenArray] = [_NO_TOKENS]
    missing = limit
    while missing > 0 and (ways := [way for place in places for way in _ways_on(place)]):
        way = max(ways, key=lambda way: way.chunk.last_used)
        end = _leaves_at(way)
        parts.append(way.chunk.tokens[way.used : end])
        missing -= end - way.used
        places = [way.at(way.chunk, end)]
    return np.concatenate(parts)[:limit]


def _ways_on(place: Cursor) -> Iterator[Cursor]:
    """Branches first: among equals they are taken, since what leads to them is used with them."""
    for group in place.chunk.branches.get(place.used, {}).values():
        yield from (place.at(child, 0) for child in group if place.sees(child) and not child.is_snapshot)
    if place.used < len(place.chunk.tokens):
        yield place


def _leaves_at(way: Cursor) -> int:
    """Where the latest use of a chunk left it for a branch: that was used no earlier than the chunk itself."""
    chunk = way.chunk
    taken = (
        child
        for child in chunk.children()
        if child.take > way.used
        and child.last_used >= chunk.last_used
        and way.sees(child)
        and not child.is_snapshot
    )
    latest = max(taken, key=lambda child: child.last_used, default=None)
    return len(chunk.tokens) if latest is None else latest.take
