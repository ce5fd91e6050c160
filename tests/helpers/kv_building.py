"""Building and checking stores whose payloads are what the fake engine computes for their tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from emberkeep.engine.base import Rows
from emberkeep.engine.fake import FakeEngine, FakeVocab
from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.disk.transfers import FetchState
from emberkeep.kv.ledger import Ledger
from emberkeep.kv.policy import CHUNK_TOKENS
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.kv.tree import Chunk, Cursor, Made, Span
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import Lineage

FINGERPRINT = FakeEngine().fingerprint
PIECES = FakeVocab().pieces
PLENTY = 1 << 30


class Time:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def pass_(self, seconds: float) -> None:
        self.seconds += seconds


def ids(*values: int) -> TokenArray:
    return np.array(values, np.int32)


def prompt(length: int, *, seed: int = 0, start: Sequence[int] = ()) -> TokenArray:
    """Printable tokens: `start`, then pseudo-random ones."""
    random = np.random.default_rng(seed)
    rest = random.integers(32, 127, length - len(start), dtype=np.int32)
    return np.concatenate([np.array(start, np.int32), rest])


def exported(tokens: TokenArray, start: int, end: int) -> memoryview:
    """The payload of [start, end) of a sequence that begins with `tokens`."""
    engine = FakeEngine(cells=1 << 20, context=1 << 20)
    engine.evaluate([Rows(0, 0, tokens[:end], outputs=0)])
    (payload,) = engine.export_kv(0, (start, end)).payloads()
    return payload


LONG = prompt(1000)
CHUNK_BYTES = len(exported(LONG, 0, 128))


def new_store(
    folder: Path | None, *, warm: int = PLENTY, cold: int = PLENTY, fingerprint: bytes = FINGERPRINT
) -> KvStore:
    files = ChunkFiles(folder, fingerprint) if folder else None
    return KvStore(fingerprint, Budgets(warm, cold), files)


def reopened(store: KvStore, folder: Path, **budgets: int) -> KvStore:
    store.close()
    return new_store(folder, **budgets)


def only_on_disk(folder: Path, *prompts: TokenArray) -> KvStore:
    """A store that has just been opened: everything is cold."""
    store = new_store(folder)
    for tokens in prompts:
        put(store, tokens)
    return reopened(store, folder)


def put(
    store: KvStore,
    tokens: TokenArray,
    *,
    namespace: str | Lineage = "",
    size: int = CHUNK_TOKENS,
    sampled: tuple[Span, ...] = (),
    fork: bool = False,
    made: Made = Made.UNKNOWN,
) -> Cursor:
    """Store `tokens` as a sequence at rest does: full chunks, then a tail."""
    cursor, before = store.origin(lineage_of(namespace)), -1
    while before < (cursor := store.advance(cursor, tokens)).position < len(tokens):
        before = cursor.position
        begin = store.growth_point(cursor)
        end = min(begin.position + size, len(tokens))
        part = tokens[begin.position : end]
        payload = exported(tokens, begin.position, end)
        cursor = store.insert(begin, part, payload, sampled, fork=fork and end == len(tokens), made=made)
    return cursor


def lineage_of(namespace: str | Lineage) -> Lineage:
    """A text is the owner of something exact."""
    return Lineage(namespace) if isinstance(namespace, str) else namespace


def load(store: KvStore, tokens: TokenArray, *, namespace: str | Lineage = "") -> int:
    """Match, fetch and check every payload; returns how many leading tokens have right state."""
    match = store.match(lineage_of(namespace), tokens)
    good = 0
    try:
        for segment in match.segments:
            state, payload = fetched(store, segment.chunk), segment.chunk.payload
            if state is not FetchState.READY or payload is None:
                break
            assert payload == right_bytes(segment.chunk)
            assert np.array_equal(path_tokens(segment.chunk)[: segment.end], tokens[: segment.end])
            good = segment.end
    finally:
        store.release(match)
    return good


def fetched(store: KvStore, chunk: Chunk) -> FetchState:
    arrived = threading.Event()
    fetch = store.fetch(chunk, arrived.set)
    if fetch.state is FetchState.PENDING:
        assert arrived.wait(20)
    return fetch.state


def right_bytes(chunk: Chunk) -> memoryview:
    return exported(path_tokens(chunk), chunk.start, chunk.end)


def path_tokens(chunk: Chunk) -> TokenArray:
    """All tokens from position 0 to the end of `chunk`."""
    parts = [chunk.tokens]
    while chunk.parent is not None:
        parts.append(chunk.parent.tokens[: chunk.take])
        chunk = chunk.parent
    return np.concatenate(parts[::-1])


def chunks_of(store: KvStore) -> list[Chunk]:
    return store.transact(lambda ledger: list(ledger.tree))


def disk_bytes(store: KvStore) -> int:
    """What a user sees that the store takes on disk."""
    cold = store.stats()["cold"]
    assert isinstance(cold, dict)
    return int(cold["bytes"] + cold["other_bytes"])


def check_ledger(store: KvStore) -> None:
    """Counters equal what they count, and every chunk can be reached from its root."""
    store.transact(_check_ledger)


def _check_ledger(ledger: Ledger) -> None:
    chunks, entries = list(ledger.tree), ledger.entries
    assert ledger.ram.tally.bytes == sum(len(c.payload) for c in chunks if c.payload is not None)
    assert ledger.disk.bytes == sum(c.bytes for c in chunks if c.on_disk)
    assert all(c.pins >= 0 for c in chunks)
    assert all(c.on_disk or c.payload is not None for c in chunks)
    assert all(root.branches for root in ledger.tree._roots.values())
    assert ledger.to_remove_bytes == sum(ledger.to_remove.values())
    waiting = list(ledger.orphans)
    assert ledger.orphans.bytes == sum(row.bytes for row in waiting)
    on_disk = [*(c.key for c in chunks if c.on_disk), *(row.key for row in waiting), *ledger.to_remove]
    assert len(on_disk) == len(set(on_disk))
    assert ledger.unwritten <= {c.key for c in chunks}
    ending = {(tail.chunk, entry.id) for entry in entries for tail in entry.tails}
    assert ending == {(key, id_) for key, ids_ in entries._ending.items() for id_ in ids_}
    reachable = [c for root in ledger.tree._roots.values() for c in _below(root)]
    assert {id(c) for c in reachable} == {id(c) for c in chunks}


def chunk_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/chunks/*/*.kv"))


def file_of(folder: Path, key: bytes) -> Path:
    (path,) = folder.glob(f"*/chunks/*/{key.hex()}.kv")
    return path


def no_space(*_: object) -> None:
    """Stands in for a write."""
    raise OSError(28, "No space left on device")


def _below(chunk: Chunk) -> list[Chunk]:
    below = list(chunk.children())
    for child in below:  # grows
        below += child.children()
    return below


def replayed(store, cursor, text, pieces):
    """The ids that were sampled for exactly `text`."""
    found, end = store.replay(cursor, text, 0, {len(text)}, pieces)
    assert end == (len(text) if found else 0)
    return found
